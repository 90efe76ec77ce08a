//! Convolutions and their gradients.
//!
//! In NHWC the taps `(kx, channel)` of one kernel row are contiguous for each position, so a convolution is, per
//! kernel row, a product whose left rows overlap. Pictures are copied into a scratch picture with zero columns at
//! its sides; kernel rows outside the picture are left out of the sum.

use super::pack::{pack_columns, pack_rows};
use super::reduce::tree_sum;
use super::tile::Band;
use super::unpool::OutputGrad;
use super::{Ctx, Epilogue, winograd};
use crate::graph::Window;

/// Chunks of pictures whose filter gradients are summed apart: fixed, so that threads cannot change a result.
const CHUNKS: usize = 8;

/// How convolutions are computed. The ways differ in rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConvAlgorithm {
    /// The faster one for the shape.
    #[default]
    Auto,
    /// As sums of products.
    Direct,
    /// In tiles by minimal filtering, where [`winograd::fits`].
    Winograd,
}

impl ConvAlgorithm {
    /// Whether a convolution goes to the kernels of [`winograd`], where these are `gain` times as fast as direct ones in f32, and the
    /// direct ones that there are `lead` times.
    pub(super) fn tiles(self, conv: &Conv, gain: impl Fn(&Conv) -> f64, lead: f64) -> bool {
        match self {
            Self::Auto => gain(conv) > lead,
            Self::Direct => false,
            Self::Winograd => winograd::fits(conv),
        }
    }
}

/// Sizes of a convolution of `[n, h, w, in_channels]` with a `[kh, kw, in_channels, out_channels]` filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv {
    /// Pictures.
    pub n: usize,
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Extents of input, kernel and output.
    pub window: Window,
}

impl Conv {
    pub(super) fn check(&self, x: &[f32], filter: &[f32], y: &[f32]) {
        self.check_grad(x, filter, OutputGrad::Dense(y));
    }

    pub(super) fn check_grad(&self, x: &[f32], filter: &[f32], y: OutputGrad<'_>) {
        let w = &self.window;
        let sizes = (self.n * self.picture(), self.filter());
        assert_eq!((x.len(), filter.len()), sizes, "operands of {self:?}");
        y.check(self.n, self.result());
        for d in 0..2 {
            assert!(w.pad[d] < w.kernel[d], "a window of {self:?} lies in the padding");
            assert!((w.output[d] - 1) * w.stride[d] < w.input[d] + w.pad[d], "{self:?}");
        }
        assert!(self.in_channels > 0 && self.out_channels > 0, "{self:?} has no channels");
    }

    /// Floats of an input picture.
    pub(super) fn picture(&self) -> usize {
        self.window.input[0] * self.window.input[1] * self.in_channels
    }

    /// Floats of an output picture.
    pub(super) fn result(&self) -> usize {
        self.window.output[0] * self.window.output[1] * self.out_channels
    }

    /// Floats of the filter.
    pub(super) fn filter(&self) -> usize {
        self.window.kernel[0] * self.taps() * self.out_channels
    }

    /// Terms of a kernel row.
    fn taps(&self) -> usize {
        self.window.kernel[1] * self.in_channels
    }

    /// How an input picture is widened for the forward pass and the filter gradient.
    fn wide_input(&self) -> Widen {
        let w = &self.window;
        let needed = (w.output[1] - 1) * w.stride[1] + w.kernel[1];
        let width = if w.pad[1] == 0 { needed.max(w.input[1]) } else { needed };
        Widen {
            height: w.input[0],
            columns: w.input[1],
            channels: self.in_channels,
            left: w.pad[1],
            spread: 1,
            width,
        }
    }

    /// How an output gradient is widened, its columns a stride apart, for the input gradient.
    fn wide_output(&self) -> Widen {
        let w = &self.window;
        Widen {
            height: w.output[0],
            columns: w.output[1],
            channels: self.out_channels,
            left: w.kernel[1] - 1 - w.pad[1],
            spread: w.stride[1],
            width: w.input[1] + w.kernel[1] - 1,
        }
    }
}

/// A picture with zero columns at its sides and between its columns.
#[derive(Clone, Copy)]
struct Widen {
    height: usize,
    columns: usize,
    channels: usize,
    /// Zero columns at the left.
    left: usize,
    /// Distance between columns.
    spread: usize,
    /// Columns after widening; columns of the picture beyond are never looked at.
    width: usize,
}

impl Widen {
    /// Floats of a wide row.
    fn row(&self) -> usize {
        self.width * self.channels
    }

    /// Floats of scratch memory: none where the picture is as wide as it shall be.
    fn scratch(&self) -> usize {
        if self.left == 0 && self.spread == 1 && self.width == self.columns {
            0
        } else {
            self.height * self.row()
        }
    }

