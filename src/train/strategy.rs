//! [`assemble`]: from a configuration to trainers. The one place where the ways to distribute differ.

use std::sync::Arc;

use anyhow::{Context, Result, bail};

use super::tower::{LocalTower, Tower};
use super::trainer::Trainer;
use crate::cluster::{DeviceKind, DeviceName};
use crate::config::{
    LearningRateConfig, OptimizerConfig, Precision, Reduce, RunConfig, TowerDevices,
    UpdateRule as RuleConfig, VariablePlacement,
};
use crate::data::{InputPipeline, PipelineSpec, Source};
use crate::device::cpu::CpuDevice;
use crate::device::{Device, DeviceError};
use crate::model::Compiled;
use crate::optim::{Curve, Schedule, UpdateRule};
use crate::reduce::{CpuMean, GradientReducer, Independent};
use crate::store::{LocalStore, SharedStore, State, StoreSettings, VariableStore};
use crate::util::clock::Clock;

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
    pub reducer: &'static str,
    /// Examples of one update.
    pub global_batch: usize,
    /// Evaluation runs here.
    pub host: Arc<dyn Device>,
}

/// Plugs together what `config` asks for. `start` is a checkpoint and the examples consumed until then.
pub fn assemble(
    config: &RunConfig,
    compiled: &Arc<Compiled>,
    source: &Arc<dyn Source>,
    start: Option<(&State, u64)>,
    clock: &Arc<dyn Clock>,
) -> Result<Assembly> {
    if config.precision == Precision::Bf16 {
        bail!(DeviceError::Absent {
            asked: "precision: bf16".to_owned(),
            reason: "this version computes in f32 only; use precision: f32".to_owned(),
        });
    }
    if let TowerDevices::Gpus(n) = config.towers.devices {
        bail!(DeviceError::Absent {
            asked: format!("{n} GPU towers"),
            reason: "this version has CPU towers only; use --num-towers".to_owned(),
        });
    }
    let n_towers = config.towers.count();
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = config.towers.threads.unwrap_or(cores);
    let host: Arc<dyn Device> = Arc::new(CpuDevice::new(0, threads)?);
    let devices: Vec<Arc<dyn Device>> = match n_towers {
        1 => vec![host.clone()],
        _ => (0..n_towers)
            .map(|i| Ok(Arc::new(CpuDevice::new(i as u32, (threads / n_towers).max(1))?) as _))
            .collect::<Result<_, DeviceError>>()?,
    };
    let mut towers = Vec::new();
    for device in &devices {
        towers.push(LocalTower::new(device.clone(), compiled.clone())?);
    }

    let asynchronous = config.towers.asynchronous;
    let micro_batches = n_towers * config.towers.accumulate;
    let global_batch = config.data.batch_size * if asynchronous { 1 } else { micro_batches };
    let own_copies = config.variables == VariablePlacement::Replicated;
    let table = Arc::new(compiled.table().clone());
    let settings = StoreSettings {
        seed: config.seed,
        rule: rule(&config.optimizer),
        schedule: schedule(config, source.len(), global_batch),
        moving_average: config.moving_average.map(|decay| decay as f32),
    };
    let masters = if own_copies { devices.clone() } else { vec![host.clone()] };
    let mut store = LocalStore::new(table, settings, masters)?;
    let mut position = 0;
    if let Some((state, consumed)) = start {
        store.restore(state)?;
        position = consumed;
    }

    let build = Build { config, compiled, source, host: &host, clock };
    let names = |devices: &[Arc<dyn Device>]| devices.iter().map(|d| d.name().clone()).collect();
    let (trainers, store, reducer) = if asynchronous {
        let len = compiled.table().slab_len();
        let stores = SharedStore::split(store, len, config.train.max_steps, &devices)?;
        let trainers = towers
            .into_iter()
            .zip(stores)
            .enumerate()
            .map(|(i, (tower, store))| {
                let position = position + (i * config.data.batch_size) as u64;
                build.trainer(vec![tower], i, Box::new(store), position, n_towers as u64)
            })
            .collect::<Result<Vec<_>>>()?;
        (trainers, "shared on the CPU, updated by each tower on its own", "none")
    } else {
        let trainer = build.trainer(towers, 0, Box::new(store), position, 1)?;
        let reducer = trainer.reducer.name();
        let store =
            if own_copies { "replicated, one copy per tower" } else { "one copy on the CPU" };
        (vec![trainer], store, reducer)
    };
    Ok(Assembly {
        trainers,
        towers: names(&devices),
        variables: (!own_copies).then(|| DeviceName::local(DeviceKind::Cpu, 0)),
        store,
        reducer,
        global_batch,
        host,
    })
}

/// What all trainers of a run have in common.
struct Build<'a> {
    config: &'a RunConfig,
    compiled: &'a Arc<Compiled>,
    source: &'a Arc<dyn Source>,
    host: &'a Arc<dyn Device>,
    clock: &'a Arc<dyn Clock>,
}

