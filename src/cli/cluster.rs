//! This process's part in a cluster: a parameter server, or a worker that is connected to the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;

use super::args::TrainArgs;
use super::exit;
use super::output::{note, print};
use super::security::security;
use crate::cluster::{Place, PlaceFlags, TaskId};
use crate::config::{
    ClusterMode, DataConfig, Placement as PlacementConfig, RunConfig, fingerprint,
};
use crate::device::Device;
use crate::device::cpu::CpuDevice;
use crate::model::Compiled;
use crate::ps::{Accumulator, Mode, Placement, Rounds, Shard, WhenShort, assign};
use crate::rpc::{
    Failure, GrpcLink, Identity, Inbox, Members, ParameterServer, Peer, RemoteStore, RpcError,
    Runtime, Server, Timeouts, collective, listen, variables,
};
use crate::store::{LocalStore, State, StateLayout, VariableStore};
use crate::train::{Fabric, Part, store_settings};
use crate::util::clock::Clock;

/// Where this process stands: flags over file over environment; `None` for a run without a cluster.
#[allow(clippy::disallowed_methods, reason = "the one place where a task's place is looked up")]
pub(super) fn place(config: &RunConfig, args: &TrainArgs) -> Result<Option<Place>> {
    let flags = PlaceFlags {
        ps_hosts: args.ps_hosts.clone(),
        worker_hosts: args.worker_hosts.clone(),
        job_name: args.job_name.clone(),
        task_index: args.task_index,
    };
    let jobs = &config.cluster.jobs;
    let file = (!jobs.is_empty()).then_some(("the configuration", jobs));
    Ok(Place::resolve(&flags, file, &|name| std::env::var(name).ok())?)
}

/// What this task tells the others about itself. Settings must be equal everywhere.
fn identity(
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
        ("training examples".to_owned(), examples.to_string()),
        // A server applies nothing beyond, and who would go on would push for ever.
        ("train.max_steps".to_owned(), config.train.max_steps.to_string()),
        ("cluster.jobs".to_owned(), place.spec.to_string()),
        ("cluster.mode".to_owned(), cluster.mode.to_string()),
        ("cluster.placement".to_owned(), cluster.placement.to_string()),
        ("cluster.exchange".to_owned(), cluster.exchange.to_string()),
        ("cluster.max_staleness".to_owned(), format!("{:?}", cluster.max_staleness)),
        (
            "cluster.replicas_to_aggregate".to_owned(),
            format!("{:?}", cluster.replicas_to_aggregate),
        ),
    ]);
    let incarnation = clock.wall().as_nanos() as u64;
    Arc::new(Identity { task: place.task.clone(), incarnation, settings })
}

/// The slab's ranges of each ps task.
fn ranges(
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

/// The examples of an epoch as a ps task knows them, which reads no data.
fn expected_examples(config: &RunConfig) -> usize {
    config.data.examples.unwrap_or(DataConfig::DEFAULT_EXAMPLES) as usize
}

/// Serves the variables of one ps task until the workers are done.
pub(super) fn serve_parameters(
    config: &RunConfig,
    compiled: &Compiled,
    place: &Place,
    clock: &Arc<dyn Clock>,
    signal: &Arc<AtomicUsize>,
    rendezvous: Duration,
) -> Result<u8> {
    let workers = place.spec.training_tasks();
    let identity = identity(config, place, compiled, expected_examples(config), &**clock);
    let settings = store_settings(config, expected_examples(config), workers.len());
    let mode = match config.cluster.mode {
        ClusterMode::PsAsync => {
            Mode::Async { workers: workers.len(), max_staleness: config.cluster.max_staleness }
        }
        ClusterMode::PsSync | ClusterMode::Collective => {
            let aggregate = config.cluster.replicas_to_aggregate;
            Mode::Sync(Accumulator::new(
                Rounds {
                    workers: workers.len(),
                    aggregate: aggregate.map_or(workers.len(), |n| n as usize),
                    when_short: WhenShort::GoOn { min: 1 },
                },
                0,
            ))
        }
    };
    let synchronous = matches!(mode, Mode::Sync(_));
    let own = ranges(config, place, compiled).swap_remove(place.task.index as usize);
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new(0, 1)?);
    let shard = Shard::new(own, settings.clone(), mode, device)?;
    let floats = shard.floats();
    let members = Arc::new(Members::default());
    let parameters = ParameterServer::new(
        shard,
        synchronous,
        &settings,
        config.train.max_steps,
        workers.clone(),
        members.clone(),
    );
    let runtime = Runtime::start()?;
    let security = security(&config.cluster, &place.task)?;
    let listener =
        listen(&identity, place.spec.address(&place.task).unwrap_or_default(), &security)?;
    let services = variables(parameters.clone());
    let server = Server::start(&runtime, listener, identity, &security, members.clone(), services)?;
    let bytes = crate::util::stats::bytes(4 * floats as u64);
    print(&format!(
        "{} serves {bytes} of variables on {}, {}, to {} workers\n",
        place.task,
        server.address,
        config.cluster.mode,
        workers.len()
    ))?;
    let waiting = |missing: &[TaskId]| wait_note(&place.task, missing);
    let serving = parameters.clone().run(&place.task, signal, rendezvous, &waiting);
    let failure = runtime.block_on(serving);
    for (worker, tally) in parameters.tallies() {
        print(&format!(
            "{}: {worker} gave {} gradients that count, {} came too late\n",
            place.task, tally.applied, tally.stale
        ))?;
    }
    match failure {
        None => Ok(0),
        Some(failure) => {
            note(&format!("{}: {} stopped the run: {}", place.task, failure.task, failure.reason));
            Ok(failure.code)
        }
    }
}

