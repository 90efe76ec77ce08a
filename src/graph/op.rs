//! [`Op`]: every computation the trainer's graph knows. Closed on purpose: the compiler finds each missing arm.

use super::Window;
use crate::tensor::Shape;

/// Parameters of local response normalisation over channels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrnParams {
    /// Channels on either side.
    pub radius: usize,
    /// Added to the scaled sum.
    pub bias: f32,
    /// Scale of the sum of squares; not divided by the window.
    pub alpha: f32,
    /// The power.
    pub beta: f32,
}

/// One operation. Operands are in brackets, in order; tensors are f32, pictures NHWC, filters HWIO.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// A value fed at each step.
    Placeholder(Shape),
    /// A row of the variable table.
    Variable {
        /// The row.
        row: usize,
        /// Its shape.
        shape: Shape,
    },
    /// A tensor of one value.
    Fill(f32, Shape),
    /// `[a, b]`: the matrix product, of transposed operands where asked.
    MatMul {
        /// `a` is stored transposed.
        transpose_a: bool,
        /// `b` is stored transposed.
        transpose_b: bool,
    },
    /// `[x, filter]`.
    Conv2d(Window),
    /// `[dy, filter]`: gradient by the input.
    Conv2dInputGrad(Window),
    /// `[x, dy]`: gradient by the filter.
    Conv2dFilterGrad(Window),
    /// `[x, filter]`, filter `[height, width, channels, multiplier]`.
    DepthwiseConv2d(Window),
    /// `[dy, filter]`.
    DepthwiseConv2dInputGrad(Window),
    /// `[x, dy]`.
    DepthwiseConv2dFilterGrad(Window),
    /// `[x]`.
    MaxPool(Window),
    /// `[x, y, dy]`: to the first maximum of each window.
    MaxPoolGrad(Window),
    /// `[x]`: padding does not count.
    AvgPool(Window),
    /// `[dy]`.
    AvgPoolGrad(Window),
    /// `[x]`.
    Lrn(LrnParams),
    /// `[x, dy]`.
    LrnGrad(LrnParams),
    /// `[x]`: the mean of each innermost index over all rows, then the (biased) variance of each.
    Moments,
    /// `[x, moments, scale, offset]`: normalisation by these moments. To have a gradient, they must be those of `x`.
    BatchNorm {
        /// Added to the variance.
        epsilon: f32,
    },
    /// `[x, moments, dy]`: gradient by `scale`, then that by `offset`.
    BatchNormSums {
        /// As in the forward pass.
        epsilon: f32,
    },
    /// `[x, moments, scale, dy, sums]`: gradient by `x`, through its moments too; `sums` are [`Op::BatchNormSums`].
    BatchNormInputGrad {
        /// As in the forward pass.
        epsilon: f32,
    },
    /// `[x, bias]`: one bias per innermost index.
    BiasAdd,
    /// `[dy]`: the sum over all rows.
    BiasAddGrad,
    /// `[x]`.
    Relu,
    /// `[dy, y]`: `dy` where the output `y` is positive.
    ReluGrad,
    /// `[logits, labels]`: one loss per row.
    SoftmaxCrossEntropy,
    /// `[upstream, logits, labels]`: gradient by the logits.
    SoftmaxCrossEntropyGrad,
    /// `[a, b]`.
    Add,
    /// `[a, b]`.
    Sub,
    /// `[a, b]`: elementwise; `b` may be a scalar.
    Mul,
    /// `[x]`: by a constant.
    Scale(f32),
    /// `[x]`.
    Square,
    /// `[x]`: half the sum of squares.
    L2Loss,
    /// `[x]`: the mean of all elements.
    Mean,
    /// `[x]`: the sum of all elements.
    Sum,
    /// `[scalar]`: repeated to a shape.
    Broadcast(Shape),
    /// `[x]`: the same elements in another shape.
    Reshape(Shape),
    /// `[a, b]`: joined along the innermost dimension.
    Concat,
    /// `[x]`: a range of the innermost dimension.
    Slice {
        /// First index.
        start: usize,
        /// How many.
        len: usize,
    },
    /// Made by lowering only. `[x, filter, bias]`: convolution, bias, and relu where asked, in one pass.
    Conv2dBias {
        /// As in [`Op::Conv2d`].
        window: Window,
        /// Cut at zero.
        relu: bool,
    },
    /// Made by lowering only. `[a, b, bias]`: product, bias, and relu where asked, in one pass.
    MatMulBias {
        /// Cut at zero.
        relu: bool,
    },
    /// Made by lowering only. `[a, x]`: `a + factor * x`.
    AddScaled(f32),
    /// Made by lowering for [`Fusions::Backward`](super::Fusions) only. `[x, y, dy]`: gradient of a maximum over the output `x` of
    /// a relu, through that relu.
    MaxPoolReluGrad(Window),
    /// Made by lowering for [`Fusions::Backward`](super::Fusions) only. `[x, dy]`: gradient of a normalisation of the output `x` of
    /// a relu, through that relu.
    LrnReluGrad(LrnParams),
    /// Made by lowering for [`Fusions::Backward`](super::Fusions) only. `[x, filter, bias]`: the maxima of a convolution with bias
    /// and relu, whose values are not kept. [`Step::winners`](super::Step) is where it notes who won.
    Conv2dPool {
        /// As in [`Op::Conv2d`].
        window: Window,
        /// As in [`Op::MaxPool`].
        pool: Window,
    },
    /// Made by lowering for [`Fusions::Backward`](super::Fusions) only. `[x, winners, y, dy]`: gradient by the filter of
    /// [`Op::Conv2dPool`], whose output is `y`. The winners have the shape of the convolution that they stand for.
    Conv2dPoolFilterGrad {
        /// As in [`Op::Conv2d`].
        window: Window,
        /// As in [`Op::MaxPool`].
        pool: Window,
    },
    /// Made by lowering for [`Fusions::Backward`](super::Fusions) only. `[x]`: the maxima of the normalised output `x` of a relu; the
    /// values between are not kept. [`Step::winners`](super::Step) is where it notes who won.
    LrnPool {
        /// As in [`Op::Lrn`].
        lrn: LrnParams,
        /// As in [`Op::MaxPool`].
        pool: Window,
    },
    /// Made by lowering for [`Fusions::Backward`](super::Fusions) only. `[x, winners, y, dy]`: gradient of [`Op::LrnPool`], whose
    /// output is `y`, through the relu below it. The winners have the shape of the normalisation that they stand for.
    LrnPoolGrad {
        /// As in [`Op::Lrn`].
        lrn: LrnParams,
        /// As in [`Op::MaxPool`].
        pool: Window,
    },
    /// Made by lowering for [`Fusions::Backward`](super::Fusions) only. `[dy, y]`: the sum over all rows of `dy` where `y` is
    /// positive.
    BiasReluGrad,
}

