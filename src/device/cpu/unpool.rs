//! Maxima that remember who won, so that what lies below a pool need not be kept: a byte for each, the tap of its window.

use super::Ctx;
use super::pool::sizes;
use super::simd::{MAX_LANES, multiversion};
use crate::graph::Window;

/// Floats that the winners of a pooled picture take.
pub fn winners_len(w: &Window, c: usize) -> usize {
    (w.output[0] * w.output[1] * c).div_ceil(size_of::<f32>())
}

/// 2^23: the lowest bits of a float from there on are those of a whole number, so that vectors of floats carry tap numbers.
const WHOLE: f32 = 8_388_608.0;

/// The number of a byte, as a vector carries it.
#[inline(always)]
fn whole(byte: u8) -> f32 {
    f32::from_bits(WHOLE.to_bits() | u32::from(byte))
}

/// Calls `tap(input offset, number)` for the taps of output position `at`, in row-major order.
#[inline(always)]
fn each_tap(w: &Window, at: usize, c: usize, mut tap: impl FnMut(usize, f32)) {
    let (rows, top) = w.taps(0, at / w.output[1]);
    let (columns, left) = w.taps(1, at % w.output[1]);
    for (y, row) in rows.zip(top..) {
        for (x, column) in columns.clone().zip(left..) {
            tap((row * w.input[1] + column) * c, WHOLE + (y * w.kernel[1] + x) as f32);
        }
    }
}

multiversion! {
    fn max_picture<V>(w: &Window, c: usize, x: &[f32], y: &mut [f32], winners: &mut [u8]) {
        for (at, (y, winners)) in y.chunks_exact_mut(c).zip(winners.chunks_exact_mut(c)).enumerate() {
            let blocks = y.chunks_mut(V::LANES).zip(winners.chunks_mut(V::LANES));
            for (first, (y, winners)) in (0..).step_by(V::LANES).zip(blocks) {
                let mut numbers = [WHOLE; MAX_LANES];
                // SAFETY: this copy is compiled for `V`; slices check the bounds, and `numbers` holds a vector.
                unsafe {
                    let (mut best, mut who) = (V::splat(f32::NEG_INFINITY), V::splat(WHOLE));
                    each_tap(w, at, c, |tap, number| {
                        let x = V::load_part(&x[tap + first..][..y.len()]);
                        // The maximum takes a NaN from `x`; one that is there already stays.
                        let higher = V::if_equal(best, best, V::max(best, x), best);
                        who = V::if_equal(higher, best, who, V::splat(number));
                        best = higher;
                    });
                    V::store_part(best, y);
                    V::store(who, numbers.as_mut_ptr());
                }
                let bytes = numbers.map(|number| number.to_bits() as u8);
                if let Some(winners) = winners.first_chunk_mut::<MAX_LANES>() {
                    *winners = bytes;
                } else {
                    winners.iter_mut().zip(bytes).for_each(|(winner, byte)| *winner = byte);
                }
            }
        }
    }
}

multiversion! {
    fn grad_picture<V>(w: &Window, c: usize, y: &[f32], dy: &[f32], winners: &[u8], dx: &mut [f32]) {
        dx.fill(0.0);
        let pixels = y.chunks_exact(c).zip(dy.chunks_exact(c)).zip(winners.chunks_exact(c));
        for (at, ((y, dy), winners)) in pixels.enumerate() {
            let blocks = y.chunks(V::LANES).zip(dy.chunks(V::LANES)).zip(winners.chunks(V::LANES));
            for (first, ((y, dy), winners)) in (0..).step_by(V::LANES).zip(blocks) {
                let numbers = match winners.first_chunk::<MAX_LANES>() {
                    Some(winners) => winners.map(whole),
                    None => std::array::from_fn(|i| winners.get(i).map_or(0.0, |w| whole(*w))),
                };
                // SAFETY: this copy is compiled for `V`; slices check the bounds, and `numbers` holds a vector.
                unsafe {
                    let who = V::load(numbers.as_ptr());
                    // Below a relu, what has won with zero, or is no number, gets nothing.
                    let positive = V::max(V::load_part(y), V::zero());
                    let left = V::if_equal(positive, V::zero(), V::zero(), V::load_part(dy));
                    each_tap(w, at, c, |tap, number| {
                        let dx = &mut dx[tap + first..][..y.len()];
                        let taken = V::if_equal(who, V::splat(number), left, V::zero());
                        V::store_part(V::add(V::load_part(dx), taken), dx);
                    });
                }
            }
        }
    }
}

