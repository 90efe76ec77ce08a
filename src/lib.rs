//! Scratch.
pub mod cluster;
pub mod graph;
pub mod optim;
pub mod tensor;
pub mod util;
