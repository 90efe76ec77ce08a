//! Matrix products in bfloat16.

use super::block::{Block, Tiles};
use super::pack::{self, Spread};
use super::{BLOCK, COLUMNS, DEPTH, ROWS, TILE, Unit, halves};
use crate::device::cpu::gemm::{Matmul, Shared};
use crate::device::cpu::{Ctx, Epilogue, epilogue};

/// Rows of the left operand that are packed at a time.
const BAND: usize = 2 * ROWS;

/// Terms, in whole tiles.
fn depth(p: &Matmul) -> usize {
    p.k.next_multiple_of(DEPTH)
}

/// Runs of blocks of columns, which threads take.
fn parts(ctx: Ctx, p: &Matmul) -> usize {
    let blocks = p.n.div_ceil(BLOCK);
    if ctx.threads == 1 { 1 } else { blocks.min(2 * ctx.threads).max(1) }
}

/// Floats of scratch memory that [`matmul`] needs.
pub fn matmul_scratch(ctx: Ctx, p: &Matmul) -> usize {
    let (left, right) = (p.m.next_multiple_of(BAND) * depth(p), BLOCK * depth(p));
    left / 2 + parts(ctx, p) * (right / 2 + BAND * BLOCK)
}

#[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
/// Multiplies two matrices. An empty sum is zero.
pub fn matmul(
    ctx: Ctx,
    unit: Unit,
    p: &Matmul,
    a: &[f32],
    b: &[f32],
    epilogue: Epilogue<'_>,
    out: &mut [f32],
    scratch: &mut [f32],
) {
    let Matmul { m, k, n, trans_a, trans_b } = *p;
    assert_eq!((a.len(), b.len(), out.len()), (m * k, k * n, m * n), "operands of {p:?}");
    assert!(epilogue.fits(n), "one bias per column of {p:?}");
    if out.is_empty() {
        return;
    }
    if k == 0 {
        for row in out.chunks_exact_mut(n) {
            row.iter_mut().enumerate().for_each(|(j, o)| *o = epilogue.apply(0.0, j));
        }
        return;
    }
    let depth = depth(p);
    let scratch = &mut scratch[..matmul_scratch(ctx, p)];
    let (left, work) = scratch.split_at_mut(m.next_multiple_of(BAND) * depth / 2);
    // The left operand, `[row][term]`.
    let band = BAND * depth / 2;
    ctx.each(m.div_ceil(BAND), [], [(&mut *left, band)], |i, [], [to]| {
        let to = halves(to);
        if k < depth {
            to.fill(0);
        }
        let rows = BAND.min(m - i * BAND);
        if trans_a {
            // Terms are the positions of a picture of one row, of which this band is some channels.
            let spread = Spread {
                extents: [1, k],
                channels: rows,
                pitch: m,
                pad: [0, 0],
                stride: [1, 1],
                width: depth,
            };
            pack::planes(ctx.isa, &spread, depth, &a[i * BAND..], to);
        } else {
            let spread = Spread {
                extents: [rows, k],
                channels: 1,
                pitch: 1,
                pad: [0, 0],
                stride: [1, 1],
                width: depth,
            };
            pack::rows(ctx.isa, &spread, &a[i * BAND * k..][..rows * k], to);
        }
    });
    let left = &*halves(left);
    let parts = parts(ctx, p);
    let blocks = n.div_ceil(BLOCK);
    let shared = Shared(out.as_mut_ptr());
    let shared = &shared;
    ctx.each(parts, [], [(work, BLOCK * depth / 2 + BAND * BLOCK)], |part, [], [work]| {
        let (right, sums) = work.split_at_mut(BLOCK * depth / 2);
        let right = halves(right);
        let tiles = Tiles::new(unit, ROWS);
        for first in (blocks * part / parts..blocks * (part + 1) / parts).map(|v| v * BLOCK) {
            let columns = BLOCK.min(n - first);
            if k < depth || columns < BLOCK {
                right.fill(0);
            }
            if trans_b {
                let panels = right.chunks_exact_mut(COLUMNS * depth);
                for (to, first) in panels.zip((first..n).step_by(COLUMNS)) {
                    let columns = COLUMNS.min(n - first);
                    pack::panel_of_rows(ctx.isa, &b[first * k..][..columns * k], k, to);
                }
            } else {
                let spread = Spread {
                    extents: [1, k],
                    channels: columns,
                    pitch: n,
                    pad: [0, 0],
                    stride: [1, 1],
                    width: depth,
                };
                pack::panels(ctx.isa, &spread, depth, &b[first..], right);
            }
            for (i, a) in left.chunks_exact(BAND * depth).enumerate() {
                let block = Block {
                    a,
                    row: depth,
                    second: Some(ROWS * depth),
                    a_step: DEPTH,
                    a_outer: 0,
                    b: right,
                    panels: [0, COLUMNS * depth],
                    b_step: TILE,
                    b_outer: 0,
                    inner: depth / DEPTH,
                    outer: 1,
                    accumulate: false,
                };
                tiles.run(&block, sums, BLOCK, [0, ROWS * BLOCK]);
                let rows = BAND.min(m - i * BAND);
                let epilogue = epilogue.from(first);
                // SAFETY: these rows of these columns lie in `out`, and no other part has the columns.
                unsafe {
                    let out = shared.0.add(i * BAND * n + first);
                    epilogue::finish_raw(ctx.isa, epilogue, columns, &sums[..rows * BLOCK], n, out);
                }
            }
        }
    });
}
