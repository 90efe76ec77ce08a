//! The gradient of a convolution by its filter: a product over positions of the output's gradient, in tiles of channels by
//! positions, and the input, `[position][kernel column and channel]`, both spread among the padding. A kernel offset is then an offset
//! in the sequence of positions, and tiles of the left operand lie as they are walked through.

use super::block::{Block, Tiles};
use super::pack::{self, Spread};
use super::{BLOCK, COLUMNS, DEPTH, ROWS, TILE, Unit, halves};
use crate::device::cpu::Ctx;
use crate::device::cpu::conv::{Conv, chunks};
use crate::device::cpu::reduce::tree_sum;
use crate::device::cpu::unpool::OutputGrad;

/// Values of the pictures that are multiplied at a time: what two panels and a block of channels need of them stays in the first-level
/// cache. With more pictures sums would be loaded and stored less often, but operands come from the second-level cache.
const CACHED: usize = 1 << 15;
/// Sums of a block.
const SUMS: usize = BLOCK * BLOCK;

/// Sizes and layouts of the operands.
struct Shape {
    x: Spread,
    dy: Spread,
    kernel: [usize; 2],
    /// Positions of `dy`, in whole tiles.
    len: usize,
    /// Positions of a panel of `x`.
    reach: usize,
    /// Whether a panel holds 16 channels of one kernel column, read at that column's offset; else it holds 16 values of a kernel
    /// row.
    whole: bool,
}

/// Where the terms of a panel's columns are.
struct Panel {
    kernel_row: usize,
    /// The first column's place in the filter.
    first: usize,
    /// Columns that exist.
    columns: usize,
    /// The panel's place among those of a picture.
    at: usize,
}

impl Shape {
    fn new(conv: &Conv) -> Self {
        let w = &conv.window;
        let covered = (w.output[1] - 1) * w.stride[1] + w.kernel[1];
        let width = covered.max(w.pad[1] + w.input[1]).next_multiple_of(2);
        let spread = |extents, channels, pad, stride| Spread {
            extents,
            channels,
            pitch: channels,
            pad,
            stride,
            width,
        };
        let x = spread(w.input, conv.in_channels, w.pad, [1, 1]);
        let dy = spread(w.output, conv.out_channels, [0, 0], w.stride);
        let len = dy.len().next_multiple_of(DEPTH);
        // Every kernel offset is followed by as many positions as `dy` has.
        let offset = (w.kernel[0] - 1) * width + w.kernel[1];
        let reach = x.len().max(offset + len).next_multiple_of(DEPTH);
        let whole = conv.in_channels.is_multiple_of(COLUMNS);
        Self { x, dy, kernel: w.kernel, len, reach, whole }
    }

    /// Blocks of output channels.
    fn blocks(&self) -> usize {
        self.dy.channels.div_ceil(BLOCK)
    }

    /// Values of a picture of `dy`.
    fn planes(&self) -> usize {
        self.blocks() * BLOCK * self.len
    }

    /// Panels of 16 channels, or of 16 values of a kernel row.
    fn parts(&self) -> usize {
        let columns = if self.whole { 1 } else { self.kernel[1] };
        (columns * self.x.channels).div_ceil(COLUMNS)
    }

    /// Values of a panel of `x`.
    fn panel(&self) -> usize {
        self.reach * COLUMNS
    }

    /// Values of a picture of `x`: whole panels twice, since a pair of positions begins at an even one.
    fn panels(&self) -> usize {
        let copies = if self.whole && self.kernel[1] > 1 { 2 } else { 1 };
        copies * self.parts() * self.panel()
    }

    /// Values of a rounded picture, where panels are cut from one.
    fn rounded(&self) -> usize {
        match self.whole {
            true => 0,
            false => {
                let beyond = self.parts() * COLUMNS;
                ((self.reach + 1) * self.x.channels + beyond).next_multiple_of(BLOCK)
            }
        }
    }

    /// Values of scratch memory for one picture.
    fn picture(&self) -> usize {
        self.planes() + self.panels()
    }

