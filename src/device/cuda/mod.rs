//! CUDA: found at run time, never needed.

mod probe;

pub use probe::{Gpu, Library, Probe, probe};
