//! [`Meter`]: examples per second between two log lines.

use std::time::Duration;

use serde::Serialize;

use super::trainer::{StepReport, StepTimes};

/// The numbers of one log line.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// The global step before the update.
    pub step: u64,
    /// Mean over all towers, this step.
    pub loss: f64,
    /// See [`Trainer::average_loss`](super::Trainer::average_loss).
    #[serde(skip)]
    pub average_loss: f64,
    /// Over all towers.
    pub examples_per_sec: f64,
    /// Of one step, mean since the last line; time outside the step (summaries, evaluation, checkpoints) does not count.
    pub sec_per_batch: f64,
    /// Seconds of a step spent waiting for input, in the towers, in the reducer and in the update.
    pub input_sec: f64,
    /// See `input_sec`.
    pub compute_sec: f64,
    /// See `input_sec`.
    pub reduce_sec: f64,
    /// See `input_sec`.
    pub apply_sec: f64,
    /// Of this step.
    pub learning_rate: f64,
    /// Every variable, for models with a handful of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub variables: Vec<(String, f32)>,
}

/// Adds up steps until the next line.
#[derive(Debug, Default)]
pub struct Meter {
    steps: u32,
    updates: u64,
    times: StepTimes,
}

impl Meter {
    /// Counts a step. `updates` is how far the global step moved, which is more than one where other towers update too.
    pub fn add(&mut self, report: &StepReport, updates: u64) {
        self.steps += 1;
        self.updates += updates;
        self.times.input += report.times.input;
        self.times.compute += report.times.compute;
        self.times.reduce += report.times.reduce;
        self.times.apply += report.times.apply;
    }

    /// The line at this step; starts counting anew.
    pub fn line(&mut self, report: &StepReport, average_loss: f64) -> Line {
        let steps = f64::from(self.steps.max(1));
        let mean = |time: Duration| time.as_secs_f64() / steps;
        let total = self.times.total().as_secs_f64().max(1e-9);
        let line = Line {
            step: report.step,
            loss: report.loss,
            average_loss,
            examples_per_sec: self.updates as f64 * report.examples as f64 / total,
            sec_per_batch: total / self.updates.max(1) as f64,
            input_sec: mean(self.times.input),
            compute_sec: mean(self.times.compute),
            reduce_sec: mean(self.times.reduce),
            apply_sec: mean(self.times.apply),
            learning_rate: report.rate,
            variables: Vec::new(),
        };
        *self = Self::default();
        line
    }
}
