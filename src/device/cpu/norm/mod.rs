//! Batch normalisation; local response normalisation is in `lrn.rs`, with a pool above it in `pooled.rs`.

mod lrn;
mod pooled;

pub use self::lrn::{MAX_RADIUS, lrn, lrn_grad};
pub use self::pooled::{lrn_pool, lrn_pool_grad, lrn_pool_grad_scratch, lrn_pool_scratch};

use super::Ctx;
use super::reduce::{CHUNKS, column_sums, row_chunks, tree_sum};
use super::simd::multiversion;

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
