//! What a unit can do at most: blocks whose operands stay in the first-level cache.

use super::block::{Block, Tiles};
use super::{BLOCK, DEPTH, ROWS, TILE, Unit};

/// Tiles along each sum, and sums.
const STEPS: usize = 1 << 6;
const BLOCKS: usize = 1 << 8;
/// Operations of a call of [`products`].
pub(in super::super) const FLOPS: f64 = (2 * BLOCK * BLOCK * DEPTH * STEPS * BLOCKS) as f64;

/// Multiplies, and returns one of the sums.
pub(in super::super) fn products(unit: Unit) -> f32 {
    /// Two tiles of ones, each row in a cache line.
    #[repr(align(64))]
    struct Ones([u16; 2 * TILE]);
    let ones = Ones([0x3f80; 2 * TILE]);
    let mut sums = [0.0; BLOCK * BLOCK];
    let tiles = Tiles::new(unit, ROWS);
    let block = Block {
        a: &ones.0,
        row: DEPTH,
        second: Some(ROWS * DEPTH),
        a_step: 0,
        a_outer: 0,
        b: &ones.0,
        panels: [0, TILE],
        b_step: 0,
        b_outer: 0,
        inner: STEPS,
        outer: 1,
        accumulate: false,
    };
    for _ in 0..BLOCKS {
        tiles.run(&block, &mut sums, BLOCK, [0, ROWS * BLOCK]);
    }
    sums[0]
}
