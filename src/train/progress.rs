//! [`Progress`]: where a run stands, for whoever watches it from another thread.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// What a trainer is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Meeting others, loading.
    Start,
    /// Waiting for batches.
    Input,
    /// Variables in, forward and backward.
    Compute,
    /// Averaging gradients.
    Reduce,
    /// Updating the variables.
    Apply,
    /// Lines, summaries, checkpoints.
    Hooks,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Start => "starting",
            Phase::Input => "waiting for input",
            Phase::Compute => "computing gradients",
            Phase::Reduce => "averaging gradients",
            Phase::Apply => "updating the variables",
            Phase::Hooks => "reporting or saving",
        })
    }
}

/// The last step and phase of a run.
#[derive(Debug, Default)]
pub struct Progress {
    moves: AtomicU64,
    step: AtomicU64,
    phase: AtomicU8,
}

impl Progress {
    pub(super) fn enter(&self, step: u64, phase: Phase) {
        self.step.store(step, Ordering::Relaxed);
        self.phase.store(phase as u8, Ordering::Relaxed);
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    /// A number that changes with every move, the step and what is done in it.
    pub fn now(&self) -> (u64, u64, Phase) {
        const PHASES: [Phase; 6] =
            [Phase::Start, Phase::Input, Phase::Compute, Phase::Reduce, Phase::Apply, Phase::Hooks];
        let phase = self.phase.load(Ordering::Relaxed) as usize;
        let (moves, step) = (&self.moves, &self.step);
        (moves.load(Ordering::Relaxed), step.load(Ordering::Relaxed), PHASES[phase])
    }
}
