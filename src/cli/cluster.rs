//! This process's part in a cluster: where it stands, and how one that trains is connected to the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;

use super::args::TrainArgs;
use super::exit;
use super::output::note;
use super::security::security;
use crate::cluster::{Place, PlaceFlags, TaskId};
use crate::config::{Placement as PlacementConfig, RunConfig, fingerprint};
use crate::device::Device;
use crate::device::cpu::CpuDevice;
use crate::model::Compiled;
use crate::ps::{Placement, assign};
use crate::rpc::{
    Failure, GrpcLink, Identity, Inbox, Members, Peer, RemoteStore, RemoteTower, RpcError, Runtime,
    Server, Standing, Timeouts, collective, listen,
};
use crate::store::{LocalStore, State, StateLayout, VariableStore};
use crate::tower::Tower;
use crate::train::{
    Fabric, Part, Training, computing_tasks, has_any_jobs, has_client, store_settings,
};
use crate::util::clock::Clock;

/// Where this process stands: flags over file over environment; `None` for a run without a cluster.
#[allow(clippy::disallowed_methods, reason = "the one place where a task's place is looked up")]
pub(super) fn place(config: &RunConfig, args: &TrainArgs) -> Result<Option<Place>> {
    let flags = PlaceFlags {
        ps_hosts: args.cluster.ps_hosts.clone(),
        worker_hosts: args.cluster.worker_hosts.clone(),
        job_name: args.cluster.job_name.clone(),
        task_index: args.cluster.task_index,
        client: has_any_jobs(config),
    };
    let jobs = &config.cluster.jobs;
    let file = (!jobs.is_empty()).then_some(("the configuration", jobs));
    Ok(Place::resolve(&flags, file, &|name| std::env::var(name).ok())?)
}

/// What this task tells the others about itself. Settings must be equal everywhere.
pub(super) fn identity(
    config: &RunConfig,
    place: &Place,
    compiled: &Compiled,
    examples: usize,
    clock: &dyn Clock,
) -> Arc<Identity> {
    let mut settings: BTreeMap<String, String> = fingerprint(config)
        .lines()
        .filter_map(|line| line.split_once(": "))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    let cluster = &config.cluster;
    settings.extend([
        ("layout of the variables".to_owned(), format!("{:016x}", compiled.table().fingerprint())),
        // A server applies nothing beyond, and who would go on would push for ever.
        ("train.max_steps".to_owned(), config.train.max_steps.to_string()),
        ("cluster.jobs".to_owned(), place.spec.to_string()),
        ("cluster.mode".to_owned(), cluster.mode.to_string()),
        ("cluster.placement".to_owned(), cluster.placement.to_string()),
        ("cluster.engine".to_owned(), cluster.engine.to_string()),
        ("cluster.exchange".to_owned(), cluster.exchange.to_string()),
        ("cluster.run_id".to_owned(), cluster.run_id.clone().unwrap_or_else(|| "none".to_owned())),
        ("cluster.wire".to_owned(), cluster.wire.to_string()),
        ("cluster.overlap".to_owned(), cluster.overlap.to_string()),
        ("cluster.max_staleness".to_owned(), format!("{:?}", cluster.max_staleness)),
        (
            "cluster.replicas_to_aggregate".to_owned(),
            format!("{:?}", cluster.replicas_to_aggregate),
        ),
    ]);
    // Towers of a client that holds the variables itself read no data and decay no rate.
    if !(has_client(config) && place.spec.ps_tasks().is_empty()) {
        settings.insert("training examples".to_owned(), examples.to_string());
    }
    let incarnation = clock.wall().as_nanos() as u64;
    Arc::new(Identity { task: place.task.clone(), incarnation, settings })
}

/// The slab's ranges of each ps task.
pub(super) fn ranges(
    config: &RunConfig,
    place: &Place,
    compiled: &Compiled,
) -> Vec<Vec<std::ops::Range<usize>>> {
    let placement = match config.cluster.placement {
        PlacementConfig::Even => Placement::Even,
        PlacementConfig::RoundRobin => Placement::RoundRobin,
        PlacementConfig::Greedy => Placement::Greedy,
    };
    assign(compiled.table(), place.spec.ps_tasks().len(), placement)
}

