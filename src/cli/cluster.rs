//! This process's part in a cluster: a parameter server, or a worker that is connected to the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use anyhow::Result;

use super::args::TrainArgs;
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
    GrpcLink, Identity, Inbox, Members, ParameterServer, Peer, RemoteStore, Runtime, Server,
    Timeouts, collective, listen, variables,
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
    let failure = runtime.block_on(parameters.clone().run(&place.task, signal));
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

/// Connects a worker; the chief of a cluster with parameter servers gives them their first values: `start`'s, or the seed's.
pub(super) fn connect(
    config: &RunConfig,
    compiled: &Arc<Compiled>,
    examples: usize,
    place: &Place,
    start: Option<&State>,
    clock: &Arc<dyn Clock>,
    rendezvous: Duration,
) -> Result<(Worker, Part)> {
    let workers = place.spec.training_tasks();
    let size = workers.len();
    let rank = workers.iter().position(|task| *task == place.task).unwrap_or(0);
    let is_chief = place.spec.chief().as_ref() == Some(&place.task);
    let identity = identity(config, place, compiled, examples, &**clock);
    let runtime = Runtime::start()?;
    let security = security(&config.cluster, &place.task)?;
    let listener =
        listen(&identity, place.spec.address(&place.task).unwrap_or_default(), &security)?;
    let members = Arc::new(Members::default());
    let timeouts = Timeouts { rendezvous, ..Timeouts::default() };
    let waiting = |missing: &[TaskId]| {
        let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
        note(&format!("{}: waiting for {}", place.task, names.join(", ")));
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
    let peers =
        runtime.block_on(Peer::connect_all(&targets, &identity, &security, timeouts, &waiting))?;

    let fabric = if collective_mode {
        let (runtime, identity) = (runtime.clone(), identity.clone());
        Fabric::Collective(Box::new(GrpcLink::open(
            runtime,
            identity,
            members,
            rank,
            peers.clone(),
            ends,
        )))
    } else {
        let table = Arc::new(compiled.table().clone());
        let settings = store_settings(config, examples, size);
        let layout = StateLayout::new(table.clone(), &settings);
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(0, 1)?);
        let slab = device.alloc(table.slab_len())?;
        let shards = peers.iter().cloned().zip(ranges(config, place, compiled)).collect();
        let mut store = RemoteStore::new(runtime.clone(), identity.clone(), shards, slab, layout);
        match store.version(!is_chief)? {
            Some(step) if is_chief => {
                note(&format!(
                    "{}: the parameter servers live at step {step}: going on",
                    place.task
                ));
            }
            Some(_) => {}
            None => {
                let mut local = LocalStore::new(table, settings, vec![device])?;
                let state = match start {
                    Some(state) => state.clone(),
                    None => local.snapshot()?,
                };
                store.restore(&state)?;
            }
        }
        Fabric::Parameters(Box::new(store))
    };
    let task = place.task.clone();
    let worker = Worker { task, runtime, identity, peers, _server: server };
    Ok((worker, Part { rank, size, fabric }))
}

impl Worker {
    /// Says good-bye to everybody: the work is done, or it failed with this exit code and everybody shall stop.
    pub(super) fn leave(&self, failure: Option<(&str, u8)>) {
        Peer::leave_all(&self.runtime, &self.peers, &self.identity, failure);
    }

    /// The task, as it stands before each of its lines.
    pub(super) fn name(&self) -> String {
        self.task.to_string()
    }
}
