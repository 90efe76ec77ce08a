//! Where gradients meet: reducers average slabs and know nothing of models.

mod collective;
mod cpu;
mod early;
mod exchange;
mod hosts;
mod link;
mod nccl;
mod wire;

pub use collective::{CollectiveMean, Way};
pub use cpu::CpuMean;
pub use exchange::{Exchange, SEGMENT, direct, ring};
pub use hosts::Topology;
pub use link::{Link, LocalLink};
pub use nccl::{Fellows, NcclMean};
pub use wire::Wire;

use std::ops::Range;
use std::sync::Arc;

use crate::device::{DeviceError, Slab};
use crate::util::trace::Trace;

/// Averages the gradients of all towers, one slab per tower and micro-batch.
pub trait GradientReducer: Send {
    /// One word for the header: `cpu`.
    fn name(&self) -> &'static str;
    /// A step begins; its towers tell the sink what is final.
    fn begin(&mut self) -> &dyn Sink {
        &Nobody
    }
    /// Traces what is done in other threads from now on.
    fn trace(&mut self, _trace: Arc<Trace>) {}
    /// Computes the mean. All replicas must call it the same number of times with the same layout. `loss` is the mean loss of
    /// `grads`, and becomes that of all whose gradients are in the mean; without it the mean may still be under way afterwards, in the
    /// order of its device's work.
    fn reduce(&mut self, grads: &mut [Slab], loss: Option<&mut f64>) -> Result<(), ReduceError>;
    /// Waits for what is under way; called before anybody waits for a device.
    fn settle(&mut self) -> Result<(), ReduceError> {
        Ok(())
    }
    /// The result of the last [`GradientReducer::reduce`] over `grads`: one slab for all, or one per tower.
    fn mean<'a>(&'a self, grads: &'a [Slab]) -> &'a [Slab];
}

/// Hears of gradients while they are being computed, so that who has to wait for others can begin.
pub trait Sink: Sync {
    /// Whether gradients that stay on GPUs are told of, too: without values, when the work that makes them has been enqueued.
    fn is_early(&self) -> bool {
        false
    }
    /// A range of gradient `index` has these values for good. Called once for each range, from the threads of the towers.
    fn ready(&self, index: usize, range: Range<usize>, values: &[f32]);
}

/// Who waits until all gradients are there.
struct Nobody;

impl Sink for Nobody {
    fn ready(&self, _index: usize, _range: Range<usize>, _values: &[f32]) {}
}

/// No exchange: every tower applies its own gradient. The honest 100 % line for scaling.
#[derive(Debug)]
pub struct Independent;

impl GradientReducer for Independent {
    fn name(&self) -> &'static str {
        "none"
    }

    fn reduce(&mut self, _: &mut [Slab], _: Option<&mut f64>) -> Result<(), ReduceError> {
        Ok(())
    }

    fn mean<'a>(&'a self, grads: &'a [Slab]) -> &'a [Slab] {
        grads
    }
}

/// What can go wrong while gradients meet.
#[derive(Debug, thiserror::Error)]
pub enum ReduceError {
    /// A device failed.
    #[error("averaging gradients")]
    Device(#[from] DeviceError),
    /// The run was stopped by another rank.
    #[error("{0}")]
    Stopped(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A rank of the collective died or cannot be reached.
    #[error("rank {rank} of the collective is gone: {reason}")]
    PeerLost {
        /// The rank that is gone, as far as is known the first of all.
        rank: usize,
        /// How it showed.
        reason: String,
    },
    /// A rank sent a message of another length: it trains another model.
    #[error(
        "rank {rank} sent {found} floats in place of {expected}; give every task the same model"
    )]
    Length {
        /// Who sent it.
        rank: usize,
        /// Floats that were due.
        expected: usize,
        /// Floats that came.
        found: usize,
    },
}
