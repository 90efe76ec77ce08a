//! Reverse-mode differentiation: a graph in, a longer graph out.

use super::{Graph, GraphError, NodeId, Op};
use crate::tensor::Shape;

/// Appends d(`loss`)/d(`wrt`) to the graph and returns those nodes, zeros where the loss does not depend.
///
/// Contributions of several users are added in the order in which the backward walk meets them: last user first.
pub fn gradients(
    graph: &mut Graph,
    loss: NodeId,
    wrt: &[NodeId],
) -> Result<Vec<NodeId>, GraphError> {
    let node = graph.node(loss);
    if !node.shape.is_empty() {
        return Err(GraphError::NotScalar { node: node.name.clone(), shape: node.shape.clone() });
    }
    let mut depends = vec![false; loss.0 + 1];
    wrt.iter().filter(|id| id.0 <= loss.0).for_each(|id| depends[id.0] = true);
    for (id, node) in graph.nodes().take(loss.0 + 1) {
        depends[id.0] |= node.inputs.iter().any(|input| depends[input.0]);
    }

    let mut upstream: Vec<Option<NodeId>> = vec![None; loss.0 + 1];
    let seed = Op::Fill(1.0, Shape::scalar());
    upstream[loss.0] = Some(graph.add("gradients/Const", seed, &[])?);
    for i in (0..=loss.0).rev().filter(|&i| depends[i]) {
        let Some(dy) = upstream[i] else { continue };
        for (slot, input) in graph.node(NodeId(i)).inputs.clone().into_iter().enumerate() {
            if !depends[input.0] {
                continue;
            }
            let part = input_gradient(graph, NodeId(i), slot, dy)?;
            upstream[input.0] = Some(match upstream[input.0] {
                None => part,
                Some(sum) => append(graph, input, Op::Add, &[sum, part])?,
            });
        }
    }
    wrt.iter()
        .map(|&id| match upstream.get(id.0).copied().flatten() {
            Some(gradient) => Ok(gradient),
            None => {
                let shape = graph.node(id).shape.clone();
                append(graph, id, Op::Fill(0.0, shape), &[])
            }
        })
        .collect()
}

