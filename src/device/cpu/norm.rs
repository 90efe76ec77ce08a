//! Local response normalisation and batch normalisation.

use super::Ctx;
use super::reduce::{CHUNKS, column_sums, row_chunks, tree_sum};
use super::simd::{MAX_LANES, Vector, multiversion};
use crate::graph::LrnParams;

/// Channels of a row whose sums are held on the stack at a time.
const BLOCK: usize = 512;
/// The largest radius of [`lrn`] that is less than the number of channels.
pub const MAX_RADIUS: usize = 128;
/// A block with the channels that its windows reach, twice over, and room for a last full read.
const BUFFER: usize = BLOCK + 4 * MAX_RADIUS + MAX_LANES;

impl LrnParams {
    /// With `s = bias + alpha * sum`: `s^-beta` and `s^-1`.
    ///
    /// For the usual power of 3/4 both are powers of `t = s^(-1/4)`: a guess and two steps of `t (1 - e)^(-1/4)` to second order,
    /// `e = 1 - s t^4`: no division and no root, for which a processor waits longest.
    ///
    /// # Safety
    /// As for every function of [`Vector`].
    #[inline(always)]
    unsafe fn powers<V: Vector>(&self, sums: V) -> (V, V) {
        // SAFETY: the caller's promise; `values` has room for a vector.
        unsafe {
            let base = V::add(V::splat(self.bias), V::mul(V::splat(self.alpha), sums));
            if self.beta == 0.75 {
                let (one, minus) = (V::splat(1.0), V::splat(-1.0));
                let mut t = V::inverse_fourth_root_guess(base);
                for _ in 0..2 {
                    let square = V::mul(t, t);
                    let e = V::mul_add(V::mul(minus, base), V::mul(square, square), one);
                    let slope = V::mul_add(V::splat(5.0 / 32.0), e, V::splat(0.25));
                    t = V::mul_add(V::mul(t, e), slope, t);
                }
                let square = V::mul(t, t);
                let power = V::mul(square, t);
                // The cube has thrice the rounding error of `t`; a last step takes it away.
                let e = V::mul_add(V::mul(V::mul(minus, base), t), power, one);
                let power = V::mul_add(V::mul(V::splat(0.75), power), e, power);
                return (power, V::mul(square, square));
            }
            let one = V::splat(1.0);
            if self.beta == 0.5 {
                return (V::div(one, V::sqrt(base)), V::div(one, base));
            }
            let mut values = [0.0; MAX_LANES];
            V::store(base, values.as_mut_ptr());
            values = values.map(|s| s.powf(-self.beta));
            (V::load(values.as_ptr()), V::div(one, base))
        }
    }

    /// The radius that matters for a row of `channels`.
    fn reach(&self, channels: usize, len: usize) -> usize {
        let reach = self.radius.min(channels);
        assert!(reach <= MAX_RADIUS, "{self:?} reaches further than {MAX_RADIUS} channels");
        assert!(
            channels > 0 && len.is_multiple_of(channels),
            "{len} floats are not rows of {channels}"
        );
        reach
    }
}

/// Floats at the start of cache lines.
#[repr(align(64))]
struct Lines([f32; BUFFER]);

/// Sums of the windows of `width` that begin at `buffer[at..]`.
///
/// # Safety
/// As for every function of [`Vector`].
#[inline(always)]
unsafe fn window_sums<V: Vector>(buffer: &[f32; BUFFER], at: usize, width: usize) -> V {
    let terms = &buffer[at..at + width + V::LANES - 1];
    // SAFETY: the caller's promise; `LANES` floats follow each of the first `width`.
    unsafe { (0..width).fold(V::zero(), |sum, i| V::add(sum, V::load(terms.as_ptr().add(i)))) }
}

/// Rows that share a buffer in which each has `pitch` floats. Several, because sums that are read right after
/// their terms were written, at other alignments, would wait for the writes to reach the cache.
fn batch(pitch: usize) -> usize {
    ((BUFFER - MAX_LANES) / pitch).clamp(1, 16)
}

/// Whether rows of `channels` are whole vectors in one block.
#[inline(always)]
fn whole<V: Vector>(channels: usize) -> bool {
    channels <= BLOCK && channels.is_multiple_of(V::LANES)
}

multiversion! {
    fn lrn_rows<V>(p: &LrnParams, reach: usize, channels: usize, x: &[f32], y: &mut [f32]) {
        // SAFETY: this copy is compiled for `V`.
        unsafe {
            if whole::<V>(channels) {
                lrn_blocks::<V, true>(p, reach, channels, x, y);
            } else {
                lrn_blocks::<V, false>(p, reach, channels, x, y);
            }
        }
    }
}

