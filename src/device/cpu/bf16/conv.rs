//! Convolutions in bfloat16, and their gradient by the input; that by the filter is in `filter_grad.rs`.

pub use super::filter_grad::{filter_grad, filter_grad_scratch};

use super::block::{Block, Tiles};
use super::pack::{self, Spread};
use super::{BLOCK, COLUMNS, DEPTH, ROWS, TILE, Unit, halves};
use crate::device::cpu::conv::Conv;
use crate::device::cpu::{Ctx, Epilogue, epilogue};

/// Values of two panels that stay in the first-level cache while the rows of a picture go by.
const NEAR: usize = 12 << 10;

/// How many times faster than f32's direct convolutions these are, roughly.
pub fn lead(unit: Unit, conv: &Conv) -> f64 {
    // Where a kernel row does not fill a tile, rounding and packing take longer than the products.
    if conv.window.kernel[1] * conv.in_channels < DEPTH {
        return 1.0;
    }
    match unit {
        Unit::Emulated => 0.5,
        Unit::Avx512 => 1.6,
        Unit::Amx => 8.0,
    }
}

/// A pass of a packed filter over spread pictures.
struct Slide {
    source: Spread,
    /// Extents and channels of the result.
    target: [usize; 3],
    /// Distances between neighbouring windows.
    stride: [usize; 2],
    kernel: [usize; 2],
}

impl Slide {
    fn forward(conv: &Conv) -> Self {
        let w = &conv.window;
        let covered = |d: usize| (w.output[d] - 1) * w.stride[d] + w.kernel[d];
        Self {
            source: Spread {
                extents: w.input,
                channels: conv.in_channels,
                pitch: conv.in_channels,
                pad: w.pad,
                stride: [1, 1],
                width: covered(1).max(w.pad[1] + w.input[1]),
            },
            target: [w.output[0], w.output[1], conv.out_channels],
            stride: w.stride,
            kernel: w.kernel,
        }
    }

    /// The gradient by the input: of stride 1, over the output's gradient with zeros between, the filter turned by 180 degrees.
    fn input_grad(conv: &Conv) -> Self {
        let w = &conv.window;
        let pad = [0, 1].map(|d| w.kernel[d] - 1 - w.pad[d]);
        let last = (w.output[1] - 1) * w.stride[1] + pad[1] + 1;
        Self {
            source: Spread {
                extents: w.output,
                channels: conv.out_channels,
                pitch: conv.out_channels,
                pad,
                stride: w.stride,
                width: (w.input[1] + w.kernel[1] - 1).max(last),
            },
            target: [w.input[0], w.input[1], conv.in_channels],
            stride: [1, 1],
            kernel: w.kernel,
        }
    }

    /// Tiles along the sum of a kernel row.
    fn tiles(&self) -> usize {
        (self.kernel[1] * self.source.channels).div_ceil(DEPTH)
    }

    /// Values of a packed panel.
    fn panel(&self) -> usize {
        self.kernel[0] * self.tiles() * TILE
    }

    fn panels(&self) -> usize {
        2 * self.target[2].div_ceil(BLOCK)
    }

    /// Tiles of a row of the result, and their rows: of about equal height.
    fn split(&self) -> (usize, usize) {
        let tiles = self.target[1].div_ceil(ROWS);
        (tiles, self.target[1].div_ceil(tiles))
    }

    /// Values of a spread picture, with what tiles read beyond its end.
    fn wide(&self) -> usize {
        let c = self.source.channels;
        let (tiles, rows) = self.split();
        let row = (self.target[0] - 1) * self.stride[0] + self.kernel[0] - 1;
        let beyond = (tiles * rows - 1) * self.stride[1] * c + self.tiles() * DEPTH;
        (self.source.len() * c).max(row * self.source.width * c + beyond).next_multiple_of(BLOCK)
    }

    /// Sums of a picture, one block wide.
    fn sums(&self) -> usize {
        let (tiles, rows) = self.split();
        self.target[0] * tiles * rows * BLOCK
    }

