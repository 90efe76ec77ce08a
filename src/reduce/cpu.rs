//! [`CpuMean`]: the towers of one process, averaged on the host.

use std::sync::Arc;

use super::{GradientReducer, ReduceError};
use crate::device::{Device, Slab};

/// The mean as a fixed binary tree over the slab's index, so that the bits never depend on who came first. It takes the place of
/// the first gradient.
pub struct CpuMean {
    device: Arc<dyn Device>,
    /// Whether the sum is divided by the number of slabs.
    divide: bool,
}

impl CpuMean {
    /// `device` does the sums.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, divide: true }
    }

    /// The sum in place of the mean: the first stage of a [`super::CollectiveMean`], which divides once, at the end.
    pub fn undivided(device: Arc<dyn Device>) -> Self {
        Self { device, divide: false }
    }
}

impl GradientReducer for CpuMean {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn reduce(&mut self, grads: &mut [Slab], _loss: Option<&mut f64>) -> Result<(), ReduceError> {
        if grads.len() > 1 {
            let scale = if self.divide { 1.0 / grads.len() as f32 } else { 1.0 };
            self.device.sum(grads, scale)?;
        }
        Ok(())
    }

    fn mean<'a>(&'a self, grads: &'a [Slab]) -> &'a [Slab] {
        &grads[..grads.len().min(1)]
    }
}