    /// Panels of the gradient.
    fn count(&self) -> usize {
        self.kernel[0] * self.parts() * if self.whole { self.kernel[1] } else { 1 }
    }

    fn sums(&self) -> usize {
        self.blocks() * self.count().div_ceil(2) * SUMS
    }

    /// Pictures that are multiplied at a time.
    fn together(&self) -> usize {
        (CACHED / self.picture()).max(1)
    }

    /// Panel `i` of the gradient. Neighbours are pairs of the same offset, or of neighbouring ones.
    fn at(&self, i: usize) -> Panel {
        let row = self.kernel[1] * self.x.channels;
        if self.whole {
            let (taps, parts) = (self.kernel[0] * self.kernel[1], self.parts());
            let (tap, part) = match parts % 2 {
                0 => (i / 2 % taps, i / (2 * taps) * 2 + i % 2),
                _ => (i % taps, i / taps),
            };
            // Pairs from an odd position on are in the second copy; the first-level cache holds one of them.
            let [height, width] = self.kernel;
            let evens = width.div_ceil(2);
            let (ky, kx) = match tap.checked_sub(height * evens) {
                None => (tap / evens, tap % evens * 2),
                Some(tap) => (tap / (width / 2), tap % (width / 2) * 2 + 1),
            };
            let pairs = (ky * self.x.width + kx) / 2 * BLOCK;
            let at = (kx % 2 * parts + part) * self.panel() + pairs;
            let first = (ky * width + kx) * self.x.channels + part * COLUMNS;
            Panel { kernel_row: ky, first, columns: COLUMNS, at }
        } else {
            let (ky, part) = (i % self.kernel[0], i / self.kernel[0]);
            let first = part * COLUMNS;
            Panel {
                kernel_row: ky,
                first: ky * row + first,
                columns: COLUMNS.min(row - first),
                at: part * self.panel() + ky * self.x.width / 2 * BLOCK,
            }
        }
    }

    /// The tiles of `dy` that meet pixels from kernel row `ky`.
    fn met(&self, ky: usize) -> std::ops::Range<usize> {
        let (stride, top) = (self.dy.stride[0], self.x.pad[0]);
        let first = top.saturating_sub(ky).div_ceil(stride);
        let end = (self.x.extents[0] + top).saturating_sub(ky).div_ceil(stride);
        let end = end.min(self.dy.extents[0]);
        if first >= end {
            return 0..0;
        }
        let last = self.dy.at(end - 1, self.dy.extents[1] - 1);
        self.dy.at(first, 0) / DEPTH..last / DEPTH + 1
    }

    /// Packs a picture and its gradient.
    fn pack(&self, ctx: Ctx, x: &[f32], dy: &[f32], packed: &mut [u16], rounded: &mut [u16]) {
        let (planes, panels) = packed.split_at_mut(self.planes());
        pack::planes(ctx.isa, &self.dy, self.len, dy, planes);
        if self.whole {
            let (even, odd) = panels.split_at_mut(self.parts() * self.panel());
            pack::panels(ctx.isa, &self.x, self.reach, x, even);
            let pairs = even.chunks_exact(self.panel()).zip(odd.chunks_exact_mut(self.panel()));
            pairs.for_each(|(even, odd)| pack::shifted(ctx.isa, even, odd));
        } else {
            pack::rows(ctx.isa, &self.x, x, rounded);
            for (part, to) in panels.chunks_exact_mut(self.panel()).enumerate() {
                pack::patches(ctx.isa, self.x.channels, &rounded[part * COLUMNS..], to);
            }
        }
    }