/// A worker that is connected to everybody it trains with.
pub(super) struct Worker {
    task: TaskId,
    runtime: Runtime,
    identity: Arc<Identity>,
    peers: Vec<Peer>,
    /// Serves until the worker is dropped.
    _server: Option<Server>,
}

/// Says for whom a task waits.
fn wait_note(task: &TaskId, missing: &[TaskId]) {
    let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
    note(&format!("{task}: waiting for {}", names.join(", ")));
}

/// What a worker starts with.
pub(super) struct Start<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) compiled: &'a Arc<Compiled>,
    /// In the training set.
    pub(super) examples: usize,
    pub(super) place: &'a Place,
    pub(super) training: &'a Training,
    /// The checkpoint that a chief goes on from.
    pub(super) state: Option<&'a State>,
    /// Whether this task has trained before: variables that are gone are restored, never made anew.
    pub(super) again: bool,
    pub(super) clock: &'a Arc<dyn Clock>,
    pub(super) signal: &'a Arc<AtomicUsize>,
    /// How long others are waited for.
    pub(super) rendezvous: Duration,
}

/// Connects a task that trains; the chief of a cluster with parameter servers gives them their first values.
pub(super) fn connect(start: &Start<'_>) -> Result<(Worker, Part)> {
    let &Start { config, compiled, examples, place, training, clock, signal, rendezvous, .. } =
        start;
    let &Training { rank, size, ref ps, ref serving, ref equals, .. } = training;
    let identity = identity(config, place, compiled, examples, &**clock);
    let runtime = Runtime::start()?;
    let security = security(&config.cluster, &place.task)?;
    let members = Arc::new(Members::default());
    let timeouts = Timeouts { rendezvous, again: start.again, ..Timeouts::default() };
    let waiting = |missing: &[TaskId]| wait_note(&place.task, missing);
    let over = || match members.failure() {
        Some(Failure { task, reason, code }) => Err(RpcError::Stopped { task, reason, code }),
        None => interrupted(&place.task, signal),
    };
    let (inbox, ends) = Inbox::new(place.spec.training_tasks(), members.clone());
    // A client that stands outside the cluster is called by nobody.
    let server = match place.spec.address(&place.task) {
        Some(address) => {
            let listener = listen(&identity, address, &security)?;
            let (identity, members) = (identity.clone(), members.clone());
            let services = collective(inbox);
            Some(Server::start(&runtime, listener, identity, &security, members, services)?)
        }
        None => None,
    };
    let address = |task: &TaskId| place.spec.address(task).unwrap_or_default().to_owned();
    let targets = ps.iter().chain(serving).chain(equals);
    let targets: Vec<_> = targets.map(|task| (task.clone(), address(task))).collect();
    let gathering = Peer::connect_all(&targets, &identity, &security, timeouts, &waiting, &over);
    let peers = runtime.block_on(gathering)?;
    Peer::end_with_signal(&runtime, &peers, &place.task, signal);

    let task = place.task.clone();
    let worker = Worker { task, runtime, identity, peers, _server: server };
    let (runtime, identity) = (&worker.runtime, &worker.identity);
    let fabric = if !ps.is_empty() {
        let store = worker.variables(start).inspect_err(|error| worker.fail(error))?;
        Fabric::Parameters(Box::new(store))
    } else if !serving.is_empty() {
        Fabric::Alone
    } else {
        let peers = worker.peers.clone();
        let link = GrpcLink::open(runtime.clone(), identity.clone(), members, rank, peers, ends);
        Fabric::Collective(Box::new(link))
    };
    let tower = |peer: &Peer, index: usize| -> Box<dyn Tower> {
        let (runtime, identity) = (runtime.clone(), identity.clone());
        Box::new(RemoteTower::new(runtime, identity, peer.clone(), index as u32))
    };
    let each = 0..config.towers.count();
    let computing = worker.peers[ps.len()..].iter().take(serving.len());
    let towers = computing.flat_map(|peer| each.clone().map(move |index| (peer, index)));
    let towers = towers.map(|(peer, index)| tower(peer, index)).collect();
    Ok((worker, Part { rank, size, fabric, towers }))
}

