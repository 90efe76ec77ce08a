//! Where gradients meet: reducers average slabs and know nothing of models.

mod collective;
mod cpu;
mod exchange;
mod hosts;
mod link;
mod wire;

pub use collective::{CollectiveMean, Topology};
pub use cpu::CpuMean;
pub use exchange::{Exchange, SEGMENT, direct, ring};
pub use link::{Link, LocalLink};
pub use wire::Wire;

use crate::device::{DeviceError, Slab};

/// Averages the gradients of all towers, one slab per tower and micro-batch.
pub trait GradientReducer: Send {
    /// One word for the header: `cpu`.
    fn name(&self) -> &'static str;
    /// Computes the mean. All replicas must call it the same number of times with the same layout.
    fn reduce(&mut self, grads: &mut [Slab]) -> Result<(), ReduceError>;
    /// The result of the last [`GradientReducer::reduce`] over `grads`: one slab for all, or one per tower.
    fn mean<'a>(&'a self, grads: &'a [Slab]) -> &'a [Slab];
}

/// No exchange: every tower applies its own gradient. The honest 100 % line for scaling.
#[derive(Debug)]
pub struct Independent;

impl GradientReducer for Independent {
    fn name(&self) -> &'static str {
        "none"
    }

    fn reduce(&mut self, _grads: &mut [Slab]) -> Result<(), ReduceError> {
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