    /// Adds the gradient of `count` packed pictures to `sums`, `[block of output channels][two panels]` blocks.
    fn multiply(&self, tiles: &Tiles, count: usize, packed: &[u16], sums: &mut [f32]) {
        let last = self.count() - 1;
        let second = (self.dy.channels > ROWS).then_some(ROWS * self.len);
        for (i, sums) in sums.chunks_exact_mut(SUMS).enumerate() {
            let pairs = self.count().div_ceil(2);
            let (block, pair) = (i / pairs, i % pairs);
            let panels = [self.at(2 * pair), self.at((2 * pair + 1).min(last))];
            let [a, b] = [0, 1].map(|i| self.met(panels[i].kernel_row));
            let met = match (a.is_empty(), b.is_empty()) {
                (true, _) => b,
                (_, true) => a,
                _ => a.start.min(b.start)..a.end.max(b.end),
            };
            if met.is_empty() {
                continue;
            }
            let product = Block {
                a: &packed[block * BLOCK * self.len + met.start * TILE..],
                row: DEPTH,
                second,
                a_step: TILE,
                a_outer: self.picture(),
                b: &packed[self.planes() + met.start * TILE..],
                panels: panels.map(|panel| panel.at),
                b_step: TILE,
                b_outer: self.picture(),
                inner: met.len(),
                outer: count,
                accumulate: true,
            };
            tiles.run(&product, sums, BLOCK, [0, ROWS * BLOCK]);
        }
    }

    /// Puts the sums where they belong.
    fn store(&self, sums: &[f32], dw: &mut [f32]) {
        let channels = self.dy.channels;
        let pairs = self.count().div_ceil(2);
        for i in 0..self.count() {
            let panel = self.at(i);
            let rows = dw[panel.first * channels..].chunks_exact_mut(channels).take(panel.columns);
            for (j, row) in rows.enumerate() {
                let blocks = sums[i / 2 * SUMS..].chunks(pairs * SUMS);
                for (row, block) in row.chunks_mut(BLOCK).zip(blocks) {
                    let column = block[i % 2 * COLUMNS + j..].iter().step_by(BLOCK);
                    row.iter_mut().zip(column).for_each(|(dw, sum)| *dw = *sum);
                }
            }
        }
    }
}

/// Floats of scratch memory that [`filter_grad`] needs.
pub fn filter_grad_scratch(conv: &Conv, dy: &OutputGrad<'_>) -> usize {
    let s = Shape::new(conv);
    let (per, count) = chunks(conv.n);
    let work = (s.together().min(per) * s.picture() + s.rounded()) / 2;
    count * (s.sums() + work + dy.scratch(conv.result())) + s.sums()
}

/// The gradient by the filter.
pub fn filter_grad(
    ctx: Ctx,
    unit: Unit,
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
    let s = Shape::new(conv);
    let (per, count) = chunks(conv.n);
    let together = s.together().min(per);
    let (from, to) = (conv.picture(), conv.result());
    let unpooled = dy.scratch(to);
    let work = (together * s.picture() + s.rounded()) / 2 + unpooled;
    let scratch = &mut scratch[..filter_grad_scratch(conv, &dy)];
    let (total, scratch) = scratch.split_at_mut(s.sums());
    let (partials, works) = scratch.split_at_mut(count * s.sums());
    let jobs = [(&mut *partials, s.sums()), (works, work)];
    ctx.each(count, [(x, per * from)], jobs, |chunk, [x], [sums, work]| {
        sums.fill(0.0);
        let (unpooled, work) = work.split_at_mut(unpooled);
        let work = halves(work);
        work.fill(0);
        let (packed, rounded) = work.split_at_mut(together * s.picture());
        let tiles = Tiles::new(unit, ROWS);
        for (i, x) in x.chunks(together * from).enumerate() {
            let pictures = x.chunks_exact(from).zip(packed.chunks_exact_mut(s.picture()));
            for (picture, (x, packed)) in (chunk * per + i * together..).zip(pictures) {
                let dy = dy.picture(ctx, picture, to, unpooled);
                s.pack(ctx, x, dy, packed, rounded);
            }
            s.multiply(&tiles, x.len() / from, packed, sums);
        }
    });
    let partials = &*partials;
    tree_sum(ctx, count, |i| &partials[i * s.sums()..][..s.sums()], 1.0, total);
    s.store(total, dw);
}
