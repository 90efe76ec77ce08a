//! [`Trainer`]: the five calls of a step.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rayon::prelude::*;

use super::losses::{Losses, NotANumber};
use super::progress::{Phase, Progress};
use crate::data::{Batch, InputPipeline};
use crate::device::Slab;
use crate::graph::{Role, VarTable};
use crate::reduce::GradientReducer;
use crate::store::{Contribution, State, VariableStore};
use crate::tower::{Batches, Tower};
use crate::util::clock::Clock;
use crate::util::trace::Trace;

/// Everything a step needs. In every mode the same; the mode decided what is plugged in.
pub struct Trainer {
    pub(super) clock: Arc<dyn Clock>,
    pub(super) progress: Arc<Progress>,
    pub(super) trace: Option<Arc<Trace>>,
    pub(super) input: InputPipeline,
    /// Dropped before the towers: their GPUs wait for sums that it has begun.
    pub(super) reducer: Box<dyn GradientReducer>,
    pub(super) towers: Vec<Box<dyn Tower>>,
    /// The number of the first of them among all of the run.
    pub(super) first_tower: usize,
    pub(super) store: Box<dyn VariableStore>,
    pub(super) table: Arc<VarTable>,
    pub(super) losses: Losses,
    /// One thread per tower to wait for its device; none for a single tower.
    pub(super) drivers: Option<rayon::ThreadPool>,
    /// Examples of one micro-batch.
    pub(super) batch_size: usize,
    /// One per micro-batch, those of a tower next to each other; so are the gradients.
    pub(super) batches: Vec<Batch>,
    /// Those of the next step, where towers fetch them while they compute.
    pub(super) ahead: Ahead,
    pub(super) grads: Vec<Slab>,
}

/// What is wanted of a step beside the update.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Its losses, for which GPUs must be waited for. Where nobody wants them, they are read with those of a later step.
    pub losses: bool,
    /// The activations of tower 0, and with them the losses.
    pub activations: bool,
}

impl Wanted {
    /// What either wants.
    pub fn or(self, other: Self) -> Self {
        Self {
            losses: self.losses || other.losses,
            activations: self.activations || other.activations,
        }
    }
}

/// The batches of the next step.
#[derive(Default)]
pub(super) enum Ahead {
    /// They are not asked for before it begins.
    #[default]
    Unknown,
    /// As many as those of a step, and the position of the first; none before the first step.
    Known(Vec<Batch>, u64),
}

/// What a step did.
#[derive(Clone, Copy, Debug)]
pub struct StepReport {
    /// The global step before the update: the number in the log line.
    pub step: u64,
    /// The global step after it.
    pub global_step: u64,
    /// The total loss, mean over all towers, micro-batches and workers; where it was not wanted it may be that of an earlier step.
    pub loss: f64,
    /// The learning rate.
    pub rate: f64,
    /// Examples over all towers.
    pub examples: usize,
    /// Whether the activations of this step were kept.
    pub observed: bool,
    /// Where the time went.
    pub times: StepTimes,
}

/// The parts of a step's time.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepTimes {
    /// Waiting for batches.
    pub input: Duration,
    /// Variables in, forward and backward of all towers.
    pub compute: Duration,
    /// Averaging the gradients.
    pub reduce: Duration,
    /// The update.
    pub apply: Duration,
}

impl StepTimes {
    /// The whole step.
    pub fn total(&self) -> Duration {
        self.input + self.compute + self.reduce + self.apply
    }
}

/// A loss stopped being a number. Exit code 6.
#[derive(Debug, thiserror::Error)]
#[error(
    "model diverged with loss = {loss} at step {step} in tower_{tower}: {tensor} is not finite; {}; \
     try a smaller --learning-rate or resume from an earlier checkpoint",
    since(*ago)
)]
pub struct Diverged {
    /// The value.
    pub loss: f32,
    /// The step.
    pub step: u64,
    /// The tower.
    pub tower: usize,
    /// Where it shows: the first such variable of the layout, else gradient, else the loss itself.
    pub tensor: String,
    /// Steps that were computed before the loss was read.
    pub ago: usize,
}

fn since(ago: usize) -> String {
    match ago {
        0 => "the variables were not changed by this step".to_owned(),
        _ => format!("it was read {ago} steps later, and nothing was saved since"),
    }
}

