//! [`CpuMean`]: the towers of one process, averaged on the host.

use std::sync::Arc;

use super::{GradientReducer, ReduceError};
use crate::device::{Device, Slab};

/// The mean as a fixed binary tree over the slab's index, so that the bits never depend on who came first.
pub struct CpuMean {
    device: Arc<dyn Device>,
    /// Not there for a single slab, which is its own mean.
    mean: Option<Slab>,
    /// Whether the sum is divided by the number of slabs.
    divide: bool,
}

impl CpuMean {
    /// For `n_slabs` slabs of `len` floats; `device` does the sums.
    pub fn new(device: Arc<dyn Device>, n_slabs: usize, len: usize) -> Result<Self, ReduceError> {
        let mean = if n_slabs > 1 { Some(device.alloc(len)?) } else { None };
        Ok(Self { device, mean, divide: true })
    }

    /// The sum in place of the mean: the first stage of a [`super::CollectiveMean`], which divides once, at the end.
    pub fn undivided(
        device: Arc<dyn Device>,
        n_slabs: usize,
        len: usize,
    ) -> Result<Self, ReduceError> {
        Ok(Self { divide: false, ..Self::new(device, n_slabs, len)? })
    }
}

impl GradientReducer for CpuMean {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn reduce(&mut self, grads: &mut [Slab], _loss: &mut f64) -> Result<(), ReduceError> {
        if let Some(mean) = &mut self.mean {
            let scale = if self.divide { 1.0 / grads.len() as f32 } else { 1.0 };
            self.device.sum(grads, scale, mean)?;
        }
        Ok(())
    }

    fn mean<'a>(&'a self, grads: &'a [Slab]) -> &'a [Slab] {
        self.mean.as_ref().map_or(grads, std::slice::from_ref)
    }
}
