//! Fusion during lowering: neighbours that one kernel can compute in one pass become one operation.

use super::{Graph, NodeId, Op};

/// One node as it will be executed; `None` when it was swallowed by another or is not needed.
pub(super) type Plan = Vec<Option<(Op, Vec<NodeId>)>>;

/// Rewrites the plan in place. `uses` counts the readers of every node; a node that is also `kept` (fetched,
/// or a gradient) must exist as itself.
pub(super) fn fuse(graph: &Graph, plan: &mut Plan, uses: &[usize], kept: &[bool]) {
    let single = |id: NodeId| uses[id.0] == 1 && !kept[id.0];
    for (id, _) in graph.nodes() {
        let Some((op, inputs)) = plan[id.0].clone() else { continue };
        let fused = match op {
            Op::BiasAdd if single(inputs[0]) => match &plan[inputs[0].0] {
                Some((Op::Conv2d(window), operands)) => Some((
                    Op::Conv2dBias { window: *window, relu: false },
                    vec![operands[0], operands[1], inputs[1]],
                    inputs[0],
                )),
                Some((Op::MatMul { transpose_a: false, transpose_b: false }, operands)) => Some((
                    Op::MatMulBias { relu: false },
                    vec![operands[0], operands[1], inputs[1]],
                    inputs[0],
                )),
                _ => None,
            },
            Op::Relu if single(inputs[0]) => match plan[inputs[0].0].clone() {
                Some((Op::Conv2dBias { window, relu: false }, operands)) => {
                    Some((Op::Conv2dBias { window, relu: true }, operands, inputs[0]))
                }
                Some((Op::MatMulBias { relu: false }, operands)) => {
                    Some((Op::MatMulBias { relu: true }, operands, inputs[0]))
                }
                _ => None,
            },
            Op::Add => {
                [(inputs[0], inputs[1]), (inputs[1], inputs[0])].into_iter().find_map(|(a, x)| {
                    match &plan[x.0] {
                        Some((Op::Scale(factor), operands)) if single(x) => {
                            Some((Op::AddScaled(*factor), vec![a, operands[0]], x))
                        }
                        _ => None,
                    }
                })
            }
            _ => None,
        };
        if let Some((op, inputs, swallowed)) = fused {
            plan[swallowed.0] = None;
            plan[id.0] = Some((op, inputs));
        }
    }
}
