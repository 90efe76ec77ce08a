//! Local response normalisation.

use crate::device::cpu::Ctx;
use crate::device::cpu::simd::{MAX_LANES, Vector, multiversion};
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
    pub(super) fn reach(&self, channels: usize, len: usize) -> usize {
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

/// The sums of `width` values from each of `terms` on, in whole vectors.
///
/// # Safety
/// As for every function of [`Vector`].
#[inline(always)]
unsafe fn window_sums<V: Vector>(terms: &[f32], width: usize, sums: &mut [f32]) {
    // SAFETY: the caller's promise. Of a known width, these are the usual ones, the inner loop is none.
    unsafe {
        match width {
            5 => window_sums_of::<V>(terms, 5, sums),
            9 => window_sums_of::<V>(terms, 9, sums),
            11 => window_sums_of::<V>(terms, 11, sums),
            width => window_sums_of::<V>(terms, width, sums),
        }
    }
}

/// # Safety
/// As for [`window_sums`].
#[inline(always)]
unsafe fn window_sums_of<V: Vector>(terms: &[f32], width: usize, sums: &mut [f32]) {
    let terms = &terms[..sums.len() + width - 1];
    for (i, to) in sums.chunks_exact_mut(V::LANES).enumerate() {
        // SAFETY: the caller's promise; as many terms as sums follow each of the first `width`.
        unsafe {
            let terms = terms.as_ptr().add(i * V::LANES);
            let sum = (0..width).fold(V::zero(), |sum, i| V::add(sum, V::load(terms.add(i))));
            V::store(sum, to.as_mut_ptr());
        }
    }
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
    pub(super) fn lrn_rows<V>(p: &LrnParams, reach: usize, channels: usize, x: &[f32], y: &mut [f32]) {
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
        let (mut squares, mut sums) = (Lines([0.0; BUFFER]), Lines([0.0; BUFFER]));
        let (squares, sums) = (&mut squares.0, &mut sums.0);
        for (x, y) in x.chunks(rows).zip(y.chunks_mut(rows)) {
            for (x, squares) in x.chunks_exact(channels).zip(squares.chunks_mut(pitch)) {
                for (s, v) in squares[first + margin - start..].iter_mut().zip(&x[first..last]) {
                    *s = v * v;
                }
            }
            // Sums and powers in loops of their own: a power takes long, and short loops have many of them under way.
            let len = (end - start).next_multiple_of(V::LANES);
            let rows = x.chunks_exact(channels).zip(y.chunks_exact_mut(channels));
            for (row, sums) in sums.chunks_exact_mut(len).take(rows.len()).enumerate() {
                let squares = &squares[row * pitch + margin - reach..];
                // SAFETY: this copy is compiled for `V`.
                unsafe { window_sums::<V>(squares, 2 * reach + 1, sums) };
            }
            for ((x, y), sums) in rows.zip(sums.chunks_exact(len)) {
                let blocks = x[start..end].chunks(V::LANES).zip(y[start..end].chunks_mut(V::LANES));
                for ((x, y), sums) in blocks.zip(sums.chunks_exact(V::LANES)) {
                    let count = x.len();
                    // SAFETY: this copy is compiled for `V`; slices check the bounds.
                    unsafe {
                        let (power, _) = p.powers(V::load(sums.as_ptr()));
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
    pub(super) fn lrn_grad_rows<V>(p: &LrnParams, reach: usize, channels: usize, relu: bool, x: &[f32], dy: &[f32], dx: &mut [f32]) {
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
        let (mut squares, mut sums) = (zeros(), zeros());
        let (mut terms, mut direct) = (zeros(), zeros());
        let (squares, sums) = (&mut squares.0, &mut sums.0);
        let (terms, direct) = (&mut terms.0, &mut direct.0);
        // Sums of squares of a row, and of terms.
        let (many, len) =
            ((last - first).next_multiple_of(V::LANES), (end - start).next_multiple_of(V::LANES));
        for ((x, dy), dx) in x.chunks(rows).zip(dy.chunks(rows)).zip(dx.chunks_mut(rows)) {
            for (x, squares) in x.chunks_exact(channels).zip(squares.chunks_mut(pitch)) {
                let squares = &mut squares[far_first + margin - start..];
                for (s, v) in squares.iter_mut().zip(&x[far_first..far_last]) {
                    *s = v * v;
                }
            }
            // Sums and powers in loops of their own, as in `lrn_blocks`.
            let both = x.chunks_exact(channels).zip(dy.chunks_exact(channels));
            for (row, sums) in sums.chunks_exact_mut(many).take(both.len()).enumerate() {
                let squares = &squares[row * pitch + first + margin - start - reach..];
                // SAFETY: this copy is compiled for `V`.
                unsafe { window_sums::<V>(squares, width, sums) };
            }
            for ((row, (x, dy)), sums) in both.enumerate().zip(sums.chunks_exact(many)) {
                let begin = row * pitch + first + margin - start;
                let blocks = x[first..last].chunks(V::LANES).zip(dy[first..last].chunks(V::LANES));
                let sums = sums.chunks_exact(V::LANES);
                for ((at, (x, dy)), sums) in (begin..).step_by(V::LANES).zip(blocks).zip(sums) {
                    let count = x.len();
                    // SAFETY: this copy is compiled for `V`; slices check the bounds.
                    unsafe {
                        let (power, inverse) = p.powers(V::load(sums.as_ptr()));
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
            let both = x.chunks_exact(channels).zip(dx.chunks_exact_mut(channels));
            for (row, sums) in sums.chunks_exact_mut(len).take(both.len()).enumerate() {
                // SAFETY: this copy is compiled for `V`.
                unsafe { window_sums::<V>(&terms[row * pitch + margin - reach..], width, sums) };
            }
            for ((row, (x, dx)), sums) in both.enumerate().zip(sums.chunks_exact(len)) {
                let blocks =
                    x[start..end].chunks(V::LANES).zip(dx[start..end].chunks_mut(V::LANES));
                let direct = direct[row * pitch + margin..].chunks(V::LANES);
                let sums = sums.chunks_exact(V::LANES);
                for (((x, dx), direct), sums) in blocks.zip(direct).zip(sums) {
                    let count = x.len();
                    // SAFETY: this copy is compiled for `V`; slices check the bounds.
                    unsafe {
                        let sums = V::load(sums.as_ptr());
                        let x = V::load_lanes::<ALL>(x, count);
                        let through = V::mul(V::mul(V::splat(factor), x), sums);
                        let mut d = V::sub(V::load_lanes::<ALL>(direct, count), through);
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