impl Build<'_> {
    fn trainer(
        &self,
        towers: Vec<LocalTower>,
        first_tower: usize,
        store: Box<dyn VariableStore>,
        position: u64,
        stride: u64,
    ) -> Result<Trainer> {
        let config = self.config;
        let n_batches = towers.len() * config.towers.accumulate;
        let table = Arc::new(self.compiled.table().clone());
        let mut grads = Vec::new();
        for _ in 0..n_batches {
            grads.push(self.host.alloc(table.slab_len())?);
        }
        let reducer: Box<dyn GradientReducer> = match config.reduce {
            Reduce::None => Box::new(Independent),
            Reduce::Auto | Reduce::Cpu => {
                Box::new(CpuMean::new(self.host.clone(), n_batches, table.slab_len())?)
            }
            Reduce::Nccl => bail!(DeviceError::Absent {
                asked: "reduce: nccl".to_owned(),
                reason: "NCCL averages between GPUs, and this run has CPU towers".to_owned(),
            }),
        };
        let spec = PipelineSpec {
            seed: config.seed,
            shuffle: true,
            batch: config.data.batch_size,
            position,
            stride,
            threads: config.data.threads,
            depth: 2 * n_batches,
        };
        let input = InputPipeline::start(self.source.clone(), spec)?;
        let drivers = match towers.len() {
            1 => None,
            n => {
                let builder = rayon::ThreadPoolBuilder::new().num_threads(n);
                let named = builder.thread_name(|i| format!("tower_{i}"));
                Some(named.build().context("cannot start a thread per tower")?)
            }
        };
        let loss_names = self.compiled.loss_names();
        let n_losses = loss_names.len();
        Ok(Trainer {
            clock: self.clock.clone(),
            input,
            towers: towers.into_iter().map(|tower| Box::new(tower) as Box<dyn Tower>).collect(),
            first_tower,
            reducer,
            store,
            table,
            loss_names,
            drivers,
            batch_size: config.data.batch_size,
            batches: vec![Default::default(); n_batches],
            grads,
            losses: vec![0.0; n_batches * n_losses],
            mean_losses: vec![0.0; n_losses],
        })
    }
}

fn rule(config: &OptimizerConfig) -> UpdateRule {
    let clip = config.clip.map(|clip| clip as f32);
    match config.rule {
        RuleConfig::Sgd => UpdateRule { clip, ..UpdateRule::default() },
        RuleConfig::Momentum { momentum, nesterov } => {
            UpdateRule { momentum: Some(momentum as f32), nesterov, clip }
        }
    }
}

/// Epochs become steps of `global_batch` examples: `int(examples / global_batch * epochs)`, so that any number of towers
/// decays at the same epoch. The tutorial's own rule, `tower_blind`, counted the batch of one tower.
fn schedule(config: &RunConfig, examples: usize, global_batch: usize) -> Schedule {
    let steps_by = |batch: usize, epochs: f64| (examples as f64 / batch as f64 * epochs) as u64;
    let steps = |epochs: f64| steps_by(global_batch, epochs);
    let rate = &config.optimizer.learning_rate;
    let curve = match rate {
        LearningRateConfig::Constant { initial, .. } => Curve::Constant(*initial),
        LearningRateConfig::Exponential {
            initial,
            factor,
            epochs_per_decay,
            staircase,
            tower_blind,
            ..
        } => Curve::Exponential {
            initial: *initial,
            factor: *factor,
            decay_steps: match tower_blind {
                true => steps_by(config.data.batch_size, *epochs_per_decay),
                false => steps(*epochs_per_decay),
            }
            .max(1),
            staircase: *staircase,
        },
        LearningRateConfig::Piecewise { values, boundaries_epochs, .. } => Curve::Piecewise {
            values: values.clone(),
            boundaries: boundaries_epochs.iter().map(|&epochs| steps(epochs)).collect(),
        },
        LearningRateConfig::Polynomial { initial, r#final, power, epochs, .. } => {
            let steps = steps(*epochs).max(1);
            Curve::Polynomial { initial: *initial, end: *r#final, power: *power, steps }
        }
    };
    Schedule { curve, warmup_steps: steps(rate.warmup_epochs()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decays_at_the_same_epoch_for_any_number_of_towers() {
        let mut config = RunConfig::recipe("cifar10").unwrap();
        let decay = |config: &RunConfig, towers: usize| match schedule(config, 50_000, 128 * towers)
            .curve
        {
            Curve::Exponential { decay_steps, .. } => decay_steps,
            other => panic!("{other:?}"),
        };
        for (towers, steps) in [(1, 136_718), (2, 68_359), (3, 45_572), (4, 34_179), (8, 17_089)] {
            assert_eq!(decay(&config, towers), steps);
        }
        let rate = &mut config.optimizer.learning_rate;
        if let LearningRateConfig::Exponential { tower_blind, .. } = rate {
            *tower_blind = true;
        }
        assert_eq!(decay(&config, 4), 136_718);
    }
}