/// As [`max_pool`](super::pool::max_pool), with the first to reach each maximum in `winners`, [`winners_len`] floats a picture.
pub fn max_pool_winners(
    ctx: Ctx,
    w: &Window,
    n: usize,
    c: usize,
    x: &[f32],
    y: &mut [f32],
    winners: &mut [f32],
) {
    assert!(w.kernel[0] * w.kernel[1] <= 256, "a byte tells the taps of {w:?} apart");
    let (from, to) = sizes(w, n, c, x, y);
    let bytes = winners_len(w, c);
    assert_eq!(winners.len(), n * bytes, "a byte per maximum of {w:?}");
    let groups = ctx.groups(n);
    let per = n.div_ceil(groups);
    let outs = [(y, per * to), (winners, per * bytes)];
    ctx.each(groups, [(x, per * from)], outs, |_, [x], [y, winners]| {
        let outs = y.chunks_exact_mut(to).zip(winners.chunks_exact_mut(bytes));
        for (x, (y, winners)) in x.chunks_exact(from).zip(outs) {
            max_picture(ctx.isa, w, c, x, y, &mut bytemuck::cast_slice_mut(winners)[..to]);
        }
    });
}

/// The gradient of a maximum by the input of the relu below it.
#[derive(Clone, Copy, Debug)]
pub struct Unpool<'a> {
    /// How the maxima were taken.
    pub window: &'a Window,
    /// Channels.
    pub channels: usize,
    /// The maxima.
    pub y: &'a [f32],
    /// Their gradient.
    pub dy: &'a [f32],
    /// Who won, as [`max_pool_winners`] left it.
    pub winners: &'a [f32],
}

/// The gradient by the output of a convolution, picture by picture.
#[derive(Clone, Copy, Debug)]
pub enum OutputGrad<'a> {
    /// As it lies.
    Dense(&'a [f32]),
    /// Spread when it is used.
    Pooled(Unpool<'a>),
}

impl OutputGrad<'_> {
    /// Floats of scratch memory for a picture of `len` floats.
    pub(super) fn scratch(&self, len: usize) -> usize {
        match self {
            Self::Dense(_) => 0,
            Self::Pooled(_) => len,
        }
    }

    /// Picture `i`, of `len` floats.
    pub(super) fn picture<'b>(
        &'b self,
        ctx: Ctx,
        i: usize,
        len: usize,
        scratch: &'b mut [f32],
    ) -> &'b [f32] {
        match self {
            Self::Dense(dy) => &dy[i * len..][..len],
            Self::Pooled(pooled) => {
                let Unpool { window, channels, y, dy, winners } = *pooled;
                let to = window.output[0] * window.output[1] * channels;
                let bytes = winners_len(window, channels);
                let winners = &bytemuck::cast_slice(&winners[i * bytes..][..bytes])[..to];
                let (y, dy) = (&y[i * to..][..to], &dy[i * to..][..to]);
                grad_picture(ctx.isa, window, channels, y, dy, winners, &mut scratch[..len]);
                &scratch[..len]
            }
        }
    }

    /// Asserts that it is the gradient by `n` pictures of `len` floats.
    pub(super) fn check(&self, n: usize, len: usize) {
        match self {
            Self::Dense(dy) => assert_eq!(dy.len(), n * len, "one gradient per output"),
            Self::Pooled(p) => {
                let (w, c) = (p.window, p.channels);
                let own = n * w.output[0] * w.output[1] * c;
                assert_eq!(w.input[0] * w.input[1] * c, len, "{w:?} is over {len} floats");
                assert_eq!((p.y.len(), p.dy.len()), (own, own), "one gradient per maximum");
                assert_eq!(p.winners.len(), n * winners_len(w, c), "a byte per maximum");
            }
        }
    }
}