/// An error once a signal has come.
fn interrupted(task: &TaskId, signal: &AtomicUsize) -> Result<(), RpcError> {
    match signal.load(Ordering::Relaxed) {
        0 => Ok(()),
        number => Err(RpcError::Stopped {
            task: task.to_string(),
            reason: format!("interrupted by signal {number}"),
            code: 128 + number as u8,
        }),
    }
}

/// The error of a parameter server that lost its variables for good: waiting for it is of no use.
fn without_checkpoint(ps: &TaskId) -> RpcError {
    let reason = "it restarted without variables, and the train directory has no checkpoint to restore them from; \
                  start all tasks again, the chief with --resume or --overwrite";
    RpcError::Stopped { task: ps.to_string(), reason: reason.to_owned(), code: PEER_LOST }
}

/// The exit code of a run whose variables are gone.
const PEER_LOST: u8 = 5;

/// How often a worker that waits for the chief's values looks for a signal.
const GLANCE: Duration = Duration::from_millis(200);

impl Worker {
    /// The variables on the parameter servers: living ones, or those that the chief gives them now.
    fn variables(&self, start: &Start<'_>) -> Result<RemoteStore> {
        let &Start { config, compiled, place, training, clock, signal, rendezvous, .. } = start;
        let table = Arc::new(compiled.table().clone());
        let computing = computing_tasks(config, &place.spec).len();
        let settings = store_settings(config, start.examples, computing);
        let layout = StateLayout::new(table.clone(), &settings);
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(0, 1)?);
        let slab = device.alloc(table.slab_len())?;
        // The ps tasks come first.
        let shards = self.peers.iter().cloned().zip(ranges(config, place, compiled)).collect();
        let (runtime, identity) = (self.runtime.clone(), self.identity.clone());
        let mut store =
            RemoteStore::new(runtime, identity, shards, slab, layout, training.synchronous);
        let chief = &training.chief;
        if *chief == place.task {
            let task = &self.task;
            match (store.standing()?, start.state) {
                (Standing::Living(step), _) => {
                    note(&format!("{task}: the parameter servers live at step {step}: going on"));
                }
                (Standing::Torn(ps), None) => return Err(without_checkpoint(&ps).into()),
                (Standing::Empty, None) if start.again => {
                    return Err(without_checkpoint(&training.ps[0]).into());
                }
                (Standing::Empty, None) => {
                    store.restore(&LocalStore::new(table, settings, vec![device])?.snapshot()?)?;
                }
                (standing, Some(state)) => {
                    if start.again || standing != Standing::Empty {
                        let step = state.global_step;
                        note(&format!("{task}: restoring the parameter servers at step {step}"));
                    }
                    store.restore(state)?;
                }
            }
            return Ok(store);
        }
        let (began, mut told) = (clock.monotonic(), clock.monotonic());
        while store.version_within(GLANCE)?.is_none() {
            interrupted(&self.task, signal)?;
            let now = clock.monotonic();
            if now - began >= rendezvous {
                let address = place.spec.address(chief).unwrap_or_default().to_owned();
                let waited_secs = (now - began).as_secs_f64();
                let last = "it has given no values to the parameter servers".to_owned();
                return Err(RpcError::Missing {
                    missing: vec![(chief.clone(), address)],
                    again: start.again,
                    waited_secs,
                    last,
                }
                .into());
            }
            if now - told >= Duration::from_secs(3) {
                told = now;
                wait_note(&self.task, std::slice::from_ref(chief));
            }
        }
        Ok(store)
    }

    /// Says good-bye to everybody: it failed, and everybody shall stop.
    pub(super) fn fail(&self, error: &anyhow::Error) {
        self.leave(Some((&exit::chain(error), exit::code(error))));
    }

    /// Says good-bye to everybody: the work is done, or it failed with this exit code and everybody shall stop.
    pub(super) fn leave(&self, failure: Option<(&str, u8)>) {
        Peer::leave_all(&self.runtime, &self.peers, &self.identity, failure);
    }

    /// The task, as it stands before each of its lines.
    pub(super) fn name(&self) -> String {
        self.task.to_string()
    }
}
