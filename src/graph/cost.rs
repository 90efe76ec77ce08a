//! What a step of a program costs, nominally.

use super::{LrnParams, Op, Step};

impl Step {
    /// Floating-point operations: two for each tap of a convolution, padding included, and each term of a product; those of the
    /// definition for windows; one for each element of the largest operand for everything else. A faster algorithm does not
    /// count less.
    pub fn flops(&self) -> f64 {
        let elements = |i: usize| self.inputs[i].1.elements() as f64;
        let out = self.shape.elements() as f64;
        // Terms of an element of the convolution's output: the filter, but for the channels that go out.
        let taps = |filter: f64, channels: usize| filter / channels.max(1) as f64;
        let lrn = |p: &LrnParams| (2 * p.radius + 1 + 6) as f64;
        let lrn_grad = |p: &LrnParams| (2 * (2 * p.radius + 1) + 12) as f64;
        match &self.op {
            Op::Conv2d(_) | Op::Conv2dBias { .. } => {
                2.0 * out * taps(elements(1), self.shape.last_dim())
            }
            Op::Conv2dPool { window: w, pool } => {
                let pixels = |extents: [usize; 2]| (extents[0] * extents[1]) as f64;
                let values = out / pixels(pool.output) * pixels(w.output);
                2.0 * values * taps(elements(1), self.shape.last_dim())
            }
            Op::Conv2dInputGrad(_) => {
                2.0 * elements(0) * taps(elements(1), self.inputs[0].1.last_dim())
            }
            Op::Conv2dFilterGrad(_) | Op::Conv2dPoolFilterGrad { .. } => {
                2.0 * elements(1) * taps(out, self.inputs[1].1.last_dim())
            }
            Op::MatMul { transpose_a, .. } => {
                let k = self.inputs[0].1[usize::from(!transpose_a)];
                2.0 * out * k as f64
            }
            Op::MatMulBias { .. } => 2.0 * out * self.inputs[0].1[1] as f64,
            Op::MaxPool(w) | Op::AvgPool(w) => out * (w.kernel[0] * w.kernel[1]) as f64,
            Op::Lrn(p) => out * lrn(p),
            Op::LrnGrad(p) | Op::LrnReluGrad(p) => out * lrn_grad(p),
            Op::LrnPool { lrn: p, pool } => {
                elements(0) * lrn(p) + out * (pool.kernel[0] * pool.kernel[1]) as f64
            }
            Op::LrnPoolGrad { lrn: p, .. } => out * (lrn_grad(p) + 1.0),
            _ => self.inputs.iter().map(|(_, shape)| shape.elements() as f64).fold(out, f64::max),
        }
    }

    /// Bytes of operands and output, each once.
    pub fn bytes(&self) -> f64 {
        let views = self.inputs.iter().map(|(view, _)| view).chain(&self.winners);
        let floats = views.map(|view| view.len).sum::<usize>() + self.output.len;
        (size_of::<f32>() * floats) as f64
    }
}
