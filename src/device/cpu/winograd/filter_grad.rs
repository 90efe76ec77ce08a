//! The filter gradient in transformed form: products of tiles of `x` and of `dy`, summed over all tiles, one after the other.

use super::transform::{Grid, Map, transform, transform_raw};
use super::{SHIFT, Tiling, full};
use crate::device::cpu::conv::Conv;
use crate::device::cpu::tile::Band;
use crate::device::cpu::{Ctx, Epilogue};

/// Floats of transformed tiles in a block: the sums want long runs of tiles.
const BLOCK: usize = 1_000_000;

/// A block of tiles is transformed in pieces; in each, data are `[point][tile][channel]` and gradients
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

    /// Pieces of a block: two for each thread to transform, and no more, as the loop over the tiles of one should be long. Sums go on in
    /// the same order wherever they are cut.
    fn pieces(&self, ctx: Ctx) -> usize {
        (2 * ctx.threads).min(32)
    }

    /// Tiles per piece.
    fn piece(&self, ctx: Ctx) -> usize {
        let channels = self.tiling.source.channels + self.tiling.target.channels;
        let fit = BLOCK / (self.tiling.points() * channels);
        let pieces = self.pieces(ctx);
        (fit / pieces).clamp(4, 128).min(self.tiles.div_ceil(pieces)).max(1)
    }

    /// Channels of a row of gradients: whole panels.
    fn outs(&self, ctx: Ctx) -> usize {
        self.tiling.target.channels.next_multiple_of(ctx.isa.panel())
    }

    /// Distance between points in the data and in the gradients of a piece.
    fn slots(&self, ctx: Ctx) -> [usize; 2] {
        let [ins, _] = self.tiling.padded(ctx);
        [ins, self.outs(ctx)].map(|channels| self.piece(ctx) * channels + SHIFT)
    }

    /// Distance between points in the sums.
    fn sums(&self, ctx: Ctx) -> usize {
        self.tiling.source.channels * self.tiling.padded(ctx)[1] + SHIFT
    }

    fn scratch(&self, ctx: Ctx) -> usize {
        let pieces = self.slots(ctx).map(|slot| self.pieces(ctx) * slot).iter().sum::<usize>();
        self.tiling.points() * (self.sums(ctx) + pieces)
    }

    /// Transforms tiles `first..last` of a piece.
    fn transform(
        &self,
        ctx: Ctx,
        first: usize,
        last: usize,
        x: &[f32],
        dy: &[f32],
        to: [&mut [f32]; 2],
    ) {
        let (t, panel, piece) = (&self.tiling, ctx.isa.panel(), self.piece(ctx));
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
    let (t, panel, piece) = (&grad.tiling, ctx.isa.panel(), grad.piece(ctx));
    let ([ins, outs], slots, points) = (t.padded(ctx), grad.slots(ctx), t.points());
    let [data_piece, grad_piece] = slots.map(|slot| points * slot);
    let (sums, work) = scratch[..grad.scratch(ctx)].split_at_mut(points * grad.sums(ctx));
    let (data, grads) = work.split_at_mut(grad.pieces(ctx) * data_piece);
    for start in (0..grad.tiles).step_by(grad.pieces(ctx) * piece) {
        let tiles = (grad.tiles - start).min(grad.pieces(ctx) * piece);
        let jobs = [(&mut *data, data_piece), (&mut *grads, grad_piece)];
        ctx.each(tiles.div_ceil(piece), [], jobs, |i, [], to| {
            let first = start + i * piece;
            grad.transform(ctx, first, (first + piece).min(start + tiles), x, dy, to);
        });
        let (data, grads) = (&*data, &*grads);
        let (whole, rest) = (tiles / piece, tiles % piece);
        ctx.each(points, [], [(&mut *sums, grad.sums(ctx))], |point, [], [sums]| {
            for column in (0..outs).step_by(panel) {
                // Whole pieces, then the tiles of one that is not.
                for (first, outer, inner) in [(0, whole, piece), (whole, 1, rest)] {
                    if outer * inner == 0 {
                        continue;
                    }
                    let band = Band {
                        a: &data[first * data_piece + point * slots[0]..],
                        row: 1,
                        step: ins,
                        a_outer: data_piece,
                        b: &grads[first * grad_piece + point * slots[1] + column * piece..],
                        b_outer: grad_piece,
                        inner,
                        outer,
                        rows: conv.in_channels,
                        columns: panel.min(outs - column),
                        out_row: outs,
                        accumulate: start + first > 0,
                        epilogue: Epilogue::None,
                    };
                    band.run(ctx.isa, &mut sums[column..]);
                }
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
