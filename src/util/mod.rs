//! Leaf helpers; imports nothing from the crate.

pub mod clock;
pub mod rng;
pub mod stats;