    /// The wide picture: a copy in `scratch`, whose zeros must be there already, or the picture itself.
    fn apply<'a>(&self, picture: &'a [f32], scratch: &'a mut [f32]) -> &'a [f32] {
        if scratch.is_empty() {
            return picture;
        }
        let c = self.channels;
        let rows = picture.chunks_exact(self.columns * c).zip(scratch.chunks_exact_mut(self.row()));
        for (from, to) in rows {
            let to = &mut to[self.left * c..];
            if self.spread == 1 {
                let len = from.len().min(to.len());
                to[..len].copy_from_slice(&from[..len]);
            } else {
                for (f, t) in from.chunks_exact(c).zip(to.chunks_mut(self.spread * c)) {
                    t[..c].copy_from_slice(f);
                }
            }
        }
        scratch
    }
}

/// The kernel rows of an output row: `count` of them from `kernel` on, over source rows from `source` on.
struct RowTaps {
    kernel: usize,
    source: usize,
    count: usize,
}

/// A pass of a packed filter over wide pictures.
struct Slide {
    wide: Widen,
    /// Extents and channels of the result.
    target: [usize; 3],
    /// Kernel rows, and the distance between those that meet neighbouring source rows.
    kernel: [usize; 2],
    /// Terms of a kernel row.
    taps: usize,
    /// Distance in a source row between neighbouring results.
    step: usize,
}

impl Slide {
    fn packed(&self, ctx: Ctx) -> usize {
        let panel = ctx.isa.panel();
        self.target[2].div_ceil(panel) * self.kernel[0] * self.taps * panel
    }

    fn scratch(&self, ctx: Ctx, n: usize) -> usize {
        self.packed(ctx) + ctx.groups(n) * self.wide.scratch()
    }

    #[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
    /// Convolves `n` pictures; `scratch` begins with the packed filter.
    fn run(
        &self,
        ctx: Ctx,
        n: usize,
        x: &[f32],
        y: &mut [f32],
        scratch: &mut [f32],
        epilogue: Epilogue<'_>,
        row_taps: impl Fn(usize) -> RowTaps + Sync,
    ) {
        let (packed, wide) = scratch[..self.scratch(ctx, n)].split_at_mut(self.packed(ctx));
        let packed = &*packed;
        let [height, width, channels] = self.target;
        let (from, to) =
            (self.wide.height * self.wide.columns * self.wide.channels, height * width * channels);
        let groups = ctx.groups(n);
        let per = n.div_ceil(groups);
        let panel = ctx.isa.panel();
        let jobs = [(y, per * to), (wide, self.wide.scratch())];
        ctx.each(groups, [(x, per * from)], jobs, |_, [x], [y, wide]| {
            wide.fill(0.0);
            for (x, y) in x.chunks_exact(from).zip(y.chunks_exact_mut(to)) {
                let x = self.wide.apply(x, wide);
                for (i, filter) in
                    packed.chunks_exact(self.kernel[0] * self.taps * panel).enumerate()
                {
                    let first = i * panel;
                    for (row, out) in y.chunks_exact_mut(width * channels).enumerate() {
                        let taps = row_taps(row);
                        let band = Band {
                            a: &x[taps.source * self.wide.row()..],
                            row: self.step,
                            step: 1,
                            a_outer: self.wide.row(),
                            b: &filter[taps.kernel * self.taps * panel..],
                            b_outer: self.kernel[1] * self.taps * panel,
                            inner: self.taps,
                            outer: taps.count,
                            rows: width,
                            columns: panel.min(channels - first),
                            out_row: channels,
                            accumulate: false,
                            epilogue: epilogue.from(first),
                        };
                        band.run(ctx.isa, &mut out[first..]);
                    }
                }
            }
        });
    }
}

fn forward_slide(conv: &Conv) -> Slide {
    let w = &conv.window;
    Slide {
        wide: conv.wide_input(),
        target: [w.output[0], w.output[1], conv.out_channels],
        kernel: [w.kernel[0], 1],
        taps: conv.taps(),
        step: w.stride[1] * conv.in_channels,
    }
}

fn input_grad_slide(conv: &Conv) -> Slide {
    let w = &conv.window;
    Slide {
        wide: conv.wide_output(),
        target: [w.input[0], w.input[1], conv.in_channels],
        kernel: [w.kernel[0], w.stride[0]],
        taps: w.kernel[1] * conv.out_channels,
        step: conv.out_channels,
    }
}

/// Floats of scratch memory that [`forward`] needs.
pub fn forward_scratch(ctx: Ctx, conv: &Conv) -> usize {
    forward_slide(conv).scratch(ctx, conv.n)
}

/// `y = epilogue(x * filter)`.
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
    let w = &conv.window;
    let slide = forward_slide(conv);
    let (panel, channels) = (ctx.isa.panel(), conv.out_channels);
    let unit = filter.len() / channels * panel;
    let packed = &mut scratch[..slide.packed(ctx)];
    ctx.each(channels.div_ceil(panel), [], [(packed, unit)], |i, [], [to]| {
        let first = i * panel;
        pack_rows(ctx.isa, panel, &filter[first..], channels, panel.min(channels - first), to);
    });
    slide.run(ctx, conv.n, x, y, scratch, epilogue, |row| {
        let (taps, source) = w.taps(0, row);
        RowTaps { kernel: taps.start, source, count: taps.len() }
    });
}

