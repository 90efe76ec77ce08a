//! Depthwise convolutions: each channel has filters of its own.

use super::Ctx;
use super::reduce::tree_sum;
use super::simd::multiversion;
use crate::graph::Window;

/// Chunks of pictures whose filter gradients are summed apart: fixed, so that threads cannot change a result.
const CHUNKS: usize = 8;

/// Sizes of a convolution of `[n, h, w, channels]` with a `[kh, kw, channels, multiplier]` filter; output channel
/// `c * multiplier + m` is channel `c` under its filter `m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depthwise {
    /// Pictures.
    pub n: usize,
    /// Channels of the input.
    pub channels: usize,
    /// Filters per channel.
    pub multiplier: usize,
    /// Extents of input, kernel and output.
    pub window: Window,
}

impl Depthwise {
    fn outs(&self) -> usize {
        self.channels * self.multiplier
    }

    /// Floats of an input picture.
    fn picture(&self) -> usize {
        self.window.input[0] * self.window.input[1] * self.channels
    }

    /// Floats of an output picture.
    fn result(&self) -> usize {
        self.window.output[0] * self.window.output[1] * self.outs()
    }

    /// Floats of the filter.
    fn filter(&self) -> usize {
        self.window.kernel[0] * self.window.kernel[1] * self.outs()
    }

    fn check(&self, x: &[f32], filter: &[f32], y: &[f32]) {
        let sizes = (self.n * self.picture(), self.filter(), self.n * self.result());
        assert_eq!((x.len(), filter.len(), y.len()), sizes, "operands of {self:?}");
        assert!(self.channels > 0 && self.multiplier > 0, "{self:?} has no channels");
    }

    /// Calls `tap(input offset, filter offset)` for the taps of output position `at` in row-major order.
    #[inline(always)]
    fn for_taps(&self, at: usize, mut tap: impl FnMut(usize, usize)) {
        let w = &self.window;
        let (rows, top) = w.taps(0, at / w.output[1]);
        let (columns, left) = w.taps(1, at % w.output[1]);
        for (ky, y) in rows.zip(top..) {
            for (kx, x) in columns.clone().zip(left..) {
                let input = (y * w.input[1] + x) * self.channels;
                tap(input, (ky * w.kernel[1] + kx) * self.outs());
            }
        }
    }
}

multiversion! {
    fn forward_picture(d: &Depthwise, x: &[f32], filter: &[f32], y: &mut [f32]) {
        let (c, m) = (d.channels, d.multiplier);
        for (at, y) in y.chunks_exact_mut(c * m).enumerate() {
            y.fill(0.0);
            d.for_taps(at, |input, tap| {
                let (x, f) = (&x[input..][..c], &filter[tap..][..c * m]);
                if m == 1 {
                    for ((y, x), f) in y.iter_mut().zip(x).zip(f) {
                        *y += x * f;
                    }
                } else {
                    for ((y, x), f) in y.chunks_exact_mut(m).zip(x).zip(f.chunks_exact(m)) {
                        y.iter_mut().zip(f).for_each(|(y, f)| *y += x * f);
                    }
                }
            });
        }
    }
}

multiversion! {
    fn input_grad_picture(d: &Depthwise, dy: &[f32], filter: &[f32], dx: &mut [f32]) {
        let (c, m) = (d.channels, d.multiplier);
        dx.fill(0.0);
        for (at, dy) in dy.chunks_exact(c * m).enumerate() {
            d.for_taps(at, |input, tap| {
                let (dx, f) = (&mut dx[input..][..c], &filter[tap..][..c * m]);
                if m == 1 {
                    for ((dx, dy), f) in dx.iter_mut().zip(dy).zip(f) {
                        *dx += dy * f;
                    }
                } else {
                    for ((dx, dy), f) in dx.iter_mut().zip(dy.chunks_exact(m)).zip(f.chunks_exact(m)) {
                        dy.iter().zip(f).for_each(|(dy, f)| *dx += dy * f);
                    }
                }
            });
        }
    }
}

multiversion! {
    fn filter_grad_picture(d: &Depthwise, x: &[f32], dy: &[f32], dw: &mut [f32]) {
        let (c, m) = (d.channels, d.multiplier);
        for (at, dy) in dy.chunks_exact(c * m).enumerate() {
            d.for_taps(at, |input, tap| {
                let (x, dw) = (&x[input..][..c], &mut dw[tap..][..c * m]);
                if m == 1 {
                    for ((dw, x), dy) in dw.iter_mut().zip(x).zip(dy) {
                        *dw += x * dy;
                    }
                } else {
                    for ((dw, x), dy) in dw.chunks_exact_mut(m).zip(x).zip(dy.chunks_exact(m)) {
                        dw.iter_mut().zip(dy).for_each(|(dw, dy)| *dw += x * dy);
                    }
                }
            });
        }
    }
}

/// `y[.., c * multiplier + m] = sum over the taps of x[.., c] * filter[.., c, m]`.
pub fn forward(ctx: Ctx, d: &Depthwise, x: &[f32], filter: &[f32], y: &mut [f32]) {
    d.check(x, filter, y);
    let groups = ctx.groups(d.n);
    let (per, from, to) = (d.n.div_ceil(groups), d.picture(), d.result());
    ctx.each(groups, [(x, per * from)], [(y, per * to)], |_, [x], [y]| {
        for (x, y) in x.chunks_exact(from).zip(y.chunks_exact_mut(to)) {
            forward_picture(ctx.isa, d, x, filter, y);
        }
    });
}

/// The gradient by the input.
pub fn input_grad(ctx: Ctx, d: &Depthwise, dy: &[f32], filter: &[f32], dx: &mut [f32]) {
    d.check(dx, filter, dy);
    let groups = ctx.groups(d.n);
    let (per, from, to) = (d.n.div_ceil(groups), d.picture(), d.result());
    ctx.each(groups, [(dy, per * to)], [(dx, per * from)], |_, [dy], [dx]| {
        for (dy, dx) in dy.chunks_exact(to).zip(dx.chunks_exact_mut(from)) {
            input_grad_picture(ctx.isa, d, dy, filter, dx);
        }
    });
}

/// Floats of scratch memory that [`filter_grad`] needs.
pub fn filter_grad_scratch(d: &Depthwise) -> usize {
    CHUNKS * d.filter()
}

/// The gradient by the filter.
pub fn filter_grad(
    ctx: Ctx,
    d: &Depthwise,
    x: &[f32],
    dy: &[f32],
    dw: &mut [f32],
    scratch: &mut [f32],
) {
    d.check(x, dw, dy);
    let per = d.n.div_ceil(CHUNKS).max(1);
    let (chunks, from, to, size) = (d.n.div_ceil(per), d.picture(), d.result(), d.filter());
    let partials = &mut scratch[..chunks * size];
    let ins = [(x, per * from), (dy, per * to)];
    ctx.each(chunks, ins, [(&mut *partials, size)], |_, [x, dy], [partial]| {
        partial.fill(0.0);
        for (x, dy) in x.chunks_exact(from).zip(dy.chunks_exact(to)) {
            filter_grad_picture(ctx.isa, d, x, dy, partial);
        }
    });
    let partials = &*partials;
    tree_sum(ctx, chunks, |i| &partials[i * size..][..size], 1.0, dw);
}
