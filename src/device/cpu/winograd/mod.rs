//! Convolutions by Winograd's minimal filtering: `F(4x4, 5x5)` and `F(4x4, 3x3)`, stride 1.
//!
//! The output is cut into tiles of 4x4. A tile of it needs `P x P` values of the input, `P` = 8 or 6; at `P x P` points the
//! convolution of a tile is a plain product of the transformed tile with the transformed filter, summed over channels. So the
//! work is `P * P` matrix products `[tiles x in_channels] * [in_channels x out_channels]`, with a quarter of the
//! multiplications, at a few times the rounding error (bounds: `tests/kernels/convolutions.rs`). With few input channels the products
//! are too short for matrices in memory, and `thin/` keeps them in registers.

mod filter_grad;
mod line;
mod thin;
mod transform;

use self::transform::{Grid, Map, transform};
use super::conv::Conv;
use super::pack::{pack_columns, pack_rows};
use super::tile::Band;
use super::unpool::{OutputGrad, winners_len};
use super::{Ctx, Epilogue};
use crate::graph::Window;

/// Extent of a tile of the output.
const TILE: usize = 4;
/// Floats of transformed tiles that are multiplied at a time: about half of a second-level cache.
const BLOCK: usize = 150_000;
/// Keeps values of neighbouring points out of the same cache sets.
const SHIFT: usize = 16;

/// Whether there is a transform for this convolution.
pub fn fits(conv: &Conv) -> bool {
    let w = &conv.window;
    w.stride == [1, 1] && matches!(w.kernel, [5, 5] | [3, 3])
}

/// Tiles of a picture, and points of a tile.
fn tiles_and_points(conv: &Conv) -> (usize, usize) {
    let ([height, width], kernel) = (conv.window.output, conv.window.kernel[0]);
    (height.div_ceil(TILE) * width.div_ceil(TILE), (kernel + TILE - 1).pow(2))
}

/// Multiplications of a picture without tiles.
fn direct(conv: &Conv) -> usize {
    let ([height, width], [down, across]) = (conv.window.output, conv.window.kernel);
    height * width * down * across * conv.in_channels * conv.out_channels
}

/// How many times faster the transformed convolution and its filter gradient are than the direct ones, roughly; 0 where they are not
/// to be used. Depends on nothing but the extents of one picture, so that every machine and every batch size gives the same bits.
pub fn gain(conv: &Conv) -> f64 {
    /// Multiplications that take as long as transforming one value of the result, and as all data of a tile at a point.
    const RESULT: usize = 3;
    const DATA: usize = 54;
    if !thin::fits(conv) {
        return input_grad_gain(conv);
    }
    // The first filter of a residual network, 3x3, has gradients that nearly cancel: 2.6e-4 of the largest were lost there for little.
    if !fits(conv) || conv.window.kernel != [5, 5] {
        return 0.0;
    }
    let ((tiles, points), outs) = (tiles_and_points(conv), conv.out_channels);
    direct(conv) as f64 / (tiles * points * ((conv.in_channels + RESULT) * outs + DATA)) as f64
}

/// The same of the input gradient, for which few input channels are nothing special.
pub fn input_grad_gain(conv: &Conv) -> f64 {
    /// Multiplications that take as long as transforming one value.
    const TRANSFORM: usize = 24;
    if !fits(conv) {
        return 0.0;
    }
    let ((tiles, points), ins, outs) =
        (tiles_and_points(conv), conv.in_channels, conv.out_channels);
    direct(conv) as f64 / (tiles * points * (ins * outs + TRANSFORM * (ins + outs))) as f64
}

/// A picture in memory.
#[derive(Clone, Copy)]
struct Picture {
    extents: [usize; 2],
    channels: usize,
}

impl Picture {
    fn len(&self) -> usize {
        self.extents[0] * self.extents[1] * self.channels
    }

    /// The square of `side` values from row `at[0]` and column `at[1]` of picture `index`, less `pad` in both: where its values
    /// start and how they lie.
    fn square(&self, index: usize, at: [usize; 2], pad: [usize; 2], side: usize) -> (usize, Grid) {
        let inside = |d: usize| {
            let start = pad[d].saturating_sub(at[d]).min(side);
            start..(self.extents[d] + pad[d]).saturating_sub(at[d]).clamp(start, side)
        };
        let (rows, columns) = (inside(0), inside(1));
        let row = self.extents[1] * self.channels;
        let (y, x) = (at[0] + rows.start - pad[0], at[1] + columns.start - pad[1]);
        let start = index * self.len() + y * row + x * self.channels;
        (start, Grid { row, column: self.channels, rows, columns, channels: self.channels })
    }
}

