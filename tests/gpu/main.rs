//! GPUs, on machines that have none: the program's own code on a CUDA made of CPU threads (`tests/fakecuda`); or on real ones
//! (`TFTRAIN_GPU=real`, see `tests/gpu.sh`).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod errors;
mod fake;
mod golden;
mod input;
mod nccl;
mod ops;
mod placement;
mod sessions;
mod training;

#[allow(dead_code, reason = "shared with the tests of the program as its users run it")]
#[path = "../cli/support.rs"]
mod cli;
#[path = "../support/mod.rs"]
mod support;
