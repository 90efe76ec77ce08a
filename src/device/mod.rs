//! Devices: where slabs lie and programs run.
//!
//! One stem per family of operations: everything about convolution is `*/conv.*`. A new operation needs a variant in
//! `graph/op.rs`, an arm in `infer.rs` and `grad.rs`, a kernel in `cpu/` and an arm in `cpu/exec.rs`, a kernel in `kernels/` and an arm in
//! `cuda/task.rs` and `cuda/launch.rs`, and a case in `tests/ops.rs`.

pub mod cpu;
pub mod cuda;
pub mod heap;
pub mod shared;
mod slab;

pub use slab::Slab;

use std::ops::Range;
use std::sync::Arc;

use crate::cluster::DeviceName;
use crate::graph::{Fusions, Program};
use crate::optim::UpdateRule;
use crate::util::stats;
use crate::util::trace::Trace;

/// Floats that say which of the pictures that a device keeps is fed, and how it is distorted: its number, the crop's first row and
/// column, whether it is flipped, the contrast.
pub const DRAW: usize = 5;

/// One place that holds slabs and runs programs.
pub trait Device: Send + Sync {
    /// Its full name.
    fn name(&self) -> &DeviceName;
    /// What it is, in words: `2 threads, AVX-512`.
    fn describe(&self) -> String;
    /// A slab of zeros.
    fn alloc(&self, len: usize) -> Result<Slab, DeviceError>;
    /// Whether it makes use of [`Feeds::next`].
    fn fetches_ahead(&self) -> bool {
        false
    }
    /// Keeps pictures of 32 x 32 x 3 bytes in planes, where the device distorts them itself and they take less than `share` of its
    /// free memory: from then on, the first feed of its programs may be [`DRAW`] floats per picture. Says whether it does.
    fn keep_pictures(&self, _pictures: &[&[u8]], _share: f64) -> Result<bool, DeviceError> {
        Ok(false)
    }
    /// What lowering may fuse for its programs.
    fn fusions(&self) -> Fusions {
        Fusions::default()
    }
    /// Binds a program to this device: memory, kernels, threads.
    fn load(&self, program: Program) -> Result<Box<dyn Executable>, DeviceError>;
    /// Makes the first of `slabs` `scale` times the sum of all, added as a fixed binary tree by index: `((0+1)+(2+3))+4`.
    fn sum(&self, slabs: &mut [Slab], scale: f32) -> Result<(), DeviceError>;
    /// One optimizer step over whole slabs, and the moving averages after it.
    fn update(&self, update: Update, slabs: UpdateSlabs<'_>) -> Result<(), DeviceError>;
}

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// What to do.
    pub rule: UpdateRule,
    /// The learning rate.
    pub rate: f32,
    /// Decay of the moving averages at this step.
    pub average_decay: f32,
    /// Floats that all this is for; those behind are statistics, which take [`STATISTIC_SHARE`](crate::optim::STATISTIC_SHARE) of their gradient away.
    pub trained: usize,
}

/// The slabs of one update, all of one length.
#[derive(Debug)]
pub struct UpdateSlabs<'a> {
    /// Changed.
    pub params: &'a mut Slab,
    /// The averaged gradient.
    pub grads: &'a Slab,
    /// The velocity; present exactly when the rule has momentum.
    pub slots: Option<&'a mut Slab>,
    /// The moving averages, where they are kept.
    pub averages: Option<&'a mut Slab>,
}

/// Hears of each range of the slab of gradients, with its values, as soon as they are final, while the rest is still being
/// computed. A GPU tells of all when the step is over; where the slab is its own, of larger ranges without values, and only where
/// that is wanted ([`Feeds::early`]): as soon as the work that makes them has been enqueued.
pub type Done<'a> = &'a mut (dyn FnMut(Range<usize>, &[f32]) + Send);

