//! The typed configuration of a run; the fullest form of the YAML maps onto it field by field.

use serde::{Deserialize, Serialize};

use super::choice::{
    CheckpointFormat, Convolution, DataName, ModelName, OnDevice, Precision, Reduce,
    VariablePlacement,
};
use super::cluster::ClusterConfig;
use super::error::ConfigError;
use super::layers::Layers;
use super::optimizer::OptimizerConfig;
use super::towers::TowersConfig;

/// Everything that decides a training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The network; YAML also takes the bare name.
    pub model: ModelConfig,
    /// The input.
    pub data: DataConfig,
    /// The update rule and its learning rate.
    pub optimizer: OptimizerConfig,
    /// Decay of the moving averages of the variables, in (0, 1); `None` (`null` or `off`) keeps
    /// none.
    #[serde(default = "default_moving_average")]
    pub moving_average: Option<f64>,
    /// The devices that compute gradients.
    #[serde(default)]
    pub towers: TowersConfig,
    /// Where the variables live.
    #[serde(default = "default_variables")]
    pub variables: VariablePlacement,
    /// How gradients are averaged over the towers.
    #[serde(default = "default_reduce")]
    pub reduce: Reduce,
    /// The number format of activations and gradients.
    #[serde(default = "default_precision")]
    pub precision: Precision,
    /// How convolutions are computed: another way rounds otherwise.
    #[serde(default = "default_conv")]
    pub conv: Convolution,
    /// Seed of every random stream.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Other tasks to train with.
    #[serde(default)]
    pub cluster: ClusterConfig,
    /// The length of the run and what it writes.
    pub train: TrainConfig,
}

/// The network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Which network.
    pub name: ModelName,
    /// Layers of a residual network, 6n + 2; `None` for the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<usize>,
    /// 1 or 2, of a residual network; `None` for the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u8>,
    /// Whether the tutorial network normalises its responses, as it does unless told otherwise; `None` for the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lrn: Option<bool>,
}

/// The input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Where examples come from.
    pub name: DataName,
    /// Folder of the data files; `data/<name>` unless given.
    pub dir: String,
    /// Examples per micro-batch of one tower, at least 1.
    #[serde(default = "default_batch_size")]
    pub batch_size: usize,
    /// Input threads, at least 1.
    #[serde(default = "default_data_threads")]
    pub threads: usize,
    /// How many examples `synthetic` and `line` generate; `None` means
    /// [`DataConfig::DEFAULT_EXAMPLES`].
    #[serde(default)]
    pub examples: Option<u64>,
    /// Whether GPUs keep the pictures and distort them.
    #[serde(default = "default_on_device")]
    pub on_device: OnDevice,
}

impl DataConfig {
    /// Examples generated when `examples` is `null`.
    pub const DEFAULT_EXAMPLES: u64 = 50_000;
}

/// The length of the run and what it writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Folder of the run; `runs/<data>` unless given.
    pub dir: String,
    /// Last step, counted from the first run of this folder.
    #[serde(default = "default_max_steps")]
    pub max_steps: u64,
    /// Steps between progress lines; 0 = never.
    #[serde(default = "default_log_every")]
    pub log_every: u64,
    /// Steps between summaries; 0 = never.
    #[serde(default = "default_summary_every")]
    pub summary_every: u64,
    /// Steps between evaluations; `None` = never.
    #[serde(default)]
    pub eval_every: Option<u64>,
    /// When checkpoints are written and kept.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

/// When checkpoints are written and kept; with both intervals, whichever comes first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Seconds between checkpoints; `None` = not by time.
    pub every_secs: Option<f64>,
    /// Steps between checkpoints; `None` = not by steps.
    pub every_steps: Option<u64>,
    /// How many of the newest to keep; 0 keeps all.
    pub keep: u64,
    /// Also keep for good one checkpoint per so many hours; `None` = none.
    pub keep_every_hours: Option<f64>,
    /// What they are written as; either is read.
    pub format: CheckpointFormat,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self {
            every_secs: Some(600.0),
            every_steps: None,
            keep: 5,
            keep_every_hours: None,
            format: CheckpointFormat::Safetensors,
        }
    }
}

impl RunConfig {
    /// The defaults of the recipe called `name` (`cifar10`, `resnet`, `line`).
    ///
    /// # Errors
    /// [`ConfigError::UnknownRecipe`] for any other name.
    pub fn recipe(name: &str) -> Result<Self, ConfigError> {
        Ok(Layers::new(Some(name)).resolve()?.config)
    }
}

