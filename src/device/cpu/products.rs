//! [`Products`]: which kernels compute the convolutions and matrix products of a program.

use super::bf16::{self, Unit};
use super::conv::{self, Conv, ConvAlgorithm};
use super::gemm::{self, Matmul};
use super::unpool::{OutputGrad, max_pool_winners, winners_len};
use super::{Ctx, Epilogue, winograd};
use crate::graph::Window;

/// Pictures that each thread convolves before it takes their maxima: they stay in its second-level cache.
const POOLED: usize = 4;

/// The number format in which products and convolutions take their operands; sums and everything else are f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// As they are.
    #[default]
    F32,
    /// Rounded to bfloat16, multiplied by a unit.
    Bf16(Unit),
}

/// The kernels that a device has been told to use.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Products {
    pub(super) conv: ConvAlgorithm,
    pub(super) precision: Precision,
}

impl Products {
    /// How many times faster than f32's the direct convolutions are.
    fn lead(self, conv: &Conv) -> f64 {
        match self.precision {
            Precision::F32 => 1.0,
            Precision::Bf16(unit) => bf16::conv::lead(unit, conv),
        }
    }

    /// Whether a convolution and its filter gradient are computed in tiles, which are always f32.
    fn tiles(self, conv: &Conv) -> bool {
        self.conv.tiles(conv, winograd::gain, self.lead(conv))
    }

    /// The same of its input gradient.
    fn tiles_input_grad(self, conv: &Conv) -> bool {
        self.conv.tiles(conv, winograd::input_grad_gain, self.lead(conv))
    }

    pub(super) fn forward_scratch(self, ctx: Ctx, conv: &Conv) -> usize {
        match self.precision {
            _ if self.tiles(conv) => winograd::forward_scratch(ctx, conv),
            Precision::Bf16(_) => bf16::conv::forward_scratch(ctx, conv),
            Precision::F32 => conv::forward_scratch(ctx, conv),
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
    pub(super) fn forward(
        self,
        ctx: Ctx,
        conv: &Conv,
        x: &[f32],
        filter: &[f32],
        epilogue: Epilogue<'_>,
        y: &mut [f32],
        scratch: &mut [f32],
    ) {
        match self.precision {
            _ if self.tiles(conv) => {
                winograd::forward(ctx, conv, x, filter, epilogue, y, scratch);
            }
            Precision::Bf16(unit) => {
                bf16::conv::forward(ctx, unit, conv, x, filter, epilogue, y, scratch);
            }
            Precision::F32 => conv::forward(ctx, conv, x, filter, epilogue, y, scratch),
        }
    }

    pub(super) fn input_grad_scratch(self, ctx: Ctx, conv: &Conv) -> usize {
        match self.precision {
            _ if self.tiles_input_grad(conv) => winograd::input_grad_scratch(ctx, conv),
            Precision::Bf16(_) => bf16::conv::input_grad_scratch(ctx, conv),
            Precision::F32 => conv::input_grad_scratch(ctx, conv),
        }
    }

    pub(super) fn input_grad(
        self,
        ctx: Ctx,
        conv: &Conv,
        dy: &[f32],
        filter: &[f32],
        dx: &mut [f32],
        scratch: &mut [f32],
    ) {
        match self.precision {
            _ if self.tiles_input_grad(conv) => {
                winograd::input_grad(ctx, conv, dy, filter, dx, scratch);
            }
            Precision::Bf16(unit) => {
                bf16::conv::input_grad(ctx, unit, conv, dy, filter, dx, scratch);
            }
            Precision::F32 => conv::input_grad(ctx, conv, dy, filter, dx, scratch),
        }
    }

    /// The convolution of the pictures that are pooled together.
    fn below_pool(ctx: Ctx, conv: &Conv) -> Conv {
        Conv { n: conv.n.min(POOLED * ctx.threads), ..*conv }
    }

    /// Whether the convolution itself sees to the pool above it.
    fn pools(self, conv: &Conv) -> bool {
        self.tiles(conv) && winograd::pools(conv)
    }

    pub(super) fn forward_pool_scratch(self, ctx: Ctx, conv: &Conv, pool: &Window) -> usize {
        if self.pools(conv) {
            return winograd::forward_pool_scratch(ctx, conv, pool);
        }
        let part = Self::below_pool(ctx, conv);
        part.n * part.result() + self.forward_scratch(ctx, &part)
    }

    #[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
    /// The maxima `y` of a convolution with bias and relu, whose own values are never all there, and who won.
    pub(super) fn forward_pool(
        self,
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
        if self.pools(conv) {
            return winograd::forward_pool(ctx, conv, pool, x, filter, bias, y, winners, scratch);
        }
        let (part, c) = (Self::below_pool(ctx, conv), conv.out_channels);
        if part.n == 0 {
            return;
        }
        let (values, scratch) = scratch.split_at_mut(part.n * part.result());
        let outs = y
            .chunks_mut(part.n * pool.output[0] * pool.output[1] * c)
            .zip(winners.chunks_mut(part.n * winners_len(pool, c)));
        for (x, (y, winners)) in x.chunks(part.n * part.picture()).zip(outs) {
            let part = Conv { n: x.len() / part.picture(), ..part };
            let values = &mut values[..part.n * part.result()];
            self.forward(ctx, &part, x, filter, Epilogue::BiasRelu(bias), values, scratch);
            max_pool_winners(ctx, pool, part.n, c, values, y, winners);
        }
    }

    pub(super) fn filter_grad_scratch(self, ctx: Ctx, conv: &Conv, dy: &OutputGrad<'_>) -> usize {
        match self.precision {
            _ if self.tiles(conv) => winograd::filter_grad_scratch(ctx, conv, dy),
            Precision::Bf16(_) => bf16::conv::filter_grad_scratch(conv, dy),
            Precision::F32 => conv::filter_grad_scratch(ctx, conv, dy),
        }
    }

    pub(super) fn filter_grad(
        self,
        ctx: Ctx,
        conv: &Conv,
        x: &[f32],
        dy: OutputGrad<'_>,
        dw: &mut [f32],
        scratch: &mut [f32],
    ) {
        match self.precision {
            _ if self.tiles(conv) => winograd::filter_grad(ctx, conv, x, dy, dw, scratch),
            Precision::Bf16(unit) => bf16::conv::filter_grad(ctx, unit, conv, x, dy, dw, scratch),
            Precision::F32 => conv::filter_grad(ctx, conv, x, dy, dw, scratch),
        }
    }

    pub(super) fn matmul_scratch(self, ctx: Ctx, p: &Matmul) -> usize {
        match self.precision {
            Precision::Bf16(_) => bf16::gemm::matmul_scratch(ctx, p),
            Precision::F32 => gemm::matmul_scratch(ctx, p),
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
    pub(super) fn matmul(
        self,
        ctx: Ctx,
        p: &Matmul,
        a: &[f32],
        b: &[f32],
        epilogue: Epilogue<'_>,
        out: &mut [f32],
        scratch: &mut [f32],
    ) {
        match self.precision {
            Precision::Bf16(unit) => bf16::gemm::matmul(ctx, unit, p, a, b, epilogue, out, scratch),
            Precision::F32 => gemm::matmul(ctx, p, a, b, epilogue, out, scratch),
        }
    }
}
