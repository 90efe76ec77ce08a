//! Maximum and average pooling.

use super::Ctx;
use super::simd::{load, multiversion, store};
use crate::graph::Window;

/// Channels taken at a time, their state kept in registers.
const LANES: usize = 16;

/// Floats of an input and an output picture; checks the operands.
fn sizes(w: &Window, n: usize, c: usize, x: &[f32], y: &[f32]) -> (usize, usize) {
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

/// Calls `tap(input offset)` for the taps of output position `at` in row-major order.
#[inline(always)]
fn for_taps(w: &Window, at: usize, c: usize, mut tap: impl FnMut(usize)) {
    let (rows, top) = w.taps(0, at / w.output[1]);
    let (columns, left) = w.taps(1, at % w.output[1]);
    for y in top..top + rows.len() {
        for x in left..left + columns.len() {
            tap((y * w.input[1] + x) * c);
        }
    }
}

multiversion! {
    fn max_picture(w: &Window, c: usize, x: &[f32], y: &mut [f32]) {
        for (at, y) in y.chunks_exact_mut(c).enumerate() {
            for (first, y) in (0..).step_by(LANES).zip(y.chunks_mut(LANES)) {
                let mut best = [f32::NEG_INFINITY; LANES];
                for_taps(w, at, c, |tap| {
                    let x: [f32; LANES] = load(&x[tap + first..][..y.len()]);
                    for (best, x) in best.iter_mut().zip(x) {
                        // NaN wins, as it should not go unseen.
                        *best = if x > *best || x.is_nan() { x } else { *best };
                    }
                });
                store(&best, y);
            }
        }
    }
}

multiversion! {
    fn max_grad_picture(w: &Window, c: usize, x: &[f32], y: &[f32], dy: &[f32], dx: &mut [f32]) {
        dx.fill(0.0);
        for (at, (y, dy)) in y.chunks_exact(c).zip(dy.chunks_exact(c)).enumerate() {
            for (first, (y, dy)) in (0..).step_by(LANES).zip(y.chunks(LANES).zip(dy.chunks(LANES))) {
                let max: [f32; LANES] = load(y);
                // What is left to hand out: all of it, until the first maximum has taken it.
                let mut left: [f32; LANES] = load(dy);
                for_taps(w, at, c, |tap| {
                    let (x, dx) = (&x[tap + first..][..y.len()], &mut dx[tap + first..][..y.len()]);
                    let (x, mut sums): ([f32; LANES], [f32; LANES]) = (load(x), load(dx));
                    for l in 0..LANES {
                        let hit = x[l] == max[l];
                        sums[l] += if hit { left[l] } else { 0.0 };
                        left[l] = if hit { 0.0 } else { left[l] };
                    }
                    store(&sums, dx);
                });
            }
        }
    }
}

multiversion! {
    fn avg_picture(w: &Window, c: usize, x: &[f32], y: &mut [f32]) {
        for (at, out) in y.chunks_exact_mut(c).enumerate() {
            out.fill(0.0);
            let mut count = 0.0f32;
            for_taps(w, at, c, |tap| {
                count += 1.0;
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
            let mut count = 0.0f32;
            for_taps(w, at, c, |_| count += 1.0);
            for_taps(w, at, c, |tap| {
                for (dx, dy) in dx[tap..][..c].iter_mut().zip(dy) {
                    *dx += dy / count;
                }
            });
        }
    }
}

/// The maximum of each window of `n` pictures of `c` channels. Padding never wins.
pub fn max_pool(ctx: Ctx, w: &Window, n: usize, c: usize, x: &[f32], y: &mut [f32]) {
    let (from, to) = sizes(w, n, c, x, y);
    let (groups, per) = per_group(ctx, n);
    ctx.each(groups, [(x, per * from)], [(y, per * to)], |_, [x], [y]| {
        for (x, y) in x.chunks_exact(from).zip(y.chunks_exact_mut(to)) {
            max_picture(ctx.isa, w, c, x, y);
        }
    });
}

/// The gradient of [`max_pool`] by its input: each goes to the first maximum of its window in row-major order.
#[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
pub fn max_pool_grad(
    ctx: Ctx,
    w: &Window,
    n: usize,
    c: usize,
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
            max_grad_picture(ctx.isa, w, c, x, y, dy, dx);
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
