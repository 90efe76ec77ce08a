//! Matrix products in bfloat16.

use super::block::{Block, Tiles};
use super::pack::{self, Spread};
use super::{BLOCK, COLUMNS, DEPTH, ROWS, TILE, Unit, halves};
use crate::device::cpu::gemm::{Matmul, Shared};
use crate::device::cpu::{Ctx, Epilogue, epilogue};

/// Rows of a band of the left operand: two tiles, as a block has columns.
const BAND: usize = BLOCK;

/// Terms, in whole tiles.
fn depth(p: &Matmul) -> usize {
    p.k.next_multiple_of(DEPTH)
}

/// Bands and blocks that are packed at a time: whole runs of cache lines of a wide operand, and no more than a second-level cache holds.
const TOGETHER: usize = 4;

/// Runs of bands of rows, or of blocks of columns, which threads take, and how many are in the longest.
fn parts(ctx: Ctx, extent: usize) -> (usize, usize) {
    let blocks = extent.div_ceil(BLOCK);
    let wanted = if ctx.threads == 1 { 1 } else { 2 * ctx.threads };
    let per = blocks.div_ceil(wanted).clamp(1, TOGETHER);
    (blocks.div_ceil(per), per)
}

/// Floats of scratch memory that [`matmul`] needs.
pub fn matmul_scratch(ctx: Ctx, p: &Matmul) -> usize {
    let (parts, per) = parts(ctx, p.n);
    let (left, right) = (p.m.next_multiple_of(BAND), per * BLOCK);
    left * depth(p) / 2 + parts * (right * depth(p) / 2 + BAND * BLOCK)
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
    // The left operand, in tiles of 16 rows by 32 terms.
    let (bands, per) = parts(ctx, m);
    let per = per * BAND;
    ctx.each(bands, [], [(&mut *left, per * depth / 2)], |i, [], [to]| {
        let to = halves(to);
        if k < depth {
            to.fill(0);
        }
        let rows = per.min(m - i * per);
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
            pack::planes(ctx.isa, &spread, depth, &a[i * per..], to);
        } else {
            pack::tiles_of_rows(ctx.isa, &a[i * per * k..][..rows * k], k, to);
        }
    });
    let left = &*halves(left);
    let (parts, per) = parts(ctx, n);
    let right = per * BLOCK * depth / 2;
    let shared = Shared(out.as_mut_ptr());
    let shared = &shared;
    ctx.each(parts, [], [(work, right + BAND * BLOCK)], |part, [], [work]| {
        let (right, sums) = work.split_at_mut(right);
        let right = halves(right);
        let tiles = Tiles::new(unit, ROWS);
        let columns = part * per * BLOCK..n.min((part + 1) * per * BLOCK);
        if k < depth || !columns.len().is_multiple_of(BLOCK) {
            right.fill(0);
        }
        if trans_b {
            let panels = right.chunks_exact_mut(COLUMNS * depth);
            for (to, first) in panels.zip(columns.clone().step_by(COLUMNS)) {
                let count = COLUMNS.min(n - first);
                pack::panel_of_rows(ctx.isa, &b[first * k..][..count * k], k, to);
            }
        } else {
            let spread = Spread {
                extents: [1, k],
                channels: columns.len(),
                pitch: n,
                pad: [0, 0],
                stride: [1, 1],
                width: depth,
            };
            pack::panels(ctx.isa, &spread, depth, &b[columns.start..], right);
        }
        for (i, a) in left.chunks_exact(BAND * depth).enumerate() {
            let rows = BAND.min(m - i * BAND);
            for (b, first) in right.chunks_exact(BLOCK * depth).zip(columns.clone().step_by(BLOCK))
            {
                let block = Block {
                    a,
                    row: DEPTH,
                    second: Some(ROWS * depth),
                    a_step: TILE,
                    a_outer: 0,
                    b,
                    panels: [0, COLUMNS * depth],
                    b_step: TILE,
                    b_outer: 0,
                    inner: depth / DEPTH,
                    outer: 1,
                    accumulate: false,
                };
                tiles.run(&block, sums, BLOCK, [0, ROWS * BLOCK]);
                let epilogue = epilogue.from(first);
                let columns = BLOCK.min(n - first);
                // SAFETY: these rows of these columns lie in `out`, and no other part has the columns.
                unsafe {
                    let out = shared.0.add(i * BAND * n + first);
                    epilogue::finish_raw(ctx.isa, epilogue, columns, &sums[..rows * BLOCK], n, out);
                }
            }
        }
    });
}
