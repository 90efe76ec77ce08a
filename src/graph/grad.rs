//! Reverse-mode differentiation: a graph in, a longer graph out.

use super::{Graph, GraphError, Node, NodeId, Op};
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
            // What flows through the moments of a batch normalisation is in its gradient by the input.
            let moments = matches!(graph.node(NodeId(i)).op, Op::BatchNorm { .. }) && slot == 1;
            if !depends[input.0] || moments {
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
        (&Op::BatchNorm { epsilon }, _) => {
            let of = [input(0), input(1), dy];
            let sums = once(graph, node, Op::BatchNormSums { epsilon }, &of)?;
            let len = shape.last_dim();
            match slot {
                0 => {
                    let inputs = vec![input(0), input(1), input(2), dy, sums];
                    (Op::BatchNormInputGrad { epsilon }, inputs)
                }
                2 => (Op::Slice { start: 0, len }, vec![sums]),
                _ => (Op::Slice { start: len, len }, vec![sums]),
            }
        }
        (Op::BiasAdd, 1) => (Op::BiasAddGrad, vec![dy]),
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

/// As [`append`], but for a node that is there already, which is returned.
fn once(
    graph: &mut Graph,
    forward: NodeId,
    op: Op,
    inputs: &[NodeId],
) -> Result<NodeId, GraphError> {
    let same = |node: &Node| node.op == op && node.inputs == inputs;
    let known = graph.nodes().rev().take_while(|(id, _)| *id > forward).find(|(_, n)| same(n));
    match known.map(|(id, _)| id) {
        Some(id) => Ok(id),
        None => append(graph, forward, op, inputs),
    }
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
