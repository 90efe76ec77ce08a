//! Tasks that only serve: parameter servers, and towers of a client.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use anyhow::Result;

use super::cluster::{identity, ranges};
use super::output::{note, print};
use super::security::security;
use super::watchdog::Watchdog;
use crate::cluster::{Place, TaskId};
use crate::config::{DataConfig, RunConfig};
use crate::device::Device;
use crate::device::cpu::CpuDevice;
use crate::model::{Compiled, Model};
use crate::ps::{Mode, Shard};
use crate::rpc::{
    Attendance, Failure, Identity, Members, ParameterServer, Runtime, Server, Services,
    TowerServer, TowerSizes, attend, listen, towers, variables,
};
use crate::train::{LocalTowers, computing_tasks, local_towers, store_settings, update_mode};
use crate::util::clock::Clock;
use crate::util::stats;

/// What a serving task starts with.
pub(super) struct Serve<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) compiled: &'a Arc<Compiled>,
    pub(super) place: &'a Place,
    pub(super) clock: &'a dyn Clock,
    pub(super) signal: &'a AtomicUsize,
    /// How long the others are waited for.
    pub(super) rendezvous: Duration,
    /// Seconds; see [`Watchdog`].
    pub(super) stall_timeout: u64,
}

/// A server that runs.
struct Running {
    runtime: Runtime,
    members: Arc<Members>,
    server: Server,
}

impl Serve<'_> {
    /// The examples of an epoch as a task knows them that reads no data.
    fn examples(&self) -> usize {
        self.config.data.examples.unwrap_or(DataConfig::DEFAULT_EXAMPLES) as usize
    }

    fn start(&self, members: Arc<Members>, services: Services) -> Result<Running> {
        let Self { config, place, .. } = self;
        let identity: Arc<Identity> =
            identity(config, place, self.compiled, self.examples(), self.clock);
        let runtime = Runtime::start()?;
        let security = security(&config.cluster, &place.task)?;
        let address = place.spec.address(&place.task).unwrap_or_default();
        let listener = listen(&identity, address, &security)?;
        let server =
            Server::start(&runtime, listener, identity, &security, members.clone(), services)?;
        Ok(Running { runtime, members, server })
    }

    fn attendance<'a>(
        &'a self,
        served: &'a [TaskId],
        all_needed: bool,
        note: &'a (dyn Fn(&str) + Sync),
    ) -> Attendance<'a> {
        let (own, signal, rendezvous) = (&self.place.task, self.signal, self.rendezvous);
        Attendance { own, served, all_needed, signal, rendezvous, note }
    }

    /// The exit code of a task that served.
    fn ended(&self, failure: Option<Failure>) -> u8 {
        failure.map_or(0, |Failure { task, reason, code }| {
            let own = self.place.task.to_string();
            match task == own {
                true => note(&format!("{own}: {reason}")),
                false => note(&format!("{own}: {task} stopped the run: {reason}")),
            }
            code
        })
    }

    /// Serves the variables of one ps task until the `trainers` are done.
    pub(super) fn parameters(&self, trainers: &[TaskId]) -> Result<u8> {
        let Self { config, compiled, place, .. } = self;
        let computing = computing_tasks(config, &place.spec).len();
        let settings = store_settings(config, self.examples(), computing);
        let mode = update_mode(config, trainers.len());
        let synchronous = matches!(mode, Mode::Sync(_));
        // Indices may be sparse.
        let rank = place.spec.ps_tasks().iter().position(|ps| *ps == place.task).unwrap_or(0);
        let own = ranges(config, place, compiled).swap_remove(rank);
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(0, 1)?);
        let trained = compiled.table().trained_len();
        let shard = Shard::new(own, trained, settings.clone(), mode, device)?;
        let bytes = stats::bytes(4 * shard.floats() as u64);
        let (steps, members) = (config.train.max_steps, Arc::new(Members::default()));
        let parameters = ParameterServer::new(
            shard,
            synchronous,
            &settings,
            steps,
            trainers.to_vec(),
            members.clone(),
        );
        let running = self.start(members, variables(parameters.clone()))?;
        print(&format!(
            "{} serves {bytes} of variables on {}, {}, to {} workers\n",
            place.task,
            running.server.address,
            config.cluster.mode,
            trainers.len()
        ))?;
        let say = |words: &str| note(&format!("{}: {words}", place.task));
        let watched = parameters.clone();
        let name = Some(place.task.to_string());
        let _watchdog = Watchdog::start(name, self.stall_timeout, move || watched.standing());
        let serving = parameters.clone().run(self.attendance(trainers, synchronous, &say));
        let failure = running.runtime.block_on(serving);
        for (worker, tally) in parameters.tallies() {
            print(&format!(
                "{}: {worker} gave {} gradients that count, {} came too late\n",
                place.task, tally.applied, tally.stale
            ))?;
        }
        Ok(self.ended(failure))
    }

    /// Computes gradients for `client` until it is done.
    pub(super) fn towers(&self, model: &dyn Model, client: TaskId) -> Result<u8> {
        let Self { config, compiled, place, .. } = self;
        let LocalTowers { devices, towers: own } = local_towers(config, compiled)?;
        let batch = config.data.batch_size;
        let sizes = TowerSizes {
            slab: compiled.table().slab_len(),
            features: batch * model.features().iter().product::<usize>(),
            labels: batch,
        };
        let server = TowerServer::new(place.task.clone(), own, sizes)?;
        let running = self.start(Arc::new(Members::default()), towers(server.clone()))?;
        let name = Some(place.task.to_string());
        let _watchdog = Watchdog::start(name, self.stall_timeout, move || {
            let served = server.served();
            (served, format!("{served} micro-batches so far, waiting for the next"))
        });
        let (address, each) = (running.server.address, devices[0].describe());
        let towers = match devices.len() {
            1 => format!("a tower of {each}"),
            n => format!("{n} towers of {each} each"),
        };
        print(&format!("{} serves {towers} on {address} to {client}\n", place.task))?;
        let say = |words: &str| note(&format!("{}: {words}", place.task));
        let served = [client];
        let attendance = self.attendance(&served, true, &say);
        let serving = attend(&running.members, attendance, || ());
        let failure = running.runtime.block_on(serving);
        Ok(self.ended(failure))
    }
}