/// # Safety
/// As for every function of [`Vector`]; `ALL` as [`whole`] says.
#[inline(always)]
unsafe fn lrn_blocks<V: Vector, const ALL: bool>(
    p: &LrnParams,
    reach: usize,
    channels: usize,
    x: &[f32],
    y: &mut [f32],
) {
    for start in (0..channels).step_by(BLOCK) {
        let end = (start + BLOCK).min(channels);
        // `squares[i]` of a row is of channel `start - margin + i`; those that do not exist stay zero.
        let (first, last) = (start.saturating_sub(reach), (end + reach).min(channels));
        let margin = reach.next_multiple_of(MAX_LANES);
        let pitch = (end - start).next_multiple_of(MAX_LANES) + 2 * margin;
        let rows = batch(pitch) * channels;
        let mut squares = Lines([0.0; BUFFER]);
        let squares = &mut squares.0;
        for (x, y) in x.chunks(rows).zip(y.chunks_mut(rows)) {
            for (x, squares) in x.chunks_exact(channels).zip(squares.chunks_mut(pitch)) {
                for (s, v) in squares[first + margin - start..].iter_mut().zip(&x[first..last]) {
                    *s = v * v;
                }
            }
            for (row, (x, y)) in
                x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)).enumerate()
            {
                let blocks = x[start..end].chunks(V::LANES).zip(y[start..end].chunks_mut(V::LANES));
                let begin = row * pitch + margin - reach;
                for (at, (x, y)) in (begin..).step_by(V::LANES).zip(blocks) {
                    let count = x.len();
                    // SAFETY: this copy is compiled for `V`; slices check the bounds.
                    unsafe {
                        let (power, _) = p.powers(window_sums::<V>(squares, at, 2 * reach + 1));
                        V::store_lanes::<ALL>(
                            V::mul(V::load_lanes::<ALL>(x, count), power),
                            y,
                            count,
                        );
                    }
                }
            }
        }
    }
}

multiversion! {
    fn lrn_grad_rows<V>(p: &LrnParams, reach: usize, channels: usize, relu: bool, x: &[f32], dy: &[f32], dx: &mut [f32]) {
        // SAFETY: this copy is compiled for `V`.
        unsafe {
            if whole::<V>(channels) {
                lrn_grad_blocks::<V, true>(p, reach, channels, relu, [x, dy], dx);
            } else {
                lrn_grad_blocks::<V, false>(p, reach, channels, relu, [x, dy], dx);
            }
        }
    }
}

/// # Safety
/// As for [`lrn_blocks`].
#[inline(always)]
unsafe fn lrn_grad_blocks<V: Vector, const ALL: bool>(
    p: &LrnParams,
    reach: usize,
    channels: usize,
    relu: bool,
    [x, dy]: [&[f32]; 2],
    dx: &mut [f32],
) {
    let (factor, width) = (2.0 * p.alpha * p.beta, 2 * reach + 1);
    for start in (0..channels).step_by(BLOCK) {
        let end = (start + BLOCK).min(channels);
        // Windows need terms of `first..last`, and those the squares of `far_first..far_last`. In all buffers
        // of a row, channel `c` is at `c + margin - start`; those that do not exist stay zero.
        let (first, last) = (start.saturating_sub(reach), (end + reach).min(channels));
        let (far_first, far_last) =
            (start.saturating_sub(2 * reach), (end + 2 * reach).min(channels));
        let margin = (2 * reach).next_multiple_of(MAX_LANES);
        let pitch = (end - start).next_multiple_of(MAX_LANES) + 2 * margin;
        let rows = batch(pitch) * channels;
        let zeros = || Lines([0.0; BUFFER]);
        let (mut squares, mut terms, mut direct) = (zeros(), zeros(), zeros());
        let (squares, terms, direct) = (&mut squares.0, &mut terms.0, &mut direct.0);
        for ((x, dy), dx) in x.chunks(rows).zip(dy.chunks(rows)).zip(dx.chunks_mut(rows)) {
            for (x, squares) in x.chunks_exact(channels).zip(squares.chunks_mut(pitch)) {
                let squares = &mut squares[far_first + margin - start..];
                for (s, v) in squares.iter_mut().zip(&x[far_first..far_last]) {
                    *s = v * v;
                }
            }
            let both = x.chunks_exact(channels).zip(dy.chunks_exact(channels));
            for (row, (x, dy)) in both.enumerate() {
                let begin = row * pitch + first + margin - start;
                let blocks = x[first..last].chunks(V::LANES).zip(dy[first..last].chunks(V::LANES));
                for (at, (x, dy)) in (begin..).step_by(V::LANES).zip(blocks) {
                    let count = x.len();
                    // SAFETY: this copy is compiled for `V`; slices check the bounds.
                    unsafe {
                        let (power, inverse) =
                            p.powers(window_sums::<V>(squares, at - reach, width));
                        let ratio = V::mul(V::load_lanes::<ALL>(dy, count), power);
                        V::store_lanes::<ALL>(ratio, &mut direct[at..], count);
                        V::store_lanes::<ALL>(
                            V::mul(V::mul(ratio, V::load_lanes::<ALL>(x, count)), inverse),
                            &mut terms[at..],
                            count,
                        );
                    }
                }
            }
            for (row, (x, dx)) in
                x.chunks_exact(channels).zip(dx.chunks_exact_mut(channels)).enumerate()
            {
                let blocks =
                    x[start..end].chunks(V::LANES).zip(dx[start..end].chunks_mut(V::LANES));
                for (at, (x, dx)) in (row * pitch + margin..).step_by(V::LANES).zip(blocks) {
                    let count = x.len();
                    // SAFETY: this copy is compiled for `V`; slices check the bounds.
                    unsafe {
                        let sums = window_sums::<V>(terms, at - reach, width);
                        let x = V::load_lanes::<ALL>(x, count);
                        let through = V::mul(V::mul(V::splat(factor), x), sums);
                        let mut d = V::sub(V::load_lanes::<ALL>(&direct[at..], count), through);
                        if relu {
                            // Nothing where `x`, cut at zero, is zero.
                            d = V::if_equal(V::max(x, V::zero()), V::zero(), V::zero(), d);
                        }
                        V::store_lanes::<ALL>(d, dx, count);
                    }
                }
            }
        }
    }
}