/// All values of a square whose neighbours lie `step` apart.
fn full(side: usize, step: usize, channels: usize) -> Grid {
    Grid { row: side * step, column: step, rows: 0..side, columns: 0..side, channels }
}

/// How pictures are cut into tiles.
#[derive(Clone, Copy)]
struct Tiling {
    /// Extent of the filter.
    taps: usize,
    /// What tiles overlap in.
    source: Picture,
    /// What tiles cover.
    target: Picture,
    /// Zeros above and left of the source.
    pad: [usize; 2],
}

impl Tiling {
    fn forward(conv: &Conv) -> Self {
        let w = &conv.window;
        Self {
            taps: w.kernel[0],
            source: Picture { extents: w.input, channels: conv.in_channels },
            target: Picture { extents: w.output, channels: conv.out_channels },
            pad: w.pad,
        }
    }

    /// Of the input gradient: the output's gradient is convolved, and wider at the borders.
    fn backward(conv: &Conv) -> Self {
        let Self { taps, source, target, pad } = Self::forward(conv);
        Self { taps, source: target, target: source, pad: pad.map(|p| taps - 1 - p) }
    }

    /// Extent of a transformed tile.
    fn side(&self) -> usize {
        self.taps + TILE - 1
    }

    fn points(&self) -> usize {
        self.side() * self.side()
    }

    /// Tiles of a picture.
    fn tiles(&self) -> usize {
        self.target.extents[0].div_ceil(TILE) * self.target.extents[1].div_ceil(TILE)
    }

    /// Channels of the source and of the target in whole vectors.
    fn padded(&self, ctx: Ctx) -> [usize; 2] {
        let lanes = ctx.isa.panel() / 2;
        [self.source, self.target].map(|p| p.channels.next_multiple_of(lanes))
    }

    /// The picture of a tile among those of several pictures, and where in it the tile begins.
    fn place(&self, tile: usize) -> (usize, [usize; 2]) {
        let (picture, tile) = (tile / self.tiles(), tile % self.tiles());
        let across = self.target.extents[1].div_ceil(TILE);
        (picture, [tile / across * TILE, tile % across * TILE])
    }

    /// Where the values lie that tile `tile` of the source needs.
    fn needed(&self, tile: usize) -> (usize, Grid) {
        let (picture, at) = self.place(tile);
        self.source.square(picture, at, self.pad, self.side())
    }

    /// Where the values of tile `tile` of the target lie.
    fn covered(&self, tile: usize) -> (usize, Grid) {
        let (picture, at) = self.place(tile);
        self.target.square(picture, at, [0, 0], TILE)
    }
}

/// A convolution of pictures with a filter, in memory `[panel][point][source channel][panel]`.
struct Pass {
    tiling: Tiling,
    pictures: usize,
}

impl Pass {
    /// Panels of the filter, and floats of one.
    fn panels(&self, ctx: Ctx) -> (usize, usize) {
        let (panel, t) = (ctx.isa.panel(), &self.tiling);
        (t.target.channels.div_ceil(panel), t.points() * t.source.channels * panel)
    }

    /// Floats of a panel of the filter before it is transformed.
    fn plain(&self, ctx: Ctx) -> usize {
        self.tiling.taps * self.tiling.taps * self.tiling.source.channels * ctx.isa.panel()
    }

    /// Tiles per block: whole tiles of the micro-kernel, but no more than there are.
    fn block(&self, ctx: Ctx) -> usize {
        const ROWS: usize = 12;
        let [ins, outs] = self.tiling.padded(ctx);
        let fit = BLOCK / (self.tiling.points() * ins.max(outs));
        let most = self.tiling.tiles() * self.pictures.div_ceil(ctx.groups(self.pictures));
        (fit.clamp(2 * ROWS, 16 * ROWS) / ROWS * ROWS).min(most).max(1)
    }

    /// Distance between points in a block.
    fn slot(&self, ctx: Ctx) -> usize {
        let [ins, outs] = self.tiling.padded(ctx);
        self.block(ctx) * ins.max(outs) + SHIFT
    }

    /// Floats of scratch memory of a group of pictures.
    fn work(&self, ctx: Ctx) -> usize {
        (self.tiling.points() + 1) * self.slot(ctx)
    }

