//! What a run prints before its first step: what runs where, and the placement log.

use crate::cluster::{DeviceKind, DeviceName};
use crate::config::{LearningRateConfig, RunConfig};
use crate::data::Source;
use crate::device::cuda;
use crate::graph::Op;
use crate::model::Compiled;
use crate::train::Assembly;
use crate::util::stats;

/// What runs where, before the first step.
pub(super) fn header(
    config: &RunConfig,
    compiled: &Compiled,
    source: &dyn Source,
    assembly: &Assembly,
) -> String {
    let table = compiled.table();
    let batch = config.data.batch_size;
    let devices: Vec<String> = assembly.towers.iter().map(ToString::to_string).collect();
    let used: Vec<u32> = assembly.towers.iter().filter_map(gpu_number).collect();
    let visible = cuda::probe().gpus.map_or(0, |gpus| gpus.len() as u32);
    let accumulate = match config.towers.accumulate {
        1 => String::new(),
        k => format!(" x {k} micro-batches"),
    };
    let rows = [
        (
            "Model",
            format!(
                "{} ({} parameters, {})",
                config.model.name,
                stats::count(table.parameters() as u64),
                stats::bytes(4 * table.parameters() as u64)
            ),
        ),
        (
            "Data",
            format!(
                "{} ({} training examples{})",
                source.name(),
                stats::count(source.len() as u64),
                if assembly.on_device { ", kept and distorted by the GPUs" } else { "" }
            ),
        ),
        ("Towers", towers_words(&devices, &assembly.tower_words)),
        ("Left", left_words(&used, visible)),
        ("Peer access", cuda::topology(&used).unwrap_or_default()),
        ("Variables", assembly.store.to_owned()),
        ("Reduce", assembly.reducer.clone()),
        (
            "Batch size",
            format!("{batch} per tower{accumulate}, {} per update", assembly.global_batch),
        ),
        ("Learning rate", rate_words(config)),
        (
            "Averages",
            config
                .moving_average
                .map_or_else(|| "off".to_owned(), |decay| format!("decay {decay}")),
        ),
        ("Precision", config.precision.to_string()),
        ("Seed", config.seed.to_string()),
        ("Train dir", config.train.dir.clone()),
    ];
    let rows = rows.iter().filter(|(_, value)| !value.is_empty());
    rows.map(|(name, value)| format!("{:15}{value}\n", format!("{name}:"))).collect()
}

/// The number of a GPU of this process.
fn gpu_number(device: &DeviceName) -> Option<u32> {
    let ordinal = device.ordinal?;
    (*device == DeviceName::local(DeviceKind::Gpu, ordinal)).then_some(ordinal)
}

/// The GPUs that no tower is on.
fn left_words(used: &[u32], visible: u32) -> String {
    let left = (0..visible).filter(|gpu| !used.contains(gpu));
    let names = left.map(|gpu| format!("/device:GPU:{gpu}"));
    names.collect::<Vec<_>>().join(", ")
}

fn towers_words(devices: &[String], each: &str) -> String {
    match devices {
        [one] => format!("1 on {one} ({each})"),
        many => format!("{} on {} (each {each})", many.len(), many.join(", ")),
    }
}

fn rate_words(config: &RunConfig) -> String {
    let rate = &config.optimizer.learning_rate;
    let curve = match rate {
        LearningRateConfig::Constant { initial, .. } => format!("{initial}, constant"),
        LearningRateConfig::Exponential {
            initial,
            factor,
            epochs_per_decay,
            staircase,
            tower_blind,
            ..
        } => {
            let how = if *staircase { "in stairs" } else { "smoothly" };
            let blind = if *tower_blind { ", ignoring the number of towers" } else { "" };
            format!("{initial}, x {factor} every {epochs_per_decay} epochs {how}{blind}")
        }
        LearningRateConfig::Piecewise { values, boundaries_epochs, .. } => {
            format!("{values:?} from epochs {boundaries_epochs:?}")
        }
        LearningRateConfig::Polynomial { initial, r#final, power, epochs, .. } => {
            format!("{initial} to {final} over {epochs} epochs, power {power}")
        }
    };
    match rate.warmup_epochs() {
        0.0 => curve,
        epochs => format!("{curve}, after a warm-up of {epochs} epochs"),
    }
}

/// TensorFlow's placement log: the device mapping, then every operation with its device.
pub(super) fn placement(compiled: &Compiled, assembly: &Assembly) -> String {
    let mut log = "Device mapping: no known devices.\n".to_owned();
    let is_variable = |op: &Op| matches!(op, Op::Variable { .. });
    for (i, device) in assembly.towers.iter().enumerate() {
        for (_, node) in compiled.graph().nodes() {
            let (own, op) = (&assembly.variables, node.op.name());
            match own {
                Some(shared) if is_variable(&node.op) => {
                    if i == 0 {
                        log += &format!("{}: ({op}): {shared}\n", node.name);
                    }
                }
                _ => log += &format!("tower_{i}/{}: ({op}): {device}\n", node.name),
            }
        }
    }
    let host = assembly.host.name();
    log += &format!("store: (VariableStore): {host}\nreducer: (GradientReducer): {host}\n");
    log
}
