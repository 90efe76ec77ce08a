//! What happens after a step: log line, summary, evaluation, checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use super::eval::{Evaluator, Weights};
use super::meter::Meter;
use super::report::{Happening, Summary};
use super::supervisor::Outcome;
use super::trainer::{StepReport, Trainer, Wanted};
use crate::data::Source;
use crate::io::{CheckpointStore, Snapshot, TRACE_FILE, write_trace};
use crate::util::clock::Clock;
use crate::util::trace::Trace;

/// Whether training goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// It does.
    Continue,
    /// It ends as if the last step were reached.
    Stop,
}

/// Passes a happening on to all who listen.
pub type Tell<'a> = dyn FnMut(&Happening<'_>) -> Result<()> + 'a;

/// Called by the supervisor after each step of the chief.
pub trait Hook {
    /// What it will look at after the step that starts at `step`.
    fn wants(&mut self, _step: u64) -> Wanted {
        Wanted::default()
    }

    /// After the update.
    fn after_step(
        &mut self,
        trainer: &mut Trainer,
        report: &StepReport,
        tell: &mut Tell<'_>,
    ) -> Result<Flow>;

    /// Once, when the run ends.
    fn end(&mut self, _: &mut Trainer, _: Outcome, _: &mut Tell<'_>) -> Result<()> {
        Ok(())
    }
}

/// A multiple of `every` lies in `from..to`: due also where a run sees only some steps, as an asynchronous tower does.
fn due(every: u64, from: u64, to: u64) -> bool {
    every > 0 && (from.is_multiple_of(every) || from / every < to.saturating_sub(1) / every)
}

/// Models with at most this many parameters have them in the log line.
const FEW_PARAMETERS: usize = 4;

/// The step line.
pub struct LogHook {
    every: u64,
    meter: Meter,
    /// The global step after the last one counted.
    seen: u64,
    unsaid: Option<StepReport>,
    /// Whether every loss is wanted.
    all: bool,
}

impl LogHook {
    /// A line every `every` steps from `start` on, and one for the last step.
    pub fn new(every: u64, start: u64) -> Self {
        Self { every, meter: Meter::default(), seen: start, unsaid: None, all: false }
    }

    /// Wants the loss of every step, as a benchmark does.
    pub fn of_all(self) -> Self {
        Self { all: true, ..self }
    }

    fn say(
        &mut self,
        trainer: &mut Trainer,
        report: &StepReport,
        tell: &mut Tell<'_>,
    ) -> Result<()> {
        self.unsaid = None;
        let mut line = self.meter.line(report, trainer.average_loss());
        if trainer.table().parameters() <= FEW_PARAMETERS {
            let state = trainer.snapshot()?;
            let values = trainer.table().rows().iter().filter_map(|row| {
                let value = state.find(&row.name)?.as_f32()?.first().copied()?;
                Some((row.name.clone(), value))
            });
            line.variables = values.collect();
        }
        tell(&Happening::Line(&line))
    }
}

impl Hook for LogHook {
    fn wants(&mut self, step: u64) -> Wanted {
        Wanted { losses: self.all || due(self.every, self.seen, step + 1), activations: false }
    }

    fn after_step(
        &mut self,
        trainer: &mut Trainer,
        report: &StepReport,
        tell: &mut Tell<'_>,
    ) -> Result<Flow> {
        let from = self.seen;
        self.seen = report.global_step;
        self.meter.add(report, report.global_step - from);
        tell(&Happening::Step(report))?;
        if due(self.every, from, report.global_step) {
            self.say(trainer, report, tell)?;
        } else {
            self.unsaid = Some(*report);
        }
        Ok(Flow::Continue)
    }

    fn end(&mut self, trainer: &mut Trainer, outcome: Outcome, tell: &mut Tell<'_>) -> Result<()> {
        match self.unsaid.take() {
            Some(mut report) if outcome != Outcome::Failed => {
                report.loss = trainer.read_losses()?.unwrap_or(report.loss);
                self.say(trainer, &report, tell)
            }
            _ => Ok(()),
        }
    }
}

