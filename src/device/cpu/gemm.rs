//! Matrix products.

use std::ops::Range;

use super::pack::{pack_columns, pack_rows};
use super::tile::Band;
use super::{Ctx, Epilogue};

/// Floats of a packed block of the right operand: 16 KiB, half of a first-level cache.
const BLOCK: usize = 4096;

/// Rows and columns of the result that are finished before others begin: with 256 terms of `a` half a megabyte at most.
const SIDE: usize = 256;

/// `out[m][n] = a[m][k] * b[k][n]`, all row-major and dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matmul {
    /// Rows of the result.
    pub m: usize,
    /// Terms of each sum.
    pub k: usize,
    /// Columns of the result.
    pub n: usize,
    /// Whether `a` is stored as `[k][m]`.
    pub trans_a: bool,
    /// Whether `b` is stored as `[n][k]`.
    pub trans_b: bool,
}

/// Memory of the result that threads share by columns.
pub(super) struct Shared(pub(super) *mut f32);
// SAFETY: threads write disjoint columns and rows, see `matmul`.
unsafe impl Sync for Shared {}

/// How the result is split among threads: runs of rows and runs of panels.
fn split(ctx: Ctx, p: &Matmul) -> (usize, usize) {
    const SMALL: usize = 1 << 16;
    if ctx.threads == 1 || p.m * p.n * p.k < SMALL {
        return (1, 1);
    }
    let panels = p.n.div_ceil(ctx.isa.panel());
    let across = panels.min(2 * ctx.threads).max(1);
    (ctx.threads.div_ceil(across).min(p.m.div_ceil(12)).max(1), across)
}

/// Cuts a range into runs of `len`, the last one shorter: where each begins, and how long it is.
fn runs(of: Range<usize>, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let end = of.end;
    of.step_by(len).map(move |at| (at, len.min(end - at)))
}

/// Floats of scratch memory that [`matmul`] needs.
pub fn matmul_scratch(ctx: Ctx, p: &Matmul) -> usize {
    let (down, across) = split(ctx, p);
    down * across * BLOCK
}

/// Multiplies two matrices. An empty sum is zero.
pub fn matmul(
    ctx: Ctx,
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
    let scratch = &mut scratch[..matmul_scratch(ctx, p)];
    if out.is_empty() {
        return;
    }
    if k == 0 {
        for row in out.chunks_exact_mut(n) {
            row.iter_mut().enumerate().for_each(|(j, o)| *o = epilogue.apply(0.0, j));
        }
        return;
    }
    let panel = ctx.isa.panel();
    let panels = n.div_ceil(panel);
    let depth = BLOCK / panel;
    let (down, across) = split(ctx, p);
    let shared = Shared(out.as_mut_ptr());
    let shared = &shared;
    ctx.each(down * across, [], [(scratch, BLOCK)], |part, [], [block]| {
        let (i, j) = (part / across, part % across);
        // A part of `a` and one of the result stay in the second-level cache while the panels go by.
        for (row, rows) in runs(m * i / down..m * (i + 1) / down, SIDE) {
            for (first, count) in runs(panels * j / across..panels * (j + 1) / across, SIDE / panel)
            {
                for (k0, terms) in runs(0..k, depth) {
                    let block = &mut block[..terms * panel];
                    for column in (first..first + count).map(|at| at * panel) {
                        let columns = panel.min(n - column);
                        if trans_b {
                            let from = &b[column * k + k0..];
                            pack_columns(ctx.isa, panel, from, k, columns, block);
                        } else {
                            pack_rows(ctx.isa, panel, &b[k0 * n + column..], n, columns, block);
                        }
                        let (from, row_step, step) =
                            if trans_a { (k0 * m + row, 1, m) } else { (row * k + k0, k, 1) };
                        let last = k0 + terms == k;
                        let band = Band {
                            a: &a[from..],
                            row: row_step,
                            step,
                            a_outer: 0,
                            b: block,
                            b_outer: 0,
                            inner: terms,
                            outer: 1,
                            rows,
                            columns,
                            out_row: n,
                            accumulate: k0 > 0,
                            epilogue: if last { epilogue.from(column) } else { Epilogue::None },
                        };
                        // SAFETY: these rows of these columns lie in `out`, and no other part has them.
                        unsafe { band.run_raw(ctx.isa, shared.0.add(row * n + column)) };
                    }
                }
            }
        }
    });
}
