//! The filter gradient in transformed form: products of tiles of `x` and of `dy`, summed over all tiles, one after the other.

use super::transform::{Grid, Map, transform, transform_raw};
use super::{SHIFT, Tiling, full};
use crate::device::cpu::conv::Conv;
use crate::device::cpu::tile::Band;
use crate::device::cpu::{Ctx, Epilogue};

/// Floats of transformed tiles in a block: the sums want long runs of tiles.
const BLOCK: usize = 1_000_000;
/// Pieces of a block.
const PIECES: usize = 16;

/// A block of tiles is transformed in [`PIECES`]; in each, data are `[point][tile][channel]` and gradients
/// `[point][panel][tile][panel]`. Then every point adds the block's products to its sums.
struct FilterGrad {
    tiling: Tiling,
    /// All tiles of all pictures.
    tiles: usize,
}

impl FilterGrad {
    fn of(conv: &Conv) -> Self {
        let tiling = Tiling::forward(conv);
        Self { tiling, tiles: conv.n * tiling.tiles() }
    }

    /// Tiles per piece.
    fn piece(&self) -> usize {
        let channels = self.tiling.source.channels + self.tiling.target.channels;
        let fit = BLOCK / (self.tiling.points() * channels);
        (fit / PIECES).clamp(4, 32).min(self.tiles.div_ceil(PIECES).max(1))
    }

    /// Channels of a row of gradients: whole panels.
    fn outs(&self, ctx: Ctx) -> usize {
        self.tiling.target.channels.next_multiple_of(ctx.isa.panel())
    }

    /// Distance between points in the data and in the gradients of a piece.
    fn slots(&self, ctx: Ctx) -> [usize; 2] {
        let [ins, _] = self.tiling.padded(ctx);
        [ins, self.outs(ctx)].map(|channels| self.piece() * channels + SHIFT)
    }

    /// Floats of the sums of a point.
    fn sums(&self, ctx: Ctx) -> usize {
        self.tiling.source.channels * self.tiling.padded(ctx)[1]
    }

    fn scratch(&self, ctx: Ctx) -> usize {
        let pieces = self.slots(ctx).map(|slot| PIECES * slot).iter().sum::<usize>();
        self.tiling.points() * (self.sums(ctx) + pieces)
    }

    /// Transforms tiles `first..last` of a piece; those that it has no more are zeros.
    fn transform(
        &self,
        ctx: Ctx,
        first: usize,
        last: usize,
        x: &[f32],
        dy: &[f32],
        to: [&mut [f32]; 2],
    ) {
        let (t, panel, piece) = (&self.tiling, ctx.isa.panel(), self.piece());
        let ([ins, _], [data_slot, grad_slot]) = (t.padded(ctx), self.slots(ctx));
        let [data, grads] = to;
        let points = full(t.side(), data_slot, ins);
        for (row, tile) in (first..last).enumerate() {
            let (start, needed) = t.needed(tile);
            let to = (&mut data[row * ins..], &points);
            transform(ctx.isa, (Map::Data, t.taps), (&x[start..], &needed), to);
            let (start, covered) = t.covered(tile);
            for first in (0..t.target.channels).step_by(panel) {
                let channels = panel.min(t.target.channels - first);
                let source = Grid { channels, ..covered.clone() };
                let padded = channels.next_multiple_of(panel / 2);
                let to = &mut grads[first * piece + row * panel..];
                let target = full(t.side(), grad_slot, padded);
                let from = (&dy[start + first..], &source);
                transform(ctx.isa, (Map::Gradient, t.taps), from, (to, &target));
            }
        }
        if last - first < piece {
            for point in data.chunks_mut(data_slot) {
                point[(last - first) * ins..].fill(0.0);
            }
            grads.chunks_mut(grad_slot).for_each(|point| {
                for panels in point.chunks_mut(piece * panel) {
                    let filled = ((last - first) * panel).min(panels.len());
                    panels[filled..].fill(0.0);
                }
            });
        }
    }
}

/// Floats of scratch memory that [`filter_grad`] needs.
pub(super) fn filter_grad_scratch(ctx: Ctx, conv: &Conv) -> usize {
    FilterGrad::of(conv).scratch(ctx)
}

/// Memory of the gradient that threads share by channels.
struct Shared(*mut f32);
// SAFETY: threads write disjoint channels, see `filter_grad`.
unsafe impl Sync for Shared {}

/// The gradient by the filter.
pub(super) fn filter_grad(
    ctx: Ctx,
    conv: &Conv,
    x: &[f32],
    dy: &[f32],
    dw: &mut [f32],
    scratch: &mut [f32],
) {
    let grad = FilterGrad::of(conv);
    let (t, panel, piece) = (&grad.tiling, ctx.isa.panel(), grad.piece());
    let ([ins, outs], slots, points) = (t.padded(ctx), grad.slots(ctx), t.points());
    let [data_piece, grad_piece] = slots.map(|slot| points * slot);
    let (sums, work) = scratch[..grad.scratch(ctx)].split_at_mut(points * grad.sums(ctx));
    let (data, grads) = work.split_at_mut(PIECES * data_piece);
    for start in (0..grad.tiles).step_by(PIECES * piece) {
        let pieces = (grad.tiles - start).div_ceil(piece).min(PIECES);
        let jobs = [(&mut *data, data_piece), (&mut *grads, grad_piece)];
        ctx.each(pieces, [], jobs, |i, [], to| {
            let first = start + i * piece;
            grad.transform(ctx, first, (first + piece).min(grad.tiles), x, dy, to);
        });
        let (data, grads) = (&*data, &*grads);
        ctx.each(points, [], [(&mut *sums, grad.sums(ctx))], |point, [], [sums]| {
            for column in (0..outs).step_by(panel) {
                let band = Band {
                    a: &data[point * slots[0]..],
                    row: 1,
                    step: ins,
                    a_outer: data_piece,
                    b: &grads[point * slots[1] + column * piece..],
                    b_outer: grad_piece,
                    inner: piece,
                    outer: pieces,
                    rows: conv.in_channels,
                    columns: panel.min(outs - column),
                    out_row: outs,
                    accumulate: start > 0,
                    epilogue: Epilogue::None,
                };
                band.run(ctx.isa, &mut sums[column..]);
            }
        });
    }
    let (sums, row, shared) =
        (&*sums, conv.in_channels * conv.out_channels, &Shared(dw.as_mut_ptr()));
    let source = full(t.side(), grad.sums(ctx), outs);
    let target = full(t.taps, row, conv.out_channels);
    ctx.each(conv.in_channels, [], [], |channel, [], []| {
        let from = (&sums[channel * outs..], &source);
        // SAFETY: `dw` has a row of this channel for every tap, and nobody else writes it.
        unsafe {
            let to = (shared.0.add(channel * conv.out_channels), &target);
            transform_raw(ctx.isa, (Map::FilterGradient, t.taps), from, to);
        }
    });
}
