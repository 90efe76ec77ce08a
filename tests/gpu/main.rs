//! GPUs, on machines that have none: the program's own code on a CUDA made of CPU threads (`tests/fakecuda`).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod fake;
mod ops;

#[path = "../support/mod.rs"]
mod support;