    fn scratch(&self, ctx: Ctx) -> usize {
        let (panels, len) = self.panels(ctx);
        panels * (len + self.plain(ctx)) + ctx.groups(self.pictures) * self.work(ctx)
    }

    /// Convolves; `pack(i, to)` puts panel `i` of the filter in `to`, `[tap][source channel][panel]`.
    fn run(
        &self,
        ctx: Ctx,
        x: &[f32],
        y: &mut [f32],
        scratch: &mut [f32],
        epilogue: Epilogue<'_>,
        pack: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let (t, (panels, len)) = (&self.tiling, self.panels(ctx));
        let (filter, scratch) = scratch[..self.scratch(ctx)].split_at_mut(panels * len);
        let (plain, work) = scratch.split_at_mut(panels * self.plain(ctx));
        let jobs = [(&mut *filter, len), (plain, self.plain(ctx))];
        ctx.each(panels, [], jobs, |i, [], [to, plain]| {
            pack(i, plain);
            let row = t.source.channels * ctx.isa.panel();
            let (from, target) = (full(t.taps, row, row), full(t.side(), row, row));
            let map = (Map::Filter, t.taps);
            transform(ctx.isa, map, (plain, &from), (to, &target));
        });
        let filter = &*filter;
        let groups = ctx.groups(self.pictures);
        let per = self.pictures.div_ceil(groups);
        let jobs = [(y, per * t.target.len()), (work, self.work(ctx))];
        ctx.each(groups, [(x, per * t.source.len())], jobs, |_, [x], [y, work]| {
            let tiles = x.len() / t.source.len() * t.tiles();
            for first in (0..tiles).step_by(self.block(ctx)) {
                let rows = self.block(ctx).min(tiles - first);
                self.block_of(ctx, first, rows, [x, filter], work, epilogue, y);
            }
        });
    }

    #[allow(clippy::too_many_arguments, reason = "a piece of the operation and its operands")]
    /// Convolves tiles `first..first + rows`. Results take the place of data, one point behind.
    fn block_of(
        &self,
        ctx: Ctx,
        first: usize,
        rows: usize,
        [x, filter]: [&[f32]; 2],
        work: &mut [f32],
        epilogue: Epilogue<'_>,
        y: &mut [f32],
    ) {
        let (t, panel, slot) = (&self.tiling, ctx.isa.panel(), self.slot(ctx));
        let [ins, outs] = t.padded(ctx);
        let data = full(t.side(), slot, ins);
        for row in 0..rows {
            let (start, needed) = t.needed(first + row);
            let to = &mut work[slot + row * ins..];
            let map = (Map::Data, t.taps);
            transform(ctx.isa, map, (&x[start..], &needed), (to, &data));
        }
        let terms = t.source.channels;
        for point in 0..t.points() {
            let (before, after) = work.split_at_mut((point + 1) * slot);
            for column in (0..outs).step_by(panel) {
                let at = (column / panel * t.points() + point) * terms * panel;
                let band = Band {
                    a: &after[..slot],
                    row: ins,
                    step: 1,
                    a_outer: 0,
                    b: &filter[at..][..terms * panel],
                    b_outer: 0,
                    inner: terms,
                    outer: 1,
                    rows,
                    columns: panel.min(outs - column),
                    out_row: outs,
                    accumulate: false,
                    epilogue: Epilogue::None,
                };
                band.run(ctx.isa, &mut before[point * slot + column..]);
            }
        }
        let result = full(t.side(), slot, outs);
        for row in 0..rows {
            let (start, covered) = t.covered(first + row);
            let from = &work[row * outs..];
            let map = (Map::Result(epilogue), t.taps);
            transform(ctx.isa, map, (from, &result), (&mut y[start..], &covered));
        }
    }
}

fn forward_pass(conv: &Conv) -> Pass {
    Pass { tiling: Tiling::forward(conv), pictures: conv.n }
}

fn input_grad_pass(conv: &Conv) -> Pass {
    Pass { tiling: Tiling::backward(conv), pictures: conv.n }
}

/// Floats of scratch memory that [`forward`] needs.
pub fn forward_scratch(ctx: Ctx, conv: &Conv) -> usize {
    if thin::fits(conv) {
        return thin::forward_scratch(ctx, conv);
    }
    forward_pass(conv).scratch(ctx)
}

