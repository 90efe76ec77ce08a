//! Leaf helpers; imports nothing from the crate.

pub mod clock;
pub mod half;
pub mod rng;
pub mod stats;
pub mod trace;

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}