impl Trainer {
    /// One training step.
    pub fn step(&mut self, wanted: Wanted) -> Result<StepReport> {
        let observe = wanted.activations;
        let read = observe || wanted.losses || self.losses.are_due();
        let step = self.store.global_step();
        let (start, traced) = (self.clock.monotonic(), self.trace.as_ref().and_then(|t| t.start()));
        self.progress.enter(step, Phase::Input);
        self.fetch()?;
        let (fed, traced) = (self.clock.monotonic(), self.lap(traced, "input"));
        self.progress.enter(step, Phase::Compute);
        self.compute(step, observe, read)?;
        let (computed, traced) = (self.clock.monotonic(), self.lap(traced, "compute"));
        self.progress.enter(step, Phase::Reduce);
        let mut loss = self.losses.total();
        self.reducer.reduce(&mut self.grads, read.then_some(&mut loss))?;
        let (reduced, traced) = (self.clock.monotonic(), self.lap(traced, "reduce"));
        self.progress.enter(step, Phase::Apply);
        let share = Contribution { examples: self.examples_per_step(), loss };
        let applied = self.store.apply(self.reducer.mean(&self.grads), share)?;
        let loss = applied.loss.unwrap_or(loss);
        self.losses.count(loss);
        let end = self.clock.monotonic();
        self.lap(traced, "apply");
        self.progress.enter(applied.global_step, Phase::Hooks);
        Ok(StepReport {
            step,
            global_step: applied.global_step,
            loss,
            rate: applied.rate,
            examples: self.examples_per_step(),
            observed: observe,
            times: StepTimes {
                input: fed - start,
                compute: computed - fed,
                reduce: reduced - computed,
                apply: end - reduced,
            },
        })
    }

    /// The batches of this step, and of the next one where that is wanted.
    fn fetch(&mut self) -> Result<()> {
        for batch in &mut self.batches {
            self.input.recycle(std::mem::take(batch));
        }
        match &mut self.ahead {
            Ahead::Known(next, _) if !next.is_empty() => std::mem::swap(&mut self.batches, next),
            _ => {
                for batch in &mut self.batches {
                    *batch = self.input.next()?;
                }
            }
        }
        if let Ahead::Known(next, position) = &mut self.ahead {
            *position = self.input.position();
            next.clear();
            for _ in 0..self.batches.len() {
                next.push(self.input.next()?);
            }
        }
        Ok(())
    }

    /// Ends a span of this step's lane and begins the next.
    fn lap(&self, start: Option<Duration>, what: &str) -> Option<Duration> {
        let trace = self.trace.as_ref()?;
        trace.span(start, "step", || what.to_owned());
        trace.start()
    }

    /// The gradients of every micro-batch, the towers in parallel; and the losses, where they are read.
    fn compute(&mut self, step: u64, observe: bool, read: bool) -> Result<()> {
        if read {
            self.reducer.settle()?;
        }
        let pulled = self.store.pull()?;
        let (sink, trace) = (self.reducer.begin(), self.trace.as_deref());
        let n_micro = self.grads.len() / self.towers.len();
        let ahead = match &self.ahead {
            Ahead::Known(next, _) => &next[..],
            Ahead::Unknown => &[],
        };
        let one = |i: usize,
                   tower: &mut Box<dyn Tower>,
                   grads: &mut [Slab],
                   batches: &[Batch]|
         -> Result<()> {
            for (micro, (into, batch)) in grads.iter_mut().zip(batches).enumerate() {
                let mut done = |range, values: &_| sink.ready(i * n_micro + micro, range, values);
                let start = trace.and_then(Trace::start);
                let next = batches.get(micro + 1).or_else(|| ahead.get(i * n_micro));
                let batch = Batches { now: batch, next, early: sink.is_early() };
                tower
                    .gradients(pulled.replica(i), batch, observe && i == 0, into, &mut done)
                    .with_context(|| format!("tower_{}", self.first_tower + i))?;
                if let Some(trace) = trace {
                    let lane = format!("tower_{}", self.first_tower + i);
                    trace.span(start, &lane, || "gradients".to_owned());
                }
            }
            Ok(())
        };
        match &self.drivers {
            None => one(0, &mut self.towers[0], &mut self.grads, &self.batches)?,
            Some(drivers) => {
                let shares = (
                    self.towers.par_iter_mut(),
                    self.grads.par_chunks_mut(n_micro),
                    self.batches.par_chunks(n_micro),
                );
                drivers.install(|| {
                    shares
                        .into_par_iter()
                        .enumerate()
                        .try_for_each(|(i, (tower, grads, batches))| one(i, tower, grads, batches))
                })?;
            }
        }
        self.losses.add();
        if read && let Some(bad) = self.losses.read(&mut self.towers, self.first_tower)? {
            let (variables, gradient) = (pulled.replica(bad.tower), &self.grads[bad.micro_batch]);
            return Err(diverged(bad, step, self.first_tower, &self.table, variables, gradient)?);
        }
        Ok(())
    }