/// `y = epilogue(x * filter)`, for a convolution that [`fits`].
pub fn forward(
    ctx: Ctx,
    conv: &Conv,
    x: &[f32],
    filter: &[f32],
    epilogue: Epilogue<'_>,
    y: &mut [f32],
    scratch: &mut [f32],
) {
    conv.check(x, filter, y);
    assert!(epilogue.fits(conv.out_channels), "one bias per output channel of {conv:?}");
    if thin::fits(conv) {
        return thin::forward(ctx, conv, x, filter, epilogue, y, scratch);
    }
    let (panel, channels) = (ctx.isa.panel(), conv.out_channels);
    forward_pass(conv).run(ctx, x, y, scratch, epilogue, |i, to| {
        let first = i * panel;
        pack_rows(ctx.isa, panel, &filter[first..], channels, panel.min(channels - first), to);
    });
}

/// Floats of scratch memory that [`input_grad`] needs.
pub fn input_grad_scratch(ctx: Ctx, conv: &Conv) -> usize {
    input_grad_pass(conv).scratch(ctx)
}

/// The gradient by the input: `dy` convolved with the filter turned by 180 degrees, its channels swapped.
pub fn input_grad(
    ctx: Ctx,
    conv: &Conv,
    dy: &[f32],
    filter: &[f32],
    dx: &mut [f32],
    scratch: &mut [f32],
) {
    conv.check(dx, filter, dy);
    let (panel, ins, outs) = (ctx.isa.panel(), conv.in_channels, conv.out_channels);
    input_grad_pass(conv).run(ctx, dy, dx, scratch, Epilogue::None, |i, to| {
        let first = i * panel;
        let taps = to.chunks_exact_mut(outs * panel).zip(filter.chunks_exact(ins * outs).rev());
        for (to, tap) in taps {
            pack_columns(ctx.isa, panel, &tap[first * outs..], outs, panel.min(ins - first), to);
        }
    });
}

/// Floats of scratch memory that [`filter_grad`] needs.
pub fn filter_grad_scratch(ctx: Ctx, conv: &Conv, dy: &OutputGrad<'_>) -> usize {
    if thin::fits(conv) {
        return thin::filter_grad_scratch(ctx, conv, dy);
    }
    filter_grad::filter_grad_scratch(ctx, conv) + conv.n * dy.scratch(conv.result())
}

/// The gradient by the filter.
pub fn filter_grad(
    ctx: Ctx,
    conv: &Conv,
    x: &[f32],
    dy: OutputGrad<'_>,
    dw: &mut [f32],
    scratch: &mut [f32],
) {
    conv.check_grad(x, dw, dy);
    if conv.n == 0 {
        return dw.fill(0.0);
    }
    if thin::fits(conv) {
        return thin::filter_grad(ctx, conv, x, dy, dw, scratch);
    }
    let (dense, scratch) = scratch.split_at_mut(conv.n * dy.scratch(conv.result()));
    let dense = dy.pictures(ctx, conv.n, conv.result(), dense);
    filter_grad::filter_grad(ctx, conv, x, dense, dw, scratch);
}

/// Whether there is a [`forward_pool`] for a convolution that [`fits`].
pub fn pools(conv: &Conv) -> bool {
    thin::fits(conv)
}

/// Floats of scratch memory that [`forward_pool`] needs.
pub fn forward_pool_scratch(ctx: Ctx, conv: &Conv, pool: &Window) -> usize {
    thin::forward_pool_scratch(ctx, conv, pool)
}

#[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
/// The maxima `y` of a convolution with bias and relu that [`pools`], and who won, as
/// [`max_pool_winners`](super::unpool::max_pool_winners) tells it.
pub fn forward_pool(
    ctx: Ctx,
    conv: &Conv,
    pool: &Window,
    x: &[f32],
    filter: &[f32],
    bias: &[f32],
    y: &mut [f32],
    winners: &mut [f32],
    scratch: &mut [f32],
) {
    assert!(fits(conv) && pools(conv), "no kernel for {conv:?} below a pool");
    assert_eq!(pool.input, conv.window.output, "the pool is above another convolution");
    assert!(pool.kernel[0] * pool.kernel[1] <= 256, "a byte tells the taps of {pool:?} apart");
    let maxima = conv.n * pool.output[0] * pool.output[1] * conv.out_channels;
    let lengths = [x.len(), bias.len(), y.len(), winners.len()];
    let bytes = conv.n * winners_len(pool, conv.out_channels);
    assert_eq!(lengths, [conv.n * conv.picture(), conv.out_channels, maxima, bytes]);
    assert_eq!(filter.len(), conv.filter(), "the filter of {conv:?}");
    thin::forward_pool(ctx, conv, pool, x, filter, bias, y, winners, scratch);
}