/// Appends the part of the gradient that flows from `node`, whose own gradient is `dy`, to operand `slot`.
fn input_gradient(
    graph: &mut Graph,
    node: NodeId,
    slot: usize,
    dy: NodeId,
) -> Result<NodeId, GraphError> {
    let forward = graph.node(node).clone();
    let input = |i: usize| forward.inputs[i];
    let shape = graph.node(input(slot)).shape.clone();
    let (op, inputs) = match (&forward.op, slot) {
        (Op::MatMul { transpose_a: false, transpose_b: false }, 0) => {
            (Op::MatMul { transpose_a: false, transpose_b: true }, vec![dy, input(1)])
        }
        (Op::MatMul { transpose_a: false, transpose_b: false }, _) => {
            (Op::MatMul { transpose_a: true, transpose_b: false }, vec![input(0), dy])
        }
        (Op::Conv2d(w), 0) => (Op::Conv2dInputGrad(*w), vec![dy, input(1)]),
        (Op::Conv2d(w), _) => (Op::Conv2dFilterGrad(*w), vec![input(0), dy]),
        (Op::DepthwiseConv2d(w), 0) => (Op::DepthwiseConv2dInputGrad(*w), vec![dy, input(1)]),
        (Op::DepthwiseConv2d(w), _) => (Op::DepthwiseConv2dFilterGrad(*w), vec![input(0), dy]),
        (Op::MaxPool(w), _) => (Op::MaxPoolGrad(*w), vec![input(0), node, dy]),
        (Op::AvgPool(w), _) => (Op::AvgPoolGrad(*w), vec![dy]),
        (Op::Lrn(p), _) => (Op::LrnGrad(*p), vec![input(0), dy]),
        (&Op::BatchNorm { epsilon }, 0) => {
            (Op::BatchNormInputGrad { epsilon }, vec![input(0), input(1), dy])
        }
        (&Op::BatchNorm { epsilon }, 1) => (Op::BatchNormScaleGrad { epsilon }, vec![input(0), dy]),
        (Op::BatchNorm { .. }, _) | (Op::BiasAdd, 1) => (Op::BiasAddGrad, vec![dy]),
        (Op::BiasAdd | Op::Add, _) | (Op::Sub, 0) => return Ok(dy),
        (Op::Sub, _) => return scaled(graph, node, dy, -1.0),
        (Op::Relu, _) => (Op::ReluGrad, vec![dy, node]),
        (Op::SoftmaxCrossEntropy, 0) => (Op::SoftmaxCrossEntropyGrad, vec![dy, input(0), input(1)]),
        (Op::Mul, 0) => (Op::Mul, vec![dy, input(1)]),
        (Op::Mul, _) if shape == forward.shape => (Op::Mul, vec![dy, input(0)]),
        (Op::Scale(factor), _) => return scaled(graph, node, dy, *factor),
        (Op::Square, _) => {
            let twice = append(graph, node, Op::Scale(2.0), &[input(0)])?;
            (Op::Mul, vec![dy, twice])
        }
        (Op::L2Loss, _) => return times_scalar(graph, node, input(0), dy),
        (Op::Mean, _) => {
            let share = 1.0 / shape.elements() as f32;
            let each = scaled(graph, node, dy, share)?;
            return repeated(graph, node, each, shape);
        }
        (Op::Sum, _) => return repeated(graph, node, dy, shape),
        (Op::Broadcast(_), _) => {
            let sum = append(graph, node, Op::Sum, &[dy])?;
            (Op::Reshape(shape), vec![sum])
        }
        (Op::Reshape(_), _) => (Op::Reshape(shape), vec![dy]),
        (Op::Concat, 0) => (Op::Slice { start: 0, len: shape.last_dim() }, vec![dy]),
        (Op::Concat, _) => {
            let start = graph.node(input(0)).shape.last_dim();
            (Op::Slice { start, len: shape.last_dim() }, vec![dy])
        }
        _ => return Err(GraphError::NoGradient { node: forward.name, op: forward.op.name() }),
    };
    append(graph, node, op, &inputs)
}

/// Appends a node of the backward pass, named after the forward node it belongs to.
fn append(
    graph: &mut Graph,
    forward: NodeId,
    op: Op,
    inputs: &[NodeId],
) -> Result<NodeId, GraphError> {
    let forward = &graph.node(forward).name;
    let scope = forward.rsplit_once('/').map_or(forward.as_str(), |(scope, _)| scope);
    let name = format!("gradients/{scope}/{}", op.name());
    graph.add(&name, op, inputs)
}

/// `factor * x`; a constant stays a constant.
fn scaled(graph: &mut Graph, at: NodeId, x: NodeId, factor: f32) -> Result<NodeId, GraphError> {
    let op = match &graph.node(x).op {
        Op::Fill(value, shape) => Op::Fill(value * factor, shape.clone()),
        _ => return append(graph, at, Op::Scale(factor), &[x]),
    };
    append(graph, at, op, &[])
}

/// `x` times the scalar node `s`.
fn times_scalar(graph: &mut Graph, at: NodeId, x: NodeId, s: NodeId) -> Result<NodeId, GraphError> {
    match graph.node(s).op {
        Op::Fill(value, _) => append(graph, at, Op::Scale(value), &[x]),
        _ => append(graph, at, Op::Mul, &[x, s]),
    }
}

/// The scalar node `s` repeated to a shape; a constant stays a constant.
fn repeated(graph: &mut Graph, at: NodeId, s: NodeId, shape: Shape) -> Result<NodeId, GraphError> {
    match graph.node(s).op {
        Op::Fill(value, _) => append(graph, at, Op::Fill(value, shape), &[]),
        _ => append(graph, at, Op::Broadcast(shape), &[s]),
    }
}
