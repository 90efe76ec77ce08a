//! [`assemble`]: from a configuration to trainers. The one place where the ways to distribute differ.

use std::sync::Arc;

use anyhow::{Context, Result};

use super::losses::Losses;
use super::optimizer::{rule, schedule};
use super::reducer::{Averaging, Gradients};
use super::trainer::{Ahead, Trainer};
use crate::cluster::{DeviceKind, DeviceName};
use crate::config::{
    ClusterMode, Convolution, OnDevice, Precision, RunConfig, TowerDevices, VariablePlacement,
};
use crate::data::{Drawn, InputPipeline, PipelineSpec, Source};
use crate::device::cpu::bf16::Unit;
use crate::device::cpu::{self, ConvAlgorithm, CpuDevice};
use crate::device::cuda::{self, CudaDevice};
use crate::device::{DRAW, Device, DeviceError};
use crate::model::Compiled;
use crate::reduce::{Link, SEGMENT};
use crate::store::{LocalStore, SharedStore, State, StateLayout, StoreSettings, VariableStore};
use crate::tower::{LocalTower, Tower};
use crate::util::clock::Clock;
use crate::util::cores;

/// Steps on GPUs in a row whose losses need not be read.
const UNREAD: usize = 63;

/// A run ready to start.
pub struct Assembly {
    /// One, or one per tower where towers do not wait for each other.
    pub trainers: Vec<Trainer>,
    /// Names of the towers' devices.
    pub towers: Vec<DeviceName>,
    /// Name of the device that holds the variables; none where every tower has its own.
    pub variables: Option<DeviceName>,
    /// The store in words, for the header.
    pub store: &'static str,
    /// The reducer in words, for the header.
    pub reducer: String,
    /// Examples of one update.
    pub global_batch: usize,
    /// Whether GPUs keep the data and distort it.
    pub on_device: bool,
    /// What one tower computes with, in words.
    pub tower_words: String,
    /// Gradients meet and variables change here.
    pub host: Arc<dyn Device>,
    /// Evaluation runs here.
    pub evaluation: Arc<dyn Device>,
}

/// This process's part in a cluster.
pub struct Part {
    /// Its place among the workers.
    pub rank: usize,
    /// Workers.
    pub size: usize,
    /// How they meet.
    pub fabric: Fabric,
    /// Towers on other tasks; none where this process computes itself.
    pub towers: Vec<Box<dyn Tower>>,
}

/// How workers meet.
pub enum Fabric {
    /// There is one.
    Alone,
    /// At variables that are elsewhere.
    Parameters(Box<dyn VariableStore>),
    /// At each other.
    Collective(Box<dyn Link>),
}

impl Part {
    /// Of a run without a cluster.
    pub fn alone() -> Self {
        Self { rank: 0, size: 1, fabric: Fabric::Alone, towers: Vec::new() }
    }
}

/// Devices of this process, with a tower on each.
pub struct LocalTowers {
    /// As many parts of the CPU's threads.
    pub devices: Vec<Arc<dyn Device>>,
    /// In the devices' order.
    pub towers: Vec<Box<dyn Tower>>,
}

/// A share of the CPU that computes as `config` says.
pub fn cpu_device(config: &RunConfig, ordinal: u32, threads: usize) -> Result<CpuDevice> {
    let conv = match config.conv {
        Convolution::Auto => ConvAlgorithm::Auto,
        Convolution::Direct => ConvAlgorithm::Direct,
        Convolution::Winograd => ConvAlgorithm::Winograd,
    };
    let precision = match config.precision {
        // Evaluation and sums on the host, where GPUs compute in tf32.
        Precision::F32 | Precision::Tf32 => cpu::Precision::F32,
        Precision::Bf16 => cpu::Precision::Bf16(Unit::detect()),
    };
    Ok(CpuDevice::new(ordinal, threads)?.with_conv(conv).with_precision(precision))
}

