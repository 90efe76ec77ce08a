//! Matrix products.

use super::pack::{pack_columns, pack_rows};
use super::tile::Band;
use super::{Ctx, Epilogue};

/// Floats of a packed block of the right operand: 16 KiB, half of a first-level cache.
const BLOCK: usize = 4096;

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
        let (top, bottom) = (m * i / down, m * (i + 1) / down);
        for column in (panels * j / across..panels * (j + 1) / across).map(|v| v * panel) {
            let columns = panel.min(n - column);
            for k0 in (0..k).step_by(depth) {
                let terms = depth.min(k - k0);
                let block = &mut block[..terms * panel];
                if trans_b {
                    pack_columns(ctx.isa, panel, &b[column * k + k0..], k, columns, block);
                } else {
                    pack_rows(ctx.isa, panel, &b[k0 * n + column..], n, columns, block);
                }
                let last = k0 + terms == k;
                let (first, row, step) =
                    if trans_a { (k0 * m + top, 1, m) } else { (top * k + k0, k, 1) };
                let band = Band {
                    a: &a[first..],
                    row,
                    step,
                    a_outer: 0,
                    b: block,
                    b_outer: 0,
                    inner: terms,
                    outer: 1,
                    rows: bottom - top,
                    columns,
                    out_row: n,
                    accumulate: k0 > 0,
                    epilogue: if last { epilogue.from(column) } else { Epilogue::None },
                };
                // SAFETY: rows top..bottom of these columns lie in `out`, and no other part has them.
                unsafe { band.run_raw(ctx.isa, shared.0.add(top * n + column)) };
            }
        }
    });
}
