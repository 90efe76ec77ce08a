//! Maxima that remember who won, so that what lies below a pool need not be kept: a byte for each, the tap of its window.

use super::Ctx;
use super::maxima::{Channels, grad_picture, hand, max_picture, padded};
use super::pool::sizes;
use crate::graph::Window;

/// Floats that the winners of a pooled picture take.
pub fn winners_len(w: &Window, c: usize) -> usize {
    (w.output[0] * w.output[1] * c).div_ceil(size_of::<f32>())
}

/// As [`max_pool`](super::pool::max_pool) of a relu's values, with the first to reach each maximum in `winners`, [`winners_len`] floats a picture.
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
            max_picture(
                ctx.isa,
                w,
                Channels::all(c),
                x,
                y,
                &mut bytemuck::cast_slice_mut(winners)[..to],
            );
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

impl Unpool<'_> {
    /// Maxima of a picture.
    fn len(&self) -> usize {
        self.window.output[0] * self.window.output[1] * self.channels
    }
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
    /// Floats of scratch memory for [`Self::open`].
    pub(super) fn opened(&self) -> usize {
        match self {
            Self::Dense(_) => 0,
            Self::Pooled(pooled) => pooled.len(),
        }
    }

    /// Floats of scratch memory for a picture of `len` floats.
    pub(super) fn scratch(&self, len: usize) -> usize {
        match self {
            Self::Dense(_) => 0,
            Self::Pooled(pooled) => pooled.len() + len,
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
        let (opened, to) = scratch.split_at_mut(self.opened());
        match self.open(ctx, i, len, opened) {
            PictureGrad::Dense(dy) => dy,
            pooled => {
                pooled.spread(ctx, &mut to[..len]);
                &to[..len]
            }
        }
    }

    /// All `n` pictures, of `len` floats each, with as many times the scratch memory of one.
    pub(super) fn pictures<'b>(
        &'b self,
        ctx: Ctx,
        n: usize,
        len: usize,
        scratch: &'b mut [f32],
    ) -> &'b [f32] {
        if let Self::Dense(dy) = self {
            return dy;
        }
        let (to, opened) = scratch.split_at_mut(n * len);
        let jobs = [(&mut *to, len), (opened, self.opened())];
        ctx.each(n, [], jobs, |i, [], [to, opened]| self.open(ctx, i, len, opened).spread(ctx, to));
        to
    }

    /// Picture `i`, of `len` floats, to be looked at some channels at a time.
    pub(super) fn open<'b>(
        &'b self,
        ctx: Ctx,
        i: usize,
        len: usize,
        scratch: &'b mut [f32],
    ) -> PictureGrad<'b> {
        match self {
            Self::Dense(dy) => PictureGrad::Dense(&dy[i * len..][..len]),
            Self::Pooled(pooled) => {
                let Unpool { window, channels, y, dy, winners } = *pooled;
                let len = pooled.len();
                let bytes = winners_len(window, channels);
                let winners = &bytemuck::cast_slice(&winners[i * bytes..][..bytes])[..len];
                let handed = &mut scratch[..len];
                hand(ctx.isa, &y[i * len..][..len], &dy[i * len..][..len], handed);
                PictureGrad::Pooled { window, channels, handed, winners }
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

/// A picture of an [`OutputGrad`].
pub(super) enum PictureGrad<'a> {
    /// As it lies.
    Dense(&'a [f32]),
    /// What the maxima hand on, and to whom.
    Pooled { window: &'a Window, channels: usize, handed: &'a [f32], winners: &'a [u8] },
}

impl PictureGrad<'_> {
    /// All of what is pooled.
    fn spread(&self, ctx: Ctx, to: &mut [f32]) {
        if let Self::Pooled { window, channels, handed, winners } = *self {
            grad_picture(ctx.isa, window, Channels::all(channels), handed, winners, to);
        }
    }

    /// Some of its channels, from the first of them on, with the distance between columns and that between rows of `width` columns:
    /// in the picture itself, or in `scratch`, as a picture that is [`padded`].
    pub(super) fn channels<'b>(
        &'b self,
        ctx: Ctx,
        c: Channels,
        width: usize,
        scratch: &'b mut [f32],
    ) -> (&'b [f32], [usize; 2]) {
        match *self {
            Self::Dense(dy) => (&dy[c.first..], [c.all, width * c.all]),
            Self::Pooled { window, handed, winners, .. } => {
                let wide = padded(window);
                grad_picture(ctx.isa, &wide, c, handed, winners, scratch);
                let row = wide.input[1] * c.pitch;
                let start = window.pad[0] * row + window.pad[1] * c.pitch;
                (&scratch[start..], [c.pitch, row])
            }
        }
    }
}