/// The towers that `config` asks for.
pub fn local_towers(config: &RunConfig, compiled: &Arc<Compiled>) -> Result<LocalTowers> {
    let devices = match config.towers.devices {
        TowerDevices::Gpus(_) => gpus(config)?,
        TowerDevices::Cpus(count) => {
            let threads = (config.towers.threads.unwrap_or_else(cores) / count).max(1);
            let cpu = |i| Ok(Arc::new(cpu_device(config, i as u32, threads)?) as Arc<dyn Device>);
            (0..count).map(cpu).collect::<Result<Vec<_>>>()?
        }
    };
    let mut towers = Vec::new();
    for device in &devices {
        towers.push(Box::new(LocalTower::new(device.clone(), compiled.clone())?) as _);
    }
    Ok(LocalTowers { devices, towers })
}

/// The GPUs that `config` asks for.
fn gpus(config: &RunConfig) -> Result<Vec<Arc<dyn Device>>> {
    let precision = match config.precision {
        Precision::Tf32 => cuda::Precision::Tf32,
        Precision::F32 => cuda::Precision::F32,
        Precision::Bf16 => cuda::Precision::Bf16,
    };
    let open = |i| Ok(Arc::new(CudaDevice::new(i, precision)?) as Arc<dyn Device>);
    config.towers.gpus().into_iter().map(open).collect()
}

/// Where GPUs keep the pictures of `source` and distort them: then what says how, in place of the source.
fn on_gpus(
    config: &RunConfig,
    devices: &[Arc<dyn Device>],
    source: &Arc<dyn Source>,
) -> Result<Option<Arc<dyn Source>>> {
    const _: () = assert!(DRAW == Drawn::LEN);
    let share = match (config.data.on_device, config.towers.devices) {
        (OnDevice::Never, _) | (_, TowerDevices::Cpus(_)) => return Ok(None),
        (OnDevice::Auto, TowerDevices::Gpus(_)) => 0.25,
        (OnDevice::Always, TowerDevices::Gpus(_)) => 1.0,
    };
    let Some(drawn) = source.drawn().filter(|_| !devices.is_empty()) else { return Ok(None) };
    let pictures = drawn.pictures();
    let planes: Vec<&[u8]> = (0..pictures.len()).map(|i| pictures.planes(i)).collect();
    for device in devices {
        if !device.keep_pictures(&planes, share)? {
            let asked = "data.on_device: always".to_owned();
            let reason = format!("the pictures do not fit into the memory of {}", device.name());
            return match config.data.on_device {
                OnDevice::Always => Err(DeviceError::Absent { asked, reason }.into()),
                OnDevice::Auto | OnDevice::Never => Ok(None),
            };
        }
    }
    Ok(Some(Arc::new(drawn)))
}

/// Micro-batches behind one update, over all workers whose gradients are in it.
fn micro_batches_per_update(config: &RunConfig, workers: usize) -> usize {
    let own = match config.towers.asynchronous {
        true => 1,
        false => config.towers.count() * config.towers.accumulate,
    };
    let workers = match config.cluster.mode {
        ClusterMode::PsAsync if workers > 1 => 1,
        ClusterMode::PsSync => {
            config.cluster.replicas_to_aggregate.map_or(workers, |replicas| replicas as usize)
        }
        _ => workers,
    };
    own * workers
}

/// How variables start and change; the same on a worker and on a ps task.
pub fn store_settings(config: &RunConfig, examples: usize, workers: usize) -> StoreSettings {
    let global_batch = config.data.batch_size * micro_batches_per_update(config, workers);
    StoreSettings {
        seed: config.seed,
        rule: rule(&config.optimizer),
        schedule: schedule(config, examples, global_batch),
        moving_average: config.moving_average.map(|decay| decay as f32),
    }
}