impl ModelName {
    /// The model's recipe, in the language of the configuration files.
    pub(crate) fn recipe_yaml(self) -> &'static str {
        match self {
            Self::Cifar10 => {
                "model: cifar10
data: {name: cifar10}
optimizer:
  name: sgd
  learning_rate: {schedule: exponential, initial: 0.1, factor: 0.1, epochs_per_decay: 350}
"
            }
            Self::Resnet => {
                "model: {name: resnet, depth: 20, version: 1}
data: {name: cifar10, batch_size: 128}
optimizer:
  name: momentum
  momentum: 0.9
  learning_rate: {schedule: piecewise, values: [0.1, 0.01, 0.001], boundaries_epochs: [82, 123]}
moving_average: off
train: {max_steps: 64000}
"
            }
            Self::Line => {
                "model: line
data: {name: line, batch_size: 32}
optimizer: {name: sgd, learning_rate: 0.1}
moving_average: off
train: {max_steps: 1000, log_every: 100}
"
            }
        }
    }
}

fn default_moving_average() -> Option<f64> {
    Some(0.9999)
}

fn default_variables() -> VariablePlacement {
    VariablePlacement::Cpu
}

fn default_reduce() -> Reduce {
    Reduce::Auto
}

fn default_precision() -> Precision {
    Precision::F32
}

fn default_conv() -> Convolution {
    Convolution::Auto
}

fn default_seed() -> u64 {
    1
}

fn default_batch_size() -> usize {
    128
}

fn default_on_device() -> OnDevice {
    OnDevice::Auto
}

fn default_data_threads() -> usize {
    1
}

fn default_max_steps() -> u64 {
    1_000_000
}

fn default_log_every() -> u64 {
    10
}

fn default_summary_every() -> u64 {
    100
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{LearningRateConfig, TowerDevices, UpdateRule};

    #[test]
    fn the_cifar10_recipe_is_the_tutorial() {
        let config = RunConfig::recipe("cifar10").unwrap();
        assert_eq!(config.data.batch_size, 128);
        assert_eq!(
            (config.data.dir.as_str(), config.train.dir.as_str()),
            ("data/cifar10", "runs/cifar10")
        );
        assert_eq!(config.optimizer.rule, UpdateRule::Sgd);
        assert_eq!(
            config.optimizer.learning_rate,
            LearningRateConfig::Exponential {
                initial: 0.1,
                factor: 0.1,
                epochs_per_decay: 350.0,
                staircase: true,
                tower_blind: false,
                warmup_epochs: 0.0
            }
        );
        assert_eq!(config.moving_average, Some(0.9999));
        assert_eq!(config.towers.devices, TowerDevices::Cpus(1));
        assert_eq!((config.train.max_steps, config.seed), (1_000_000, 1));
    }

    #[test]
    fn the_line_recipe_is_small() {
        let config = RunConfig::recipe("line").unwrap();
        assert_eq!((config.model.name, config.data.name), (ModelName::Line, DataName::Line));
        assert_eq!(config.data.batch_size, 32);
        assert_eq!(
            config.optimizer.learning_rate,
            LearningRateConfig::Constant { initial: 0.1, warmup_epochs: 0.0 }
        );
        assert_eq!(config.moving_average, None);
        assert_eq!((config.train.max_steps, config.train.log_every), (1000, 100));
    }

    #[test]
    fn an_unknown_recipe_lists_the_known_ones() {
        assert_eq!(
            RunConfig::recipe("cifar").unwrap_err().to_string(),
            "unknown recipe `cifar`; did you mean `cifar10`? (known: cifar10, resnet, line)"
        );
    }

    #[test]
    fn the_structs_refuse_unknown_fields_on_their_own() {
        let mut value = serde_json::to_value(RunConfig::recipe("line").unwrap()).unwrap();
        assert!(serde_json::from_value::<RunConfig>(value.clone()).is_ok());
        for path in [
            "",
            "/model",
            "/data",
            "/optimizer",
            "/optimizer/learning_rate",
            "/towers",
            "/train",
            "/train/checkpoint",
        ] {
            let mut spoilt = value.clone();
            spoilt.pointer_mut(path).unwrap()["extra"] = 1.into();
            assert!(serde_json::from_value::<RunConfig>(spoilt).is_err(), "{path}");
        }
        value["optimizer"]["momentum"] = 0.9.into();
        assert!(serde_json::from_value::<RunConfig>(value).is_err());
    }
}
