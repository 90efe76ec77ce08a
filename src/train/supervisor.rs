//! [`Supervisor`]: runs trainers until the last step, a signal or an error, and ends them in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow};

use super::hooks::{Flow, Hook};
use super::report::{Happening, Report};
use super::trainer::{Trainer, Wanted};
use crate::rpc::RpcError;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The last step was reached, or a hook asked to stop.
    Finished,
    /// By this signal, after the step at hand was finished and saved.
    Interrupted(usize),
    /// By an error; nothing more is saved.
    Failed,
}

/// Brings trainers to their end.
pub struct Supervisor {
    /// The run ends when the global step reaches this.
    pub max_steps: u64,
    /// Called after each step, in order.
    pub hooks: Vec<Box<dyn Hook>>,
    /// Told of everything that happens.
    pub reports: Vec<Box<dyn Report>>,
    /// The number of a signal that asks to stop; 0 while there is none.
    pub signal: Arc<AtomicUsize>,
}

impl Supervisor {
    /// Runs the first trainer with hooks, any others (towers that do not wait) beside it.
    pub fn run(mut self, mut trainers: Vec<Trainer>) -> Result<(Outcome, Vec<Trainer>)> {
        let stop = AtomicBool::new(false);
        let max_steps = self.max_steps;
        let outcome = std::thread::scope(|scope| {
            let (chief, others) = trainers.split_first_mut().context("a run has a trainer")?;
            let others: Vec<_> = others
                .iter_mut()
                .enumerate()
                .map(|(i, trainer)| {
                    let stop = &stop;
                    scope.spawn(move || {
                        let result = follow(trainer, max_steps, stop);
                        // A failed tower ends the others.
                        stop.store(true, Ordering::Relaxed);
                        result.with_context(|| format!("asynchronous tower_{}", i + 1))
                    })
                })
                .collect();
            let result = self.lead(chief, &stop);
            stop.store(true, Ordering::Relaxed);
            let mut followed = Ok(());
            for other in others {
                let ended = other.join().unwrap_or_else(|_| Err(anyhow!("a tower's thread died")));
                followed = followed.and(ended);
            }
            // The chief's own error says more than that its store broke down under it.
            let outcome = result.and_then(|outcome| followed.map(|()| outcome));
            let last = *outcome.as_ref().unwrap_or(&Outcome::Failed);
            let ended = self.end(chief, last);
            outcome.and_then(|outcome| ended.map(|()| outcome))
        })?;
        Ok((outcome, trainers))
    }

    fn lead(&mut self, trainer: &mut Trainer, stop: &AtomicBool) -> Result<Outcome> {
        while trainer.global_step() < self.max_steps {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let step = trainer.global_step();
            let last = Wanted { losses: step + 1 >= self.max_steps, activations: false };
            let wanted = self.hooks.iter_mut().fold(last, |all, hook| all.or(hook.wants(step)));
            let report = match trainer.step(wanted) {
                Ok(report) => report,
                Err(error) => return interrupted_elsewhere(&error).ok_or(error),
            };
            for hook in &mut self.hooks {
                let mut tell = |h: &Happening<'_>| tell(&mut self.reports, h);
                if hook.after_step(trainer, &report, &mut tell)? == Flow::Stop {
                    return Ok(Outcome::Finished);
                }
            }
            match self.signal.load(Ordering::Relaxed) {
                0 => {}
                signal => return Ok(Outcome::Interrupted(signal)),
            }
        }
        Ok(Outcome::Finished)
    }

    fn end(&mut self, trainer: &mut Trainer, outcome: Outcome) -> Result<()> {
        let mut result = Ok(());
        for hook in &mut self.hooks {
            let mut tell = |h: &Happening<'_>| tell(&mut self.reports, h);
            result = result.and(hook.end(trainer, outcome, &mut tell));
        }
        let step = trainer.global_step();
        let told = tell(&mut self.reports, &Happening::End { step, outcome });
        result.and(told)
    }
}

/// Where another task was interrupted by a signal, this one ends the same way, and saves.
fn interrupted_elsewhere(error: &anyhow::Error) -> Option<Outcome> {
    let stopped = error.chain().find_map(|cause| cause.downcast_ref::<RpcError>())?;
    let signal = stopped.code().checked_sub(128).filter(|signal| *signal > 0)?;
    Some(Outcome::Interrupted(usize::from(signal)))
}

fn tell(reports: &mut [Box<dyn Report>], happening: &Happening<'_>) -> Result<()> {
    reports.iter_mut().try_for_each(|report| report.report(happening))
}

/// The loop of a tower that only contributes updates.
fn follow(trainer: &mut Trainer, max_steps: u64, stop: &AtomicBool) -> Result<()> {
    while !stop.load(Ordering::Relaxed) && trainer.global_step() < max_steps {
        trainer.step(Wanted::default())?;
    }
    Ok(())
}