/// Plugs together what `config` asks for. `start` is a checkpoint and the examples consumed until then.
pub fn assemble(
    config: &RunConfig,
    compiled: &Arc<Compiled>,
    source: &Arc<dyn Source>,
    start: Option<(&State, u64)>,
    clock: &Arc<dyn Clock>,
    part: Part,
) -> Result<Assembly> {
    let threads = config.towers.threads.unwrap_or_else(cores);
    let LocalTowers { devices, towers } = match part.towers.is_empty() {
        true => local_towers(config, compiled)?,
        false => LocalTowers { devices: Vec::new(), towers: part.towers },
    };
    let host: Arc<dyn Device> = match (config.towers.devices, &devices[..]) {
        (TowerDevices::Cpus(_), [one]) => one.clone(),
        _ => Arc::new(cpu_device(config, 0, threads)?),
    };
    let evaluation = match config.towers.devices {
        TowerDevices::Gpus(_) => devices.first().unwrap_or(&host).clone(),
        TowerDevices::Cpus(_) => host.clone(),
    };
    let drawn = on_gpus(config, &devices, source)?;
    let on_device = drawn.is_some();
    let source = drawn.as_ref().unwrap_or(source);
    let n_towers = towers.len();
    let names = towers.iter().map(|tower| tower.device().clone()).collect();
    let tower_words = towers.first().map(|tower| tower.describe()).unwrap_or_default();
    // Workers with as many towers as this configuration says.
    let workers = part.size * n_towers / config.towers.count();

    let own_copies = config.variables == VariablePlacement::Replicated;
    let table = Arc::new(compiled.table().clone());
    let settings = store_settings(config, source.len(), workers);
    let masters = if own_copies { devices.clone() } else { vec![host.clone()] };
    let local = |position: &mut u64| -> Result<LocalStore> {
        let mut store = LocalStore::new(table.clone(), settings.clone(), masters)?;
        if let Some((state, consumed)) = start {
            store.restore(state)?;
            *position = consumed;
        }
        Ok(store)
    };
    let build = Build { config, compiled, source, host: &host, own_copies, clock };
    let computing = &devices[..];
    let own = (n_towers * config.towers.accumulate) as u64;
    let turn = Turn { group: own, stride: own * part.size as u64 };
    // Where this worker's examples of the step at hand begin.
    let share = part.rank as u64 * own * config.data.batch_size as u64;
    let at = |step: u64| step * turn.stride * config.data.batch_size as u64 + share;
    let mut position = 0;
    let in_words =
        if own_copies { "replicated, one copy per tower" } else { "one copy on the CPU" };
    let (trainers, store, reducer) = match part.fabric {
        Fabric::Parameters(store) => {
            let rounds = match config.cluster.mode {
                ClusterMode::PsAsync => store.global_step() / part.size as u64,
                ClusterMode::PsSync
                | ClusterMode::Collective
                | ClusterMode::InGraph
                | ClusterMode::Session => store.global_step(),
            };
            let towers = (towers, computing);
            let (trainer, local) = build.trainer(towers, 0, store, None, at(rounds), turn)?;
            let mode = config.cluster.mode;
            let words = if n_towers > 1 {
                format!("{mode}, {local} in this worker")
            } else {
                mode.to_string()
            };
            (vec![trainer], "on parameter servers", words)
        }
        Fabric::Collective(mut link) => {
            let mut store = local(&mut position)?;
            agree(&mut *link, &mut store, &StateLayout::new(table, &settings))?;
            let position = at(store.global_step());
            let (towers, link) = ((towers, computing), Some(link));
            let (trainer, words) =
                build.trainer(towers, 0, Box::new(store), link, position, turn)?;
            (vec![trainer], in_words, words)
        }
        Fabric::Alone if config.towers.asynchronous => {
            let store = local(&mut position)?;
            let len = compiled.table().slab_len();
            let stores = SharedStore::split(store, len, config.train.max_steps, &devices)?;
            let turn = Turn { group: 1, stride: n_towers as u64 };
            let trainers = towers
                .into_iter()
                .zip(stores)
                .enumerate()
                .map(|(i, (tower, store))| {
                    let position = position + (i * config.data.batch_size) as u64;
                    // Each gradient goes to the shared variables in the host's memory.
                    let tower = (vec![tower], &[][..]);
                    let made = build.trainer(tower, i, Box::new(store), None, position, turn);
                    made.map(|(trainer, _)| trainer)
                })
                .collect::<Result<Vec<_>>>()?;
            (trainers, "shared on the CPU, updated by each tower on its own", "none".to_owned())
        }
        Fabric::Alone => {
            let store = local(&mut position)?;
            let towers = (towers, computing);
            let (trainer, words) =
                build.trainer(towers, 0, Box::new(store), None, position, turn)?;
            (vec![trainer], in_words, words)
        }
    };
    Ok(Assembly {
        trainers,
        towers: names,
        variables: (!own_copies).then(|| DeviceName::local(DeviceKind::Cpu, 0)),
        store,
        reducer,
        global_batch: config.data.batch_size * micro_batches_per_update(config, workers),
        on_device,
        tower_words,
        host,
        evaluation,
    })
}