/// Local response normalisation of rows of `channels`.
pub fn lrn(ctx: Ctx, p: &LrnParams, channels: usize, x: &[f32], y: &mut [f32]) {
    let reach = p.reach(channels, x.len());
    ctx.map(channels, [x], [y], |[x], [y]| lrn_rows(ctx.isa, p, reach, channels, x, y));
}

/// The gradient of [`lrn`]: with `s` the base of the power,
/// `dx[i] = dy[i] s[i]^-beta - 2 alpha beta x[i] * sum over the window of dy[j] x[j] s[j]^(-beta - 1)`.
/// With `relu`, `x` is the output of a relu, and the gradient is that by the relu's input.
pub fn lrn_grad(
    ctx: Ctx,
    p: &LrnParams,
    channels: usize,
    relu: bool,
    x: &[f32],
    dy: &[f32],
    dx: &mut [f32],
) {
    let reach = p.reach(channels, x.len());
    ctx.map(channels, [x, dy], [dx], |[x, dy], [dx]| {
        lrn_grad_rows(ctx.isa, p, reach, channels, relu, x, dy, dx);
    });
}

multiversion! {
    fn add_squared_distances(mean: &[f32], x: &[f32], out: &mut [f32]) {
        out.fill(0.0);
        for x in x.chunks_exact(mean.len()) {
            for ((o, x), m) in out.iter_mut().zip(x).zip(mean) {
                *o += (x - m) * (x - m);
            }
        }
    }
}

multiversion! {
    /// `y = (x - mean) * factor + offset`.
    fn normalise(mean: &[f32], factor: &[f32], offset: &[f32], x: &[f32], y: &mut [f32]) {
        let c = mean.len();
        let (factor, offset) = (&factor[..c], &offset[..c]);
        for (x, y) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)) {
            for i in 0..c {
                y[i] = (x[i] - mean[i]) * factor[i] + offset[i];
            }
        }
    }
}

multiversion! {
    /// Adds `dy * (x - mean)`, then `dy` per channel.
    fn add_gradients(mean: &[f32], x: &[f32], dy: &[f32], out: &mut [f32]) {
        out.fill(0.0);
        let c = mean.len();
        let (weighted, plain) = out.split_at_mut(c);
        let plain = &mut plain[..c];
        for (x, dy) in x.chunks_exact(c).zip(dy.chunks_exact(c)) {
            for i in 0..c {
                plain[i] += dy[i];
                weighted[i] += dy[i] * (x[i] - mean[i]);
            }
        }
    }
}

multiversion! {
    /// `dx = factor * (dy - share - (x - mean) * slope)`, the three factors one after the other in `f`.
    fn spread_gradients(mean: &[f32], f: &[f32], x: &[f32], dy: &[f32], dx: &mut [f32]) {
        let c = mean.len();
        let (factor, share, slope) = (&f[..c], &f[c..2 * c], &f[2 * c..3 * c]);
        for ((x, dy), dx) in x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(dx.chunks_exact_mut(c)) {
            for i in 0..c {
                dx[i] = factor[i] * (dy[i] - share[i] - (x[i] - mean[i]) * slope[i]);
            }
        }
    }
}