/// Histograms of activations, variables and gradients, from the very step that trained.
pub struct SummaryHook {
    every: u64,
    seen: u64,
}

impl SummaryHook {
    /// Every `every` steps from `start` on; 0 for never.
    pub fn new(every: u64, start: u64) -> Self {
        Self { every, seen: start }
    }
}

impl Hook for SummaryHook {
    fn wants(&mut self, step: u64) -> Wanted {
        Wanted { losses: false, activations: due(self.every, self.seen, step + 1) }
    }

    fn after_step(
        &mut self,
        trainer: &mut Trainer,
        report: &StepReport,
        tell: &mut Tell<'_>,
    ) -> Result<Flow> {
        self.seen = report.global_step;
        if report.observed {
            let losses = trainer.losses().map(|(name, value)| (name.to_owned(), value)).collect();
            let summary = Summary {
                step: report.step,
                losses,
                activations: trainer.activations()?,
                gradients: trainer.gradients()?,
                variables: trainer.snapshot()?.tensors,
                features: trainer.features(),
            };
            tell(&Happening::Summary(&summary))?;
        }
        Ok(Flow::Continue)
    }
}

/// Evaluation while training.
pub struct EvalHook {
    evaluator: Evaluator,
    source: Arc<dyn Source>,
    every: u64,
    seen: u64,
    last: Option<u64>,
}

impl EvalHook {
    /// Every `every` steps from `start` on, and at the end.
    pub fn new(evaluator: Evaluator, source: Arc<dyn Source>, every: u64, start: u64) -> Self {
        Self { evaluator, source, every, seen: start, last: None }
    }

    fn evaluate(&mut self, trainer: &mut Trainer, tell: &mut Tell<'_>) -> Result<()> {
        let state = trainer.snapshot()?;
        self.last = Some(state.global_step);
        let weights: &[Weights] = if state.has_averages(trainer.table()) {
            &[Weights::Raw, Weights::Averaged]
        } else {
            &[Weights::Raw]
        };
        for &weights in weights {
            let evaluation = self.evaluator.evaluate(&state, weights, &*self.source, usize::MAX)?;
            tell(&Happening::Evaluation(&evaluation))?;
        }
        Ok(())
    }
}

impl Hook for EvalHook {
    fn wants(&mut self, step: u64) -> Wanted {
        Wanted { losses: self.seen / self.every < (step + 1) / self.every, activations: false }
    }

    fn after_step(
        &mut self,
        trainer: &mut Trainer,
        report: &StepReport,
        tell: &mut Tell<'_>,
    ) -> Result<Flow> {
        // After the update that completes a multiple: step 2,000 means 2,000 updates.
        let from = self.seen;
        self.seen = report.global_step;
        if from / self.every < report.global_step / self.every {
            self.evaluate(trainer, tell)?;
        }
        Ok(Flow::Continue)
    }

    fn end(&mut self, trainer: &mut Trainer, outcome: Outcome, tell: &mut Tell<'_>) -> Result<()> {
        if outcome == Outcome::Finished && self.last != Some(trainer.global_step()) {
            self.evaluate(trainer, tell)?;
        }
        Ok(())
    }
}

/// A variable stopped being a number between two losses. Exit code 6.
#[derive(Debug, thiserror::Error)]
#[error(
    "model diverged: {tensor} is not finite after step {step}; no checkpoint of it was written, earlier ones are intact"
)]
pub struct NotFinite {
    /// The tensor.
    pub tensor: String,
    /// The global step.
    pub step: u64,
}

/// Checkpoints by time or by steps, and at the end.
pub struct CheckpointHook {
    store: CheckpointStore,
    metadata: BTreeMap<String, String>,
    every_secs: Option<f64>,
    every_steps: Option<u64>,
    clock: Arc<dyn Clock>,
    last_time: Duration,
    last_step: u64,
    /// Whether it was time for one when this step began.
    due: bool,
}