    /// Reads losses that nobody wanted yet; the total one of the last step, where there were any.
    ///
    /// # Errors
    /// [`Diverged`], and what towers and store say.
    pub fn read_losses(&mut self) -> Result<Option<f64>> {
        if !self.losses.are_unread() {
            return Ok(None);
        }
        self.reducer.settle()?;
        if let Some(bad) = self.losses.read(&mut self.towers, self.first_tower)? {
            let last = self.store.global_step().saturating_sub(1);
            let variables = self.store.pull()?.replica(bad.tower);
            let gradient = &self.grads[bad.micro_batch];
            return Err(diverged(bad, last, self.first_tower, &self.table, variables, gradient)?);
        }
        self.losses.count(self.losses.total());
        Ok(Some(self.losses.total()))
    }

    /// Examples of a step over all towers and micro-batches.
    pub fn examples_per_step(&self) -> usize {
        self.batch_size * self.batches.len()
    }

    /// Tells `progress` of each phase from now on.
    pub fn tell(&mut self, progress: Arc<Progress>) {
        self.progress = progress;
    }

    /// Traces steps from now on.
    pub fn trace(&mut self, trace: Arc<Trace>) {
        self.reducer.trace(trace.clone());
        for (i, tower) in self.towers.iter_mut().enumerate() {
            tower.trace(trace.clone(), &format!("tower_{}", self.first_tower + i));
        }
        self.trace = Some(trace);
    }

    /// Updates so far, those of other towers included.
    pub fn global_step(&self) -> u64 {
        self.store.global_step()
    }

    /// Examples consumed since the start of training: where a restart goes on.
    pub fn position(&self) -> u64 {
        match self.ahead {
            Ahead::Known(_, position) => position,
            Ahead::Unknown => self.input.position(),
        }
    }

    /// The layout of variables and gradients.
    pub fn table(&self) -> &VarTable {
        &self.table
    }

    /// The losses of the last step that was read, by name, means over all towers, the total first.
    pub fn losses(&self) -> impl Iterator<Item = (&str, f64)> {
        self.losses.means()
    }

    /// The total loss with decay 0.9 over the steps that were read, from 0 at the start of this process and without correction, as
    /// the tutorial's summaries.
    pub fn average_loss(&self) -> f64 {
        self.losses.average()
    }

    /// The features of the last step's first batch.
    pub fn features(&self) -> Vec<f32> {
        self.input.features(&self.batches[0])
    }

    /// Activations of tower 0 in the last observed step.
    pub fn activations(&mut self) -> Result<Vec<(String, Vec<f32>)>> {
        Ok(self.towers[0].activations()?)
    }

    /// The averaged gradient of the last step, by variable.
    pub fn gradients(&self) -> Result<Vec<(String, Vec<f32>)>> {
        let mean = &self.reducer.mean(&self.grads)[0];
        let read = |row: &crate::graph::VarRow| {
            let mut values = vec![0.0; row.range().len()];
            mean.read(row.range(), &mut values)?;
            Ok((row.name.clone(), values))
        };
        // What statistics are too large by is no gradient.
        let trained = self.table.rows().iter().filter(|row| row.role == Role::Trained);
        trained.map(read).collect()
    }

    /// Variables, averages and slots, after a look at the losses.
    pub fn snapshot(&mut self) -> Result<State> {
        self.read_losses()?;
        Ok(self.store.snapshot()?)
    }

    /// Takes over a snapshot.
    pub fn restore(&mut self, state: &State) -> Result<()> {
        Ok(self.store.restore(state)?)
    }
}

/// What is told of a loss that is not a number, when `step` was the last.
fn diverged(
    bad: NotANumber,
    step: u64,
    first_tower: usize,
    table: &VarTable,
    variables: &Slab,
    gradient: &Slab,
) -> Result<anyhow::Error> {
    let NotANumber { loss, tower, ago, .. } = bad;
    let tensor = first_non_finite(table, variables, "")?
        .or(first_non_finite(table, gradient, "/gradients")?)
        .unwrap_or_else(|| "total_loss".to_owned());
    let step = step.saturating_sub(ago as u64);
    Ok(Diverged { loss, step, tower: first_tower + tower, tensor, ago }.into())
}

/// The first variable whose values in `slab` are not all finite, with `suffix` behind its name.
fn first_non_finite(table: &VarTable, slab: &Slab, suffix: &str) -> Result<Option<String>> {
    for row in table.rows() {
        let mut values = vec![0.0; row.range().len()];
        slab.read(row.range(), &mut values)?;
        if values.iter().any(|v| !v.is_finite()) {
            return Ok(Some(format!("{}{suffix}", row.name)));
        }
    }
    Ok(None)
}
