//! Contradictions between settings that are fine one by one.

use super::choice::{DataName, Engine, ModelName, Precision, Reduce, VariablePlacement, Wire};
use super::error::ConfigError;
use super::origin::Origin;
use super::schedule::LearningRateConfig;
use super::schema::RunConfig;
use super::settings::Settings;
use super::towers::TowerDevices;

/// Checks `config`; `settings` holds all its values with their origins.
pub(crate) fn check(config: &RunConfig, settings: &Settings) -> Result<(), ConfigError> {
    let towers = &config.towers;
    let replicated = config.variables == VariablePlacement::Replicated;
    let gpus = matches!(towers.devices, TowerDevices::Gpus(_));
    let devices = if gpus { "towers.gpus" } else { "towers.cpus" };
    // Where nobody chose, the machine decides later.
    let cpus = !gpus && settings.get(devices).is_none_or(|s| s.origin != Origin::Default);

    let rules = [
        (
            (config.model.name == ModelName::Line) != (config.data.name == DataName::Line),
            "model.name",
            "data.name",
            "the line model and the line data go together",
        ),
        (
            config.model.depth.is_some_and(|depth| depth % 6 != 2),
            "model.depth",
            "model.name",
            "residual networks have 6n + 2 layers: 20, 32, 44, 56, 110",
        ),
        (
            wrong_boundaries(&config.optimizer.learning_rate),
            "optimizer.learning_rate.values",
            "optimizer.learning_rate.boundaries_epochs",
            "n values need n - 1 boundaries",
        ),
        (
            towers.asynchronous && towers.accumulate > 1,
            "towers.asynchronous",
            "towers.accumulate",
            "asynchronous towers apply every micro-batch at once",
        ),
        (
            towers.asynchronous && replicated,
            "towers.asynchronous",
            "variables",
            "asynchronous towers share one copy of the variables, `variables: cpu`",
        ),
        (
            config.reduce == Reduce::None && !replicated && towers.count() > 1,
            "reduce",
            devices,
            "several towers can only share `variables: cpu` if their gradients are averaged",
        ),
        (
            config.reduce == Reduce::Nccl && cpus,
            "reduce",
            devices,
            "nccl averages between gpus only",
        ),
        (
            config.cluster.engine == Engine::Nccl && cpus,
            "cluster.engine",
            devices,
            "nccl averages between gpus only",
        ),
        (
            config.cluster.engine == Engine::Nccl && config.cluster.wire != Wire::F32,
            "cluster.engine",
            "cluster.wire",
            "nccl sends f32",
        ),
        (
            config.cluster.engine == Engine::Nccl && config.reduce == Reduce::Cpu,
            "cluster.engine",
            "reduce",
            "what nccl averages never meets in the host's memory",
        ),
        (
            towers.gpu_indices.is_some() && !gpus,
            "towers.gpu_indices",
            devices,
            "they are numbers of gpus",
        ),
        (
            towers
                .gpu_indices
                .as_ref()
                .is_some_and(|indices| gpus && indices.len() != towers.count()),
            "towers.gpu_indices",
            devices,
            "each tower has one gpu",
        ),
        (
            config.precision == Precision::Tf32 && cpus,
            "precision",
            devices,
            "tf32 is a way of gpus to multiply",
        ),
    ];
    let Some((_, first, second, why)) = rules.into_iter().find(|rule| rule.0) else {
        return Ok(());
    };
    let shown = |key| settings.get(key).map_or_else(|| format!("`{key}`"), |s| s.shown());
    Err(ConfigError::Contradiction { first: shown(first), second: shown(second), why: why.into() })
}

fn wrong_boundaries(rate: &LearningRateConfig) -> bool {
    matches!(rate, LearningRateConfig::Piecewise { values, boundaries_epochs, .. }
        if values.len() != boundaries_epochs.len() + 1)
}