    fn scratch(&self, ctx: Ctx, n: usize) -> usize {
        self.panels() * self.panel() / 2 + ctx.groups(n) * (self.wide() / 2 + self.sums())
    }

    /// The kernel rows that meet pixels from row `y` of the result.
    fn kernel_rows(&self, y: usize) -> std::ops::Range<usize> {
        let (top, s) = (self.source.pad[0], &self.source);
        let end = top + (s.extents[0] - 1) * s.stride[0] + 1;
        let start = y * self.stride[0];
        let last = end.saturating_sub(start).min(self.kernel[0]);
        top.saturating_sub(start).min(last)..last
    }

    #[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
    /// Convolves `n` pictures; `scratch` begins with the packed filter.
    fn run(
        &self,
        ctx: Ctx,
        unit: Unit,
        n: usize,
        x: &[f32],
        y: &mut [f32],
        scratch: &mut [f32],
        epilogue: Epilogue<'_>,
    ) {
        let scratch = &mut scratch[..self.scratch(ctx, n)];
        let (packed, work) = scratch.split_at_mut(self.panels() * self.panel() / 2);
        let packed = &*halves(packed);
        let [height, width, channels] = self.target;
        let from = self.source.extents[0] * self.source.extents[1] * self.source.channels;
        let to = height * width * channels;
        let groups = ctx.groups(n);
        let per = n.div_ceil(groups);
        let unit_of_work = self.wide() / 2 + self.sums();
        let jobs = [(y, per * to), (work, unit_of_work)];
        ctx.each(groups, [(x, per * from)], jobs, |_, [x], [y, work]| {
            let (wide, sums) = work.split_at_mut(self.wide() / 2);
            let wide = halves(wide);
            wide.fill(0);
            let tiles = Tiles::new(unit, self.split().1);
            for (x, y) in x.chunks_exact(from).zip(y.chunks_exact_mut(to)) {
                pack::rows(ctx.isa, &self.source, x, wide);
                for (i, filter) in packed.chunks_exact(2 * self.panel()).enumerate() {
                    self.picture(&tiles, wide, filter, sums);
                    let first = i * BLOCK;
                    let columns = BLOCK.min(channels - first);
                    let (tiles, rows) = self.split();
                    let row = tiles * rows * BLOCK;
                    for (sums, y) in
                        sums.chunks_exact(row).zip(y.chunks_exact_mut(width * channels))
                    {
                        let epilogue = epilogue.from(first);
                        let sums = &sums[..width * BLOCK];
                        epilogue::finish(
                            ctx.isa,
                            epilogue,
                            columns,
                            sums,
                            channels,
                            &mut y[first..],
                        );
                    }
                }
            }
        });
    }

    /// The sums of one picture for one block of channels, a few kernel rows after the other: from the second-level cache tiles come
    /// more slowly than they are multiplied.
    fn picture(&self, tiles: &Tiles, x: &[u16], filter: &[u16], sums: &mut [f32]) {
        let (across, rows) = self.split();
        let c = self.source.channels;
        let row = self.source.width * c;
        let count = self.target[0] * across;
        let start = |tile: usize| {
            let (y, i) = (tile / across, tile % across);
            y * self.stride[0] * row + i * rows * self.stride[1] * c
        };
        let together = (NEAR / (2 * self.tiles() * TILE)).max(1);
        for from in (0..self.kernel[0]).step_by(together) {
            for first in (0..count).step_by(2) {
                let last = (first + 1).min(count - 1);
                let met = [first, last].map(|tile| self.kernel_rows(tile / across));
                let met = met[0].start.min(met[1].start)..met[0].end.max(met[1].end);
                let kernel = met.start.max(from)..met.end.min(from + together);
                let at = [first, last].map(|tile| tile * rows * BLOCK);
                if met.is_empty() {
                    at.into_iter().for_each(|at| sums[at..][..rows * BLOCK].fill(0.0));
                }
                if kernel.is_empty() {
                    continue;
                }
                let block = Block {
                    a: &x[start(first) + kernel.start * row..],
                    row: self.stride[1] * c,
                    second: (last > first).then(|| start(last) - start(first)),
                    a_step: DEPTH,
                    a_outer: row,
                    b: &filter[kernel.start * self.tiles() * TILE..],
                    panels: [0, self.panel()],
                    b_step: TILE,
                    b_outer: self.tiles() * TILE,
                    inner: self.tiles(),
                    outer: kernel.len(),
                    accumulate: kernel.start > met.start,
                };
                tiles.run(&block, sums, BLOCK, at);
            }
        }
    }
}