/// What is fed to a program. A feed has as many floats as its placeholder, or is [`Device::keep_pictures`]'s short form of that.
#[derive(Clone, Copy, Debug)]
pub struct Feeds<'a> {
    /// Of this run.
    pub now: &'a [&'a [f32]],
    /// Of the run after it, where they are known: a GPU fetches them while it computes.
    pub next: Option<&'a [&'a [f32]]>,
    /// Whether `now` was the `next` of the last run.
    pub known: bool,
    /// Whether [`Done`] wants to hear of gradients that stay on the device.
    pub early: bool,
}

impl<'a> Feeds<'a> {
    /// Of a run after which nothing is known.
    pub fn only(now: &'a [&'a [f32]]) -> Self {
        Self { now, next: None, known: false, early: false }
    }
}

/// A program bound to a device.
pub trait Executable: Send {
    /// Runs once. `gradients` is there exactly when the program computes them; `done` hears of every row of them once.
    fn run(
        &mut self,
        variables: &Slab,
        feeds: Feeds<'_>,
        gradients: Option<&mut Slab>,
        done: Done<'_>,
    ) -> Result<(), DeviceError>;
    /// Copies a fetched value of the last run to the host.
    fn fetch(&self, index: usize, into: &mut [f32]) -> Result<(), DeviceError>;
    /// Appends the first `count` fetched values, numbers each, of every run since this was last asked; there must have been one.
    fn scalars(&mut self, count: usize, into: &mut Vec<f32>) -> Result<(), DeviceError> {
        let first = into.len();
        into.resize(first + count, 0.0);
        let mut values = into[first..].iter_mut().enumerate();
        values.try_for_each(|(i, value)| self.fetch(i, std::slice::from_mut(value)))
    }
    /// Of how many runs [`Executable::scalars`] are remembered.
    fn remembers(&self) -> usize {
        1
    }
    /// Draws each operation in a lane from now on.
    fn trace(&mut self, trace: Arc<Trace>, lane: &str);
    /// The program.
    fn program(&self) -> &Program;
    /// Bytes of the device's memory that it fills.
    fn bytes(&self) -> u64 {
        let program = self.program();
        let fed: usize = program.feeds.iter().map(|shape| shape.elements()).sum();
        4 * (program.arena + fed) as u64
    }
}

/// What can go wrong on a device. Exit code 9.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The device is not there.
    #[error("{asked}: {reason}")]
    Absent {
        /// What was asked for.
        asked: String,
        /// Why it cannot be had.
        reason: String,
    },
    /// Not enough memory.
    #[error("{device} cannot give {bytes} bytes; use a smaller --batch-size")]
    OutOfMemory {
        /// The device.
        device: String,
        /// Bytes that were asked for.
        bytes: usize,
    },
    /// A GPU has not enough memory.
    #[error("{device} has {} free and {} were asked for{advice}", stats::bytes(*free), stats::bytes(*bytes))]
    GpuMemory {
        /// The device.
        device: String,
        /// Bytes that were asked for.
        bytes: u64,
        /// Bytes that are free.
        free: u64,
        /// What would fit, where that is known.
        advice: String,
    },
    /// A GPU's kernels cannot be built.
    #[error(
        "{device}: its kernels do not build; this is a fault of the program or of NVRTC: {log}"
    )]
    Kernels {
        /// The device.
        device: String,
        /// What the compiler says.
        log: String,
    },
    /// A GPU, its driver or one of its libraries failed.
    #[error("{device} failed at {what}: {reason}")]
    Gpu {
        /// The device.
        device: String,
        /// What was being done.
        what: String,
        /// What it says, and what to do about it.
        reason: String,
    },
    /// The threads of a CPU tower could not be started.
    #[error("cannot start the threads of {device}: {reason}; use a smaller --threads")]
    Threads {
        /// The device.
        device: String,
        /// The system's words.
        reason: String,
    },
    /// Arguments that do not fit the program: a bug of the caller.
    #[error("program on {device}: {reason}")]
    Mismatch {
        /// The device.
        device: String,
        /// What does not fit.
        reason: String,
    },
}