/// Rows of `channels` of an operand of batch normalisation, whose other operands have `per_channel` values each.
fn rows_of(channels: usize, x: &[f32], per_channel: &[(&[f32], usize)]) -> usize {
    assert!(
        channels > 0 && x.len().is_multiple_of(channels),
        "{} floats are not rows of {channels}",
        x.len()
    );
    let fit = per_channel.iter().all(|(values, each)| values.len() == each * channels);
    assert!(fit, "operands of batch normalisation over {channels} channels");
    x.len() / channels
}

/// Floats of scratch memory that the functions of batch normalisation need.
pub fn batch_norm_scratch(channels: usize) -> usize {
    2 * CHUNKS * channels
}

/// The mean of each channel over the rows of `x`, then the (biased) variance of each.
pub fn moments(ctx: Ctx, x: &[f32], out: &mut [f32], scratch: &mut [f32]) {
    let channels = out.len() / 2;
    let rows = rows_of(channels, x, &[(out, 2)]);
    let weight = 1.0 / rows.max(1) as f32;
    let (mean, variance) = out.split_at_mut(channels);
    column_sums(ctx, channels, x, mean, scratch);
    mean.iter_mut().for_each(|m| *m *= weight);
    let mean = &*mean;
    let (per, parts) = row_chunks(rows);
    let partials = &mut scratch[..parts * channels];
    ctx.each(parts, [(x, per * channels)], [(&mut *partials, channels)], |_, [x], [out]| {
        add_squared_distances(ctx.isa, mean, x, out);
    });
    let sums = &*partials;
    tree_sum(ctx, parts, |i| &sums[i * channels..][..channels], weight, variance);
}

/// `y = (x - mean) / sqrt(variance + epsilon) * scale + offset` per channel, with the two moments one after the other.
#[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
pub fn batch_norm(
    ctx: Ctx,
    epsilon: f32,
    x: &[f32],
    moments: &[f32],
    scale: &[f32],
    offset: &[f32],
    y: &mut [f32],
    scratch: &mut [f32],
) {
    let channels = scale.len();
    rows_of(channels, x, &[(moments, 2), (offset, 1)]);
    let (mean, variance) = moments.split_at(channels);
    let factor = &mut scratch[..channels];
    for ((f, s), v) in factor.iter_mut().zip(scale).zip(variance) {
        *f = s * inverse(*v, epsilon);
    }
    let factor = &*factor;
    ctx.map(channels, [x], [y], |[x], [y]| normalise(ctx.isa, mean, factor, offset, x, y));
}

/// The gradients of [`batch_norm`] by scale and by offset, one after the other.
pub fn batch_norm_sums(
    ctx: Ctx,
    epsilon: f32,
    x: &[f32],
    moments: &[f32],
    dy: &[f32],
    out: &mut [f32],
    scratch: &mut [f32],
) {
    let channels = out.len() / 2;
    let (per, parts) = row_chunks(rows_of(channels, x, &[(moments, 2)]));
    let (mean, variance) = moments.split_at(channels);
    let partials = &mut scratch[..2 * parts * channels];
    let ins = [(x, per * channels), (dy, per * channels)];
    ctx.each(parts, ins, [(&mut *partials, 2 * channels)], |_, [x, dy], [out]| {
        add_gradients(ctx.isa, mean, x, dy, out);
    });
    let sums = &*partials;
    tree_sum(ctx, parts, |i| &sums[2 * i * channels..][..2 * channels], 1.0, out);
    for (by_scale, v) in out.iter_mut().zip(variance) {
        *by_scale *= inverse(*v, epsilon);
    }
}

/// The gradient of [`batch_norm`] by `x`, whose own `moments` are used; `sums` are those of [`batch_norm_sums`].
#[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
pub fn batch_norm_input_grad(
    ctx: Ctx,
    epsilon: f32,
    x: &[f32],
    moments: &[f32],
    scale: &[f32],
    dy: &[f32],
    sums: &[f32],
    dx: &mut [f32],
    scratch: &mut [f32],
) {
    let channels = scale.len();
    let rows = rows_of(channels, x, &[(moments, 2), (sums, 2)]);
    let weight = 1.0 / rows.max(1) as f32;
    let (mean, variance) = moments.split_at(channels);
    let factors = &mut scratch[..3 * channels];
    for c in 0..channels {
        let inverse = inverse(variance[c], epsilon);
        factors[c] = scale[c] * inverse;
        factors[channels + c] = sums[channels + c] * weight;
        factors[2 * channels + c] = sums[c] * inverse * weight;
    }
    let factors = &*factors;
    ctx.map(channels, [x, dy], [dx], |[x, dy], [dx]| {
        spread_gradients(ctx.isa, mean, factors, x, dy, dx)
    });
}

/// `1 / sqrt(variance + epsilon)`.
fn inverse(variance: f32, epsilon: f32) -> f32 {
    1.0 / (variance + epsilon).sqrt()
}