/// Floats of scratch memory that [`input_grad`] needs.
pub fn input_grad_scratch(ctx: Ctx, conv: &Conv) -> usize {
    input_grad_slide(conv).scratch(ctx, conv.n)
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
    let w = &conv.window;
    let slide = input_grad_slide(conv);
    let (panel, ins, outs) = (ctx.isa.panel(), conv.in_channels, conv.out_channels);
    let unit = filter.len() / ins * panel;
    let packed = &mut scratch[..slide.packed(ctx)];
    ctx.each(ins.div_ceil(panel), [], [(packed, unit)], |i, [], [to]| {
        let first = i * panel;
        let taps = to.chunks_exact_mut(outs * panel).zip(filter.chunks_exact(ins * outs).rev());
        for (to, tap) in taps {
            pack_columns(ctx.isa, panel, &tap[first * outs..], outs, panel.min(ins - first), to);
        }
    });
    slide.run(ctx, conv.n, dy, dx, scratch, Epilogue::None, |row| {
        // Output rows whose window holds this input row; the kernel row falls as the output row grows.
        let at = row + w.pad[0];
        let source = (at + 1).saturating_sub(w.kernel[0]).div_ceil(w.stride[0]);
        let end = (at / w.stride[0] + 1).min(w.output[0]);
        let count = end.saturating_sub(source);
        let kernel = if count == 0 { 0 } else { w.kernel[0] - 1 - (at - source * w.stride[0]) };
        RowTaps { kernel, source: source.min(w.output[0]), count }
    });
}

/// Pictures per chunk and number of chunks.
pub(super) fn chunks(n: usize) -> (usize, usize) {
    let per = n.div_ceil(CHUNKS).max(1);
    (per, n.div_ceil(per))
}

/// Floats of scratch memory that [`filter_grad`] needs.
pub fn filter_grad_scratch(ctx: Ctx, conv: &Conv, dy: &OutputGrad<'_>) -> usize {
    let panel = ctx.isa.panel();
    let packed = conv.result() / conv.out_channels * conv.out_channels.div_ceil(panel) * panel;
    let work = conv.wide_input().scratch() + packed + dy.scratch(conv.result());
    chunks(conv.n).1 * (conv.filter() + work)
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
    let w = &conv.window;
    let (panel, channels) = (ctx.isa.panel(), conv.out_channels);
    let (wide, taps) = (conv.wide_input(), conv.taps());
    let (per, count) = chunks(conv.n);
    let scratch = &mut scratch[..filter_grad_scratch(ctx, conv, &dy)];
    let work = scratch.len() / count - conv.filter();
    let (partials, works) = scratch.split_at_mut(count * conv.filter());
    let (from, to) = (conv.picture(), conv.result());
    let plane = w.output[0] * w.output[1] * panel;
    let jobs = [(&mut *partials, conv.filter()), (works, work)];
    ctx.each(count, [(x, per * from)], jobs, |chunk, [x], [partial, work]| {
        let (widened, work) = work.split_at_mut(wide.scratch());
        let (unpooled, packed) = work.split_at_mut(dy.scratch(to));
        widened.fill(0.0);
        for (picture, x) in x.chunks_exact(from).enumerate() {
            let dy = dy.picture(ctx, chunk * per + picture, to, unpooled);
            let x = wide.apply(x, widened);
            for (i, b) in packed.chunks_exact_mut(plane).enumerate() {
                let first = i * panel;
                let columns = panel.min(channels - first);
                pack_rows(ctx.isa, panel, &dy[first..], channels, columns, b);
                for (ky, out) in partial.chunks_exact_mut(taps * channels).enumerate() {
                    // Output rows whose source row lies in the picture.
                    let top = w.pad[0].saturating_sub(ky).div_ceil(w.stride[0]).min(w.output[0]);
                    let below = (w.input[0] + w.pad[0]).saturating_sub(ky).div_ceil(w.stride[0]);
                    let rows = below.min(w.output[0]).saturating_sub(top);
                    let source = if rows == 0 { 0 } else { top * w.stride[0] + ky - w.pad[0] };
                    let band = Band {
                        a: &x[source * wide.row()..],
                        row: 1,
                        step: w.stride[1] * conv.in_channels,
                        a_outer: w.stride[0] * wide.row(),
                        b: &b[top * w.output[1] * panel..],
                        b_outer: w.output[1] * panel,
                        inner: w.output[1],
                        outer: rows,
                        rows: taps,
                        columns,
                        out_row: channels,
                        accumulate: picture > 0,
                        epilogue: Epilogue::None,
                    };
                    band.run(ctx.isa, &mut out[first..]);
                }
            }
        }
    });
    let partials = &*partials;
    tree_sum(ctx, count, |i| &partials[i * conv.filter()..][..conv.filter()], 1.0, dw);
}