/// Floats of scratch memory that [`forward`] needs.
pub fn forward_scratch(ctx: Ctx, conv: &Conv) -> usize {
    Slide::forward(conv).scratch(ctx, conv.n)
}

#[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
/// `y = epilogue(x * filter)`.
pub fn forward(
    ctx: Ctx,
    unit: Unit,
    conv: &Conv,
    x: &[f32],
    filter: &[f32],
    epilogue: Epilogue<'_>,
    y: &mut [f32],
    scratch: &mut [f32],
) {
    conv.check(x, filter, y);
    assert!(epilogue.fits(conv.out_channels), "one bias per output channel of {conv:?}");
    let slide = Slide::forward(conv);
    let packed = &mut scratch[..slide.panels() * slide.panel() / 2];
    packed.fill(0.0);
    // Kernel rows are the rows, terms the columns and output channels the channels of a picture.
    let taps = conv.window.kernel[1] * conv.in_channels;
    let spread = Spread {
        extents: [conv.window.kernel[0], taps],
        channels: conv.out_channels,
        pitch: conv.out_channels,
        pad: [0, 0],
        stride: [1, 1],
        width: slide.tiles() * DEPTH,
    };
    pack::panels(ctx.isa, &spread, slide.panel() / COLUMNS, filter, halves(packed));
    slide.run(ctx, unit, conv.n, x, y, scratch, epilogue);
}

/// Floats of scratch memory that [`input_grad`] needs.
pub fn input_grad_scratch(ctx: Ctx, conv: &Conv) -> usize {
    Slide::input_grad(conv).scratch(ctx, conv.n)
}

/// The gradient by the input.
pub fn input_grad(
    ctx: Ctx,
    unit: Unit,
    conv: &Conv,
    dy: &[f32],
    filter: &[f32],
    dx: &mut [f32],
    scratch: &mut [f32],
) {
    conv.check(dx, filter, dy);
    let slide = Slide::input_grad(conv);
    let (ins, outs) = (conv.in_channels, conv.out_channels);
    let [_, width] = conv.window.kernel;
    let packed = &mut scratch[..slide.panels() * slide.panel() / 2];
    let jobs = [(packed, slide.panel() / 2)];
    ctx.each(slide.panels(), [], jobs, |panel, [], [to]| {
        let to = halves(to);
        to.fill(0);
        let columns = ins.min(panel * COLUMNS)..ins.min((panel + 1) * COLUMNS);
        for (tap, weights) in filter.chunks_exact(ins * outs).rev().enumerate() {
            let (ky, kx) = (tap / width, tap % width);
            let to = &mut to[ky * slide.tiles() * TILE..];
            let weights = &weights[columns.start * outs..columns.end * outs];
            if outs.is_multiple_of(DEPTH) {
                let to = &mut to[kx * outs * COLUMNS..][..outs * COLUMNS];
                pack::panel_of_rows(ctx.isa, weights, outs, to);
                continue;
            }
            for (column, weights) in weights.chunks_exact(outs).enumerate() {
                for (co, v) in weights.iter().enumerate() {
                    pack::put(to, kx * outs + co, column, *v);
                }
            }
        }
    });
    slide.run(ctx, unit, conv.n, dy, dx, scratch, Epilogue::None);
}