impl Op {
    /// TensorFlow's name for the operation, as the placement log prints it.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Placeholder(_) => "Placeholder",
            Op::Variable { .. } => "VariableV2",
            Op::Fill(..) => "Const",
            Op::MatMul { .. } => "MatMul",
            Op::Conv2d(_) => "Conv2D",
            Op::Conv2dInputGrad(_) => "Conv2DBackpropInput",
            Op::Conv2dFilterGrad(_) => "Conv2DBackpropFilter",
            Op::DepthwiseConv2d(_) => "DepthwiseConv2dNative",
            Op::DepthwiseConv2dInputGrad(_) => "DepthwiseConv2dNativeBackpropInput",
            Op::DepthwiseConv2dFilterGrad(_) => "DepthwiseConv2dNativeBackpropFilter",
            Op::MaxPool(_) => "MaxPool",
            Op::MaxPoolGrad(_) => "MaxPoolGrad",
            Op::AvgPool(_) => "AvgPool",
            Op::AvgPoolGrad(_) => "AvgPoolGrad",
            Op::Lrn(_) => "LRN",
            Op::LrnGrad(_) => "LRNGrad",
            Op::Moments => "Moments",
            Op::BatchNorm { .. } => "FusedBatchNorm",
            Op::BatchNormSums { .. } => "FusedBatchNormSums",
            Op::BatchNormInputGrad { .. } => "FusedBatchNormInputGrad",
            Op::BiasAdd => "BiasAdd",
            Op::BiasAddGrad => "BiasAddGrad",
            Op::Relu => "Relu",
            Op::ReluGrad => "ReluGrad",
            Op::SoftmaxCrossEntropy => "SparseSoftmaxCrossEntropyWithLogits",
            Op::SoftmaxCrossEntropyGrad => "SparseSoftmaxCrossEntropyGrad",
            Op::Add => "Add",
            Op::Sub => "Sub",
            Op::Mul => "Mul",
            Op::Scale(_) => "Scale",
            Op::Square => "Square",
            Op::L2Loss => "L2Loss",
            Op::Mean => "Mean",
            Op::Sum => "Sum",
            Op::Broadcast(_) => "BroadcastTo",
            Op::Reshape(_) => "Reshape",
            Op::Concat => "ConcatV2",
            Op::Slice { .. } => "Slice",
            Op::Conv2dBias { .. } => "FusedConv2D",
            Op::MatMulBias { .. } => "FusedMatMul",
            Op::AddScaled(_) => "AddScaled",
            Op::MaxPoolReluGrad(_) => "FusedMaxPoolGrad",
            Op::LrnReluGrad(_) => "FusedLRNGrad",
            Op::Conv2dPool { .. } => "FusedConv2DMaxPool",
            Op::Conv2dPoolFilterGrad { .. } => "FusedConv2DMaxPoolBackpropFilter",
            Op::LrnPool { .. } => "FusedLRNMaxPool",
            Op::LrnPoolGrad { .. } => "FusedLRNMaxPoolGrad",
            Op::BiasReluGrad => "FusedBiasAddGrad",
        }
    }
}