/// How a trainer's batches lie among everybody's, in batches.
#[derive(Clone, Copy)]
struct Turn {
    group: u64,
    stride: u64,
}

/// All ranks take over what rank 0 has, so that nobody else needs the checkpoint.
fn agree(link: &mut dyn Link, store: &mut LocalStore, layout: &StateLayout) -> Result<()> {
    // Tags from the end: the reducer's begin at 0.
    let mut tag = u64::MAX;
    let mut next = || {
        tag -= 1;
        tag
    };
    // A step is two whole numbers that f32 holds exactly.
    const LOW: u64 = 1 << 24;
    if link.rank() == 0 {
        let state = store.snapshot()?;
        let slabs = layout.slabs(&state)?;
        let step = [(state.global_step % LOW) as f32, (state.global_step / LOW) as f32];
        for piece in std::iter::once(&step[..]).chain(slabs.iter().flat_map(|s| s.chunks(SEGMENT)))
        {
            let tag = next();
            (1..link.size()).try_for_each(|to| link.send(to, tag, piece))?;
        }
        return Ok(());
    }
    let mut step = [0.0; 2];
    link.recv(0, next(), &mut step)?;
    let mut slabs = layout.slabs(&store.snapshot()?)?;
    for piece in slabs.iter_mut().flat_map(|slab| slab.chunks_mut(SEGMENT)) {
        link.recv(0, next(), piece)?;
    }
    let global_step = step[0] as u64 + LOW * step[1] as u64;
    Ok(store.restore(&layout.state(global_step, &slabs))?)
}

/// What all trainers of a run have in common.
struct Build<'a> {
    config: &'a RunConfig,
    compiled: &'a Arc<Compiled>,
    source: &'a Arc<dyn Source>,
    host: &'a Arc<dyn Device>,
    own_copies: bool,
    clock: &'a Arc<dyn Clock>,
}

/// Towers, and the devices of those that are in this process.
type Towers<'a> = (Vec<Box<dyn Tower>>, &'a [Arc<dyn Device>]);

impl Build<'_> {
    fn trainer(
        &self,
        (towers, devices): Towers<'_>,
        first_tower: usize,
        store: Box<dyn VariableStore>,
        link: Option<Box<dyn Link>>,
        position: u64,
        turn: Turn,
    ) -> Result<(Trainer, String)> {
        let config = self.config;
        let n_batches = towers.len() * config.towers.accumulate;
        let table = Arc::new(self.compiled.table().clone());
        let gradients = Gradients {
            config,
            host: self.host,
            devices,
            own_copies: self.own_copies,
            count: n_batches,
            table: &table,
        };
        // Where all of a step stays on GPUs of this process, nobody has to wait for each.
        let on_gpus = matches!(config.towers.devices, TowerDevices::Gpus(_)) && !devices.is_empty();
        let unread = if on_gpus && self.own_copies && link.is_none() { UNREAD } else { 0 };
        let Averaging { reducer, grads, words } = gradients.average(link)?;
        let spec = PipelineSpec {
            seed: config.seed,
            shuffle: true,
            batch: config.data.batch_size,
            position,
            group: turn.group,
            stride: turn.stride,
            threads: config.data.threads,
            depth: 2 * n_batches,
        };
        let input = InputPipeline::start(self.source.clone(), spec)?;
        let ahead = match towers.iter().any(|tower| tower.fetches_ahead()) {
            true => Ahead::Known(Vec::new(), input.position()),
            false => Ahead::Unknown,
        };
        let drivers = match towers.len() {
            1 => None,
            n => {
                let builder = rayon::ThreadPoolBuilder::new().num_threads(n);
                let named = builder.thread_name(|i| format!("tower_{i}"));
                Some(named.build().context("cannot start a thread per tower")?)
            }
        };
        let names = self.compiled.loss_names();
        let losses = Losses::new(names, towers.len(), config.towers.accumulate, unread);
        let trainer = Trainer {
            clock: self.clock.clone(),
            progress: Arc::default(),
            trace: None,
            input,
            towers,
            first_tower,
            reducer,
            store,
            table,
            losses,
            drivers,
            batch_size: config.data.batch_size,
            batches: vec![Default::default(); n_batches],
            ahead,
            grads,
        };
        Ok((trainer, words))
    }
}
