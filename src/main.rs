//! Scratch.
fn main() {}
