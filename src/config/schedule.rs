//! The learning-rate schedule's settings; its mathematics is in `optim`.

use serde::{Deserialize, Serialize};

use super::choice::ScheduleName;

/// A learning-rate schedule; YAML also takes a bare number for `constant`.
///
/// Rates are per averaged gradient; lengths are in epochs of the training data. During the first
/// `warmup_epochs` the rate is `initial * step / warmup_steps`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "schedule", rename_all = "lowercase", deny_unknown_fields)]
pub enum LearningRateConfig {
    /// The same rate throughout.
    Constant {
        /// The rate.
        initial: f64,
        /// Epochs of linear warm-up.
        #[serde(default)]
        warmup_epochs: f64,
    },
    /// `initial * factor ^ (epochs / epochs_per_decay)`.
    Exponential {
        /// The rate at the start.
        initial: f64,
        /// What the rate is multiplied by, above 0.
        factor: f64,
        /// Epochs per multiplication.
        epochs_per_decay: f64,
        /// Whether the exponent is rounded down to a whole number.
        #[serde(default = "default_staircase")]
        staircase: bool,
        /// The original tutorial's rule: the decay steps ignore the number of towers.
        #[serde(default)]
        tower_blind: bool,
        /// Epochs of linear warm-up.
        #[serde(default)]
        warmup_epochs: f64,
    },
    /// One value after another.
    Piecewise {
        /// The rates, at least one.
        values: Vec<f64>,
        /// The epochs at which the next value starts, ascending, one fewer than `values`.
        boundaries_epochs: Vec<f64>,
        /// Epochs of linear warm-up to the first value.
        #[serde(default)]
        warmup_epochs: f64,
    },
    /// `(initial - final) * (1 - epochs / length) ^ power + final`, then `final`.
    Polynomial {
        /// The rate at the start.
        initial: f64,
        /// The rate after `epochs`.
        r#final: f64,
        /// The exponent, above 0; 1 is a straight line.
        #[serde(default = "default_power")]
        power: f64,
        /// The length of the descent.
        epochs: f64,
        /// Epochs of linear warm-up.
        #[serde(default)]
        warmup_epochs: f64,
    },
}

impl LearningRateConfig {
    /// Which schedule this is.
    pub fn name(&self) -> ScheduleName {
        match self {
            Self::Constant { .. } => ScheduleName::Constant,
            Self::Exponential { .. } => ScheduleName::Exponential,
            Self::Piecewise { .. } => ScheduleName::Piecewise,
            Self::Polynomial { .. } => ScheduleName::Polynomial,
        }
    }

    /// Epochs of linear warm-up; 0 = none.
    pub fn warmup_epochs(&self) -> f64 {
        match *self {
            Self::Constant { warmup_epochs, .. }
            | Self::Exponential { warmup_epochs, .. }
            | Self::Piecewise { warmup_epochs, .. }
            | Self::Polynomial { warmup_epochs, .. } => warmup_epochs,
        }
    }
}

fn default_staircase() -> bool {
    true
}

fn default_power() -> f64 {
    1.0
}
