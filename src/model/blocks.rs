//! Layers that several networks share.

use crate::graph::{Builder, GraphError, Init, NodeId, Op, Padding};

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

/// `factor * sum(weights^2) / 2`.
pub(super) fn weight_decay(
    b: &mut Builder<'_>,
    weights: NodeId,
    factor: f32,
) -> Result<NodeId, GraphError> {
    let loss = b.op(Op::L2Loss, &[weights])?;
    b.op(Op::Scale(factor), &[loss])
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
