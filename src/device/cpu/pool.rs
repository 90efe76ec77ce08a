//! Maximum and average pooling.

use std::ops::Range;

use super::Ctx;
use super::simd::multiversion;
use crate::graph::Window;

/// Floats of an input and an output picture; checks the operands.
pub(super) fn sizes(w: &Window, n: usize, c: usize, x: &[f32], y: &[f32]) -> (usize, usize) {
    let (from, to) = (w.input[0] * w.input[1] * c, w.output[0] * w.output[1] * c);
    assert!(
        c > 0 && x.len() == n * from && y.len() == n * to,
        "{n} pictures of {c} channels under {w:?}"
    );
    (from, to)
}

/// Pictures per piece of work.
fn per_group(ctx: Ctx, n: usize) -> (usize, usize) {
    let groups = ctx.groups(n);
    (groups, n.div_ceil(groups))
}

/// The taps of one output position: input rows and columns, and the lengths of a row and of a column.
struct Taps {
    rows: Range<usize>,
    columns: Range<usize>,
    row: usize,
    column: usize,
}

impl Taps {
    #[inline(always)]
    fn new(w: &Window, at: usize, c: usize) -> Self {
        let (rows, top) = w.taps(0, at / w.output[1]);
        let (columns, left) = w.taps(1, at % w.output[1]);
        Self {
            rows: top..top + rows.len(),
            columns: left..left + columns.len(),
            row: w.input[1] * c,
            column: c,
        }
    }