impl CheckpointHook {
    /// After the checkpoint of step `saved`, or 0 without one; `metadata` goes into every checkpoint beside the data position.
    pub fn new(
        store: CheckpointStore,
        metadata: BTreeMap<String, String>,
        every_secs: Option<f64>,
        every_steps: Option<u64>,
        clock: Arc<dyn Clock>,
        saved: u64,
    ) -> Self {
        let last_time = clock.monotonic();
        Self {
            store,
            metadata,
            every_secs,
            every_steps,
            clock,
            last_time,
            last_step: saved,
            due: false,
        }
    }

    fn is_due_at(&self, step: u64) -> bool {
        self.every_steps.is_some_and(|n| self.last_step / n < step / n)
    }

    fn save(&mut self, trainer: &mut Trainer, tell: &mut Tell<'_>) -> Result<()> {
        let state = trainer.snapshot()?;
        let step = state.global_step;
        if let Some(tensor) = state.first_non_finite() {
            return Err(NotFinite { tensor: tensor.to_owned(), step }.into());
        }
        let mut metadata = self.metadata.clone();
        metadata.insert("position".to_owned(), trainer.position().to_string());
        let snapshot = Snapshot { global_step: step, tensors: state.tensors, metadata };
        let path = self.store.save(&snapshot)?;
        self.last_step = step;
        self.last_time = self.clock.monotonic();
        tell(&Happening::Checkpoint { path: &path, step })
    }
}

impl Hook for CheckpointHook {
    fn wants(&mut self, step: u64) -> Wanted {
        let elapsed = self.clock.monotonic().saturating_sub(self.last_time).as_secs_f64();
        self.due = self.every_secs.is_some_and(|secs| elapsed >= secs);
        Wanted { losses: self.due || self.is_due_at(step + 1), activations: false }
    }

    fn after_step(
        &mut self,
        trainer: &mut Trainer,
        report: &StepReport,
        tell: &mut Tell<'_>,
    ) -> Result<Flow> {
        if self.due || self.is_due_at(report.global_step) {
            self.save(trainer, tell)?;
        }
        Ok(Flow::Continue)
    }

    fn end(&mut self, trainer: &mut Trainer, outcome: Outcome, tell: &mut Tell<'_>) -> Result<()> {
        if outcome != Outcome::Failed && trainer.global_step() != self.last_step {
            self.save(trainer, tell)?;
        }
        Ok(())
    }
}

/// Writes `trace.json` once the steps that were asked for are over.
pub struct TraceHook {
    trace: Arc<Trace>,
    path: PathBuf,
    process: String,
}

impl TraceHook {
    /// For a trace that the trainers fill; the file goes into `dir`.
    pub fn new(trace: Arc<Trace>, dir: &Path, process: String) -> Self {
        Self { trace, path: dir.join(TRACE_FILE), process }
    }
}

impl Hook for TraceHook {
    fn after_step(
        &mut self,
        _trainer: &mut Trainer,
        _report: &StepReport,
        _tell: &mut Tell<'_>,
    ) -> Result<Flow> {
        if self.trace.step() {
            write_trace(&self.path, &self.process, &self.trace.spans())?;
        }
        Ok(Flow::Continue)
    }

    fn end(&mut self, _: &mut Trainer, _: Outcome, _: &mut Tell<'_>) -> Result<()> {
        if self.trace.is_open() {
            write_trace(&self.path, &self.process, &self.trace.spans())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::due;

    #[test]
    fn due_at_multiples_and_when_one_was_jumped_over() {
        let lines: Vec<u64> = (0..30).filter(|&step| due(10, step, step + 1)).collect();
        assert_eq!(lines, [0, 10, 20]);
        // A tower that sees steps 7 and then 12: the multiple between is reported at 12.
        assert!(due(10, 8, 13) && !due(10, 13, 19) && !due(0, 0, 1));
    }
}
