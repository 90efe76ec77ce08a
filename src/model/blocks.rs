//! Layers that several networks share.

use crate::graph::{Builder, GraphError, Init, NodeId, Op, Padding};
use crate::tensor::Shape;

/// How a layer's variables start, and how strongly its weights are held near zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer {
    /// Standard deviation of the truncated normal of the weights.
    pub(super) stddev: f32,
    /// First value of the biases.
    pub(super) bias: f32,
    /// Factor of the L2 loss of the weights; 0 for none.
    pub(super) decay: f32,
}

impl Layer {
    /// Without decay, and with biases of zero.
    pub(super) fn new(stddev: f32) -> Self {
        Self { stddev, bias: 0.0, decay: 0.0 }
    }
}

/// `relu(conv(x) + bias)`, stride 1, SAME.
pub(super) fn conv_relu(
    b: &mut Builder<'_>,
    x: NodeId,
    kernel: [usize; 2],
    channels: usize,
    layer: Layer,
) -> Result<NodeId, GraphError> {
    let shape = [kernel[0], kernel[1], b.shape(x).last_dim(), channels];
    let weights = b.variable("weights", shape, Init::TruncatedNormal(layer.stddev))?;
    let biases = b.variable("biases", [channels], Init::Constant(layer.bias))?;
    let product = b.conv2d(x, weights, [1, 1], Padding::Same)?;
    let sum = b.bias_add(product, biases)?;
    b.relu(sum)
}

/// `x weights + bias`, and the weights' node.
pub(super) fn affine(
    b: &mut Builder<'_>,
    x: NodeId,
    units: usize,
    layer: Layer,
) -> Result<(NodeId, NodeId), GraphError> {
    let shape = [b.shape(x).last_dim(), units];
    let weights = b.variable("weights", shape, Init::TruncatedNormal(layer.stddev))?;
    let biases = b.variable("biases", [units], Init::Constant(layer.bias))?;
    let product = b.matmul(x, weights)?;
    Ok((b.bias_add(product, biases)?, weights))
}

/// `factor * sum(weights^2) / 2`, over all of these.
pub(super) fn weight_decay(
    b: &mut Builder<'_>,
    weights: &[NodeId],
    factor: f32,
) -> Result<NodeId, GraphError> {
    let mut sum = None;
    for &weights in weights {
        let loss = b.op(Op::L2Loss, &[weights])?;
        sum = Some(match sum {
            Some(sum) => b.op(Op::Add, &[sum, loss])?,
            None => loss,
        });
    }
    let sum = match sum {
        Some(sum) => sum,
        None => b.op(Op::Fill(0.0, Shape::scalar()), &[])?,
    };
    b.op(Op::Scale(factor), &[sum])
}

/// Added to the variance by which a batch normalisation divides.
const EPSILON: f32 = 1e-5;

/// Batch normalisation of each channel: by the batch's own moments in training, by the moving ones otherwise.
pub(super) fn batch_norm(b: &mut Builder<'_>, x: NodeId) -> Result<NodeId, GraphError> {
    let len = b.shape(x).last_dim();
    let rows = b.shape(x).elements() as f64 / len.max(1) as f64;
    let scale = b.variable("gamma", [len], Init::Constant(1.0))?;
    let offset = b.variable("beta", [len], Init::Constant(0.0))?;
    let own = if b.is_training() { Some(b.op(Op::Moments, &[x])?) } else { None };
    let moment = |b: &mut Builder<'_>, start| b.op(Op::Slice { start, len }, own.as_slice());
    let mean = b.statistic("moving_mean", [len], Init::Constant(0.0), |b| moment(b, 0))?;
    let variance = b.statistic("moving_variance", [len], Init::Constant(1.0), |b| {
        // That of all pictures, of which the batch is a sample.
        let biased = moment(b, len)?;
        b.op(Op::Scale((rows / (rows - 1.0).max(1.0)) as f32), &[biased])
    })?;
    let moments = match own {
        Some(moments) => moments,
        None => b.op(Op::Concat, &[mean, variance])?,
    };
    b.op(Op::BatchNorm { epsilon: EPSILON }, &[x, moments, scale, offset])
}

/// The mean softmax cross-entropy over the batch.
pub(super) fn cross_entropy(
    b: &mut Builder<'_>,
    logits: NodeId,
    labels: NodeId,
) -> Result<NodeId, GraphError> {
    let each = b.op(Op::SoftmaxCrossEntropy, &[logits, labels])?;
    b.op(Op::Mean, &[each])
}