    fn len(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Calls `tap(input offset)` in row-major order.
    #[inline(always)]
    fn each(&self, mut tap: impl FnMut(usize)) {
        for y in self.rows.clone() {
            for x in self.columns.clone() {
                tap(y * self.row + x * self.column);
            }
        }
    }
}

multiversion! {
    fn max_picture<V>(w: &Window, c: usize, x: &[f32], y: &mut [f32]) {
        for (at, y) in y.chunks_exact_mut(c).enumerate() {
            let taps = Taps::new(w, at, c);
            for (first, y) in (0..).step_by(V::LANES).zip(y.chunks_mut(V::LANES)) {
                // SAFETY: this copy is compiled for `V`; slices check the bounds.
                unsafe {
                    let mut best = V::splat(f32::NEG_INFINITY);
                    taps.each(|tap| {
                        let higher = V::max(best, V::load_part(&x[tap + first..][..y.len()]));
                        // The maximum takes a NaN from `x`; one that is there already stays.
                        best = V::if_equal(best, best, higher, best);
                    });
                    V::store_part(best, y);
                }
            }
        }
    }
}

multiversion! {
    fn max_grad_picture<V>(w: &Window, c: usize, relu: bool, x: &[f32], y: &[f32], dy: &[f32], dx: &mut [f32]) {
        dx.fill(0.0);
        for (at, (y, dy)) in y.chunks_exact(c).zip(dy.chunks_exact(c)).enumerate() {
            let taps = Taps::new(w, at, c);
            let blocks = y.chunks(V::LANES).zip(dy.chunks(V::LANES));
            for (first, (y, dy)) in (0..).step_by(V::LANES).zip(blocks) {
                // SAFETY: this copy is compiled for `V`; slices check the bounds.
                unsafe {
                    let max = V::load_part(y);
                    // What is left to hand out: all of it, until the first maximum has taken it.
                    let mut left = V::load_part(dy);
                    if relu {
                        left = V::if_equal(V::max(max, V::zero()), V::zero(), V::zero(), left);
                    }
                    taps.each(|tap| {
                        let dx = &mut dx[tap + first..][..y.len()];
                        let x = V::load_part(&x[tap + first..][..y.len()]);
                        let taken = V::if_equal(x, max, left, V::zero());
                        left = V::if_equal(x, max, V::zero(), left);
                        V::store_part(V::add(V::load_part(dx), taken), dx);
                    });
                }
            }
        }
    }
}

multiversion! {
    fn avg_picture(w: &Window, c: usize, x: &[f32], y: &mut [f32]) {
        for (at, out) in y.chunks_exact_mut(c).enumerate() {
            out.fill(0.0);
            let taps = Taps::new(w, at, c);
            let count = taps.len() as f32;
            taps.each(|tap| {
                for (o, v) in out.iter_mut().zip(&x[tap..][..c]) {
                    *o += v;
                }
            });
            for o in out {
                *o /= count;
            }
        }
    }
}

multiversion! {
    fn avg_grad_picture(w: &Window, c: usize, dy: &[f32], dx: &mut [f32]) {
        dx.fill(0.0);
        for (at, dy) in dy.chunks_exact(c).enumerate() {
            let taps = Taps::new(w, at, c);
            let count = taps.len() as f32;
            taps.each(|tap| {
                for (dx, dy) in dx[tap..][..c].iter_mut().zip(dy) {
                    *dx += dy / count;
                }
            });
        }
    }
}

/// The maximum of each window of `n` pictures of `c` channels. Padding never wins, NaN always.
pub fn max_pool(ctx: Ctx, w: &Window, n: usize, c: usize, x: &[f32], y: &mut [f32]) {
    let (from, to) = sizes(w, n, c, x, y);
    let (groups, per) = per_group(ctx, n);
    ctx.each(groups, [(x, per * from)], [(y, per * to)], |_, [x], [y]| {
        for (x, y) in x.chunks_exact(from).zip(y.chunks_exact_mut(to)) {
            max_picture(ctx.isa, w, c, x, y);
        }
    });
}

/// The gradient of [`max_pool`] by its input: each goes to the first maximum of its window in row-major order. With `relu` the
/// input is the output of a relu, and the gradient is that by the relu's input.
#[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
pub fn max_pool_grad(
    ctx: Ctx,
    w: &Window,
    n: usize,
    c: usize,
    relu: bool,
    x: &[f32],
    y: &[f32],
    dy: &[f32],
    dx: &mut [f32],
) {
    let (from, to) = sizes(w, n, c, x, y);
    sizes(w, n, c, dx, dy);
    let (groups, per) = per_group(ctx, n);
    let ins = [(x, per * from), (y, per * to), (dy, per * to)];
    ctx.each(groups, ins, [(dx, per * from)], |_, [x, y, dy], [dx]| {
        let outs = y.chunks_exact(to).zip(dy.chunks_exact(to));
        for ((x, dx), (y, dy)) in x.chunks_exact(from).zip(dx.chunks_exact_mut(from)).zip(outs) {
            max_grad_picture(ctx.isa, w, c, relu, x, y, dy, dx);
        }
    });
}

/// The mean of each window's taps that lie inside the picture.
pub fn avg_pool(ctx: Ctx, w: &Window, n: usize, c: usize, x: &[f32], y: &mut [f32]) {
    let (from, to) = sizes(w, n, c, x, y);
    let (groups, per) = per_group(ctx, n);
    ctx.each(groups, [(x, per * from)], [(y, per * to)], |_, [x], [y]| {
        for (x, y) in x.chunks_exact(from).zip(y.chunks_exact_mut(to)) {
            avg_picture(ctx.isa, w, c, x, y);
        }
    });
}

/// The gradient of [`avg_pool`] by its input.
pub fn avg_pool_grad(ctx: Ctx, w: &Window, n: usize, c: usize, dy: &[f32], dx: &mut [f32]) {
    let (from, to) = sizes(w, n, c, dx, dy);
    let (groups, per) = per_group(ctx, n);
    ctx.each(groups, [(dy, per * to)], [(dx, per * from)], |_, [dy], [dx]| {
        for (dy, dx) in dy.chunks_exact(to).zip(dx.chunks_exact_mut(from)) {
            avg_grad_picture(ctx.isa, w, c, dy, dx);
        }
    });
}
