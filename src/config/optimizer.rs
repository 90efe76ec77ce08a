//! The optimizer's settings.

use serde::{Deserialize, Serialize};

use super::choice::OptimizerName;
use super::schedule::LearningRateConfig;

/// How gradients change the variables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Fields", into = "Fields")]
pub struct OptimizerConfig {
    /// The update rule.
    pub rule: UpdateRule,
    /// Each element of the averaged gradient is clipped to ± this value; `None` = not clipped.
    pub clip: Option<f64>,
    /// The learning-rate schedule.
    pub learning_rate: LearningRateConfig,
}

/// The update rule; `name` in YAML.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateRule {
    /// Plain gradient descent.
    Sgd,
    /// Gradient descent with momentum.
    Momentum {
        /// Share of the last update carried over, in [0, 1).
        momentum: f64,
        /// Nesterov's form.
        nesterov: bool,
    },
}

const DEFAULT_MOMENTUM: f64 = 0.9;

/// The YAML layout, where the rule's settings stand beside its name.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    name: OptimizerName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    momentum: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nesterov: Option<bool>,
    #[serde(default)]
    clip: Option<f64>,
    learning_rate: LearningRateConfig,
}

impl TryFrom<Fields> for OptimizerConfig {
    type Error = &'static str;

    fn try_from(fields: Fields) -> Result<Self, Self::Error> {
        let rule = match (fields.name, fields.momentum, fields.nesterov) {
            (OptimizerName::Sgd, None, None) => UpdateRule::Sgd,
            (OptimizerName::Sgd, ..) => return Err("momentum and nesterov need name: momentum"),
            (OptimizerName::Momentum, momentum, nesterov) => UpdateRule::Momentum {
                momentum: momentum.unwrap_or(DEFAULT_MOMENTUM),
                nesterov: nesterov.unwrap_or(false),
            },
        };
        Ok(Self { rule, clip: fields.clip, learning_rate: fields.learning_rate })
    }
}

impl From<OptimizerConfig> for Fields {
    fn from(config: OptimizerConfig) -> Self {
        let (name, momentum, nesterov) = match config.rule {
            UpdateRule::Sgd => (OptimizerName::Sgd, None, None),
            UpdateRule::Momentum { momentum, nesterov } => {
                (OptimizerName::Momentum, Some(momentum), Some(nesterov))
            }
        };
        let OptimizerConfig { clip, learning_rate, .. } = config;
        Self { name, momentum, nesterov, clip, learning_rate }
    }
}