/// A worker that is connected to everybody it trains with.
pub(super) struct Worker {
    task: TaskId,
    runtime: Runtime,
    identity: Arc<Identity>,
    peers: Vec<Peer>,
    /// Serves until the worker is dropped.
    _server: Server,
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
    /// The checkpoint that a chief goes on from.
    pub(super) state: Option<&'a State>,
    pub(super) clock: &'a Arc<dyn Clock>,
    pub(super) signal: &'a AtomicUsize,
    /// How long others are waited for.
    pub(super) rendezvous: Duration,
}

/// Connects a worker; the chief of a cluster with parameter servers gives them their first values.
pub(super) fn connect(start: &Start<'_>) -> Result<(Worker, Part)> {
    let &Start { config, compiled, examples, place, clock, signal, rendezvous, .. } = start;
    let workers = place.spec.training_tasks();
    let size = workers.len();
    let rank = workers.iter().position(|task| *task == place.task).unwrap_or(0);
    let identity = identity(config, place, compiled, examples, &**clock);
    let runtime = Runtime::start()?;
    let security = security(&config.cluster, &place.task)?;
    let listener =
        listen(&identity, place.spec.address(&place.task).unwrap_or_default(), &security)?;
    let members = Arc::new(Members::default());
    let timeouts = Timeouts { rendezvous, ..Timeouts::default() };
    let waiting = |missing: &[TaskId]| wait_note(&place.task, missing);
    let over = || match members.failure() {
        Some(Failure { task, reason, code }) => Err(RpcError::Stopped { task, reason, code }),
        None => interrupted(&place.task, signal),
    };
    let with_address = |tasks: Vec<TaskId>| -> Vec<(TaskId, String)> {
        let address = |task: &TaskId| place.spec.address(task).unwrap_or_default().to_owned();
        tasks.into_iter().map(|task| (task.clone(), address(&task))).collect()
    };
    let others: Vec<TaskId> = workers.iter().filter(|t| **t != place.task).cloned().collect();
    let collective_mode = config.cluster.mode == ClusterMode::Collective;
    let (inbox, ends) = Inbox::new(workers);
    let server = Server::start(
        &runtime,
        listener,
        identity.clone(),
        &security,
        members.clone(),
        collective(inbox),
    )?;
    let targets = with_address(if collective_mode { others } else { place.spec.ps_tasks() });
    let gathering = Peer::connect_all(&targets, &identity, &security, timeouts, &waiting, &over);
    let peers = runtime.block_on(gathering)?;

    let task = place.task.clone();
    let worker = Worker { task, runtime, identity, peers, _server: server };
    let fabric = if collective_mode {
        let (runtime, identity, peers) =
            (worker.runtime.clone(), worker.identity.clone(), worker.peers.clone());
        let link = GrpcLink::open(runtime, identity, members, rank, peers, ends);
        Fabric::Collective(Box::new(link))
    } else {
        let store = worker.variables(start, size);
        let store = store.inspect_err(|error| worker.fail(error))?;
        Fabric::Parameters(Box::new(store))
    };
    Ok((worker, Part { rank, size, fabric }))
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

/// How often a worker that waits for the chief's values looks for a signal.
const GLANCE: Duration = Duration::from_millis(200);

impl Worker {
    /// The variables on the parameter servers: living ones, or those that the chief gives them now.
    fn variables(&self, start: &Start<'_>, size: usize) -> Result<RemoteStore> {
        let &Start { config, compiled, place, clock, signal, rendezvous, .. } = start;
        let table = Arc::new(compiled.table().clone());
        let settings = store_settings(config, start.examples, size);
        let layout = StateLayout::new(table.clone(), &settings);
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(0, 1)?);
        let slab = device.alloc(table.slab_len())?;
        let shards = self.peers.iter().cloned().zip(ranges(config, place, compiled)).collect();
        let synchronous = config.cluster.mode == ClusterMode::PsSync;
        let (runtime, identity) = (self.runtime.clone(), self.identity.clone());
        let mut store = RemoteStore::new(runtime, identity, shards, slab, layout, synchronous);
        let chief = place.spec.chief().filter(|chief| *chief != place.task);
        let Some(chief) = chief else {
            if let Some(step) = store.version()? {
                let task = &self.task;
                note(&format!("{task}: the parameter servers live at step {step}: going on"));
                return Ok(store);
            }
            let mut local = LocalStore::new(table, settings, vec![device])?;
            store.restore(&start.state.cloned().map_or_else(|| local.snapshot(), Ok)?)?;
            return Ok(store);
        };
        let (began, mut told) = (clock.monotonic(), clock.monotonic());
        while store.version_within(GLANCE)?.is_none() {
            interrupted(&self.task, signal)?;
            let now = clock.monotonic();
            if now - began >= rendezvous {
                let address = place.spec.address(&chief).unwrap_or_default().to_owned();
                let waited_secs = (now - began).as_secs_f64();
                let last = "it has given no values to the parameter servers".to_owned();
                return Err(RpcError::Missing {
                    missing: vec![(chief, address)],
                    waited_secs,
                    last,
                }
                .into());
            }
            if now - told >= Duration::from_secs(3) {
                told = now;
                wait_note(&self.task, std::slice::from_ref(&chief));
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
