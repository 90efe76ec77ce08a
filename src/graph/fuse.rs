//! Fusion during lowering: neighbours that one kernel can compute in one pass become one operation.

use super::{Graph, NodeId, Op};

/// What lowering fuses: what the device that will run the program has kernels for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fusions {
    /// Products and convolutions with bias and relu, scaled sums.
    #[default]
    Forward,
    /// These, and the gradients of relu and bias with the passes beside them.
    Backward,
}

/// One node as it will be executed; `None` when it was swallowed by another or is not needed.
pub(super) type Plan = Vec<Option<(Op, Vec<NodeId>)>>;

/// Rewrites the plan in place. `uses` counts the readers of every node; a node that is also `kept` (fetched,
/// or a gradient) must exist as itself. Returns the nodes that note winners, each with the node that stands for these.
pub(super) fn fuse(
    graph: &Graph,
    plan: &mut Plan,
    mut uses: Vec<usize>,
    kept: &[bool],
    fusions: Fusions,
) -> Vec<(NodeId, NodeId)> {
    for (id, _) in graph.nodes() {
        let Some((op, inputs)) = plan[id.0].clone() else { continue };
        let single = |id: NodeId| uses[id.0] == 1 && !kept[id.0];
        let mut fused = forward(plan, &op, &inputs, single);
        if fusions >= Fusions::Backward {
            fused = fused.or_else(|| backward(plan, &op, &inputs, single));
        }
        if let Some(fused) = fused {
            fused.1.iter().for_each(|input| uses[input.0] += 1);
            plan[id.0] = Some(fused);
            release(plan, &mut uses, kept, &inputs);
        }
    }
    let mut pools = Vec::new();
    for (id, _) in graph.nodes().filter(|_| fusions >= Fusions::Backward) {
        pools.extend(below_pool(plan, id, &uses, kept));
    }
    pools
}

/// The gradient of what is below a pool, of which only the maxima are used, needs to know where they were, not what else there
/// was: a convolution or a normalisation and the pool become one, and so do the pool's gradient and the one below.
fn below_pool(
    plan: &mut Plan,
    id: NodeId,
    uses: &[usize],
    kept: &[bool],
) -> Option<(NodeId, NodeId)> {
    let (grad, inputs) = plan[id.0].as_ref()?;
    let &[x, spread] = &inputs[..] else { return None };
    let (spread_op, operands) = plan[spread.0].as_ref()?;
    let &[below, maxima, dy] = &operands[..] else { return None };
    let (below_op, operands) = plan[below.0].as_ref()?;
    let (forward, backward, pool) = match (grad, spread_op, below_op) {
        (
            Op::Conv2dFilterGrad(window),
            Op::MaxPoolReluGrad(pool),
            Op::Conv2dBias { window: own, relu: true },
        ) if own == window => {
            let (window, pool) = (*window, *pool);
            (Op::Conv2dPool { window, pool }, Op::Conv2dPoolFilterGrad { window, pool }, pool)
        }
        (Op::LrnReluGrad(params), Op::MaxPoolGrad(pool), Op::Lrn(own))
            if own == params && operands[0] == x =>
        {
            let (lrn, pool) = (*params, *pool);
            (Op::LrnPool { lrn, pool }, Op::LrnPoolGrad { lrn, pool }, pool)
        }
        _ => return None,
    };
    let only = |id: NodeId, readers| uses[id.0] == readers && !kept[id.0];
    let read =
        matches!(&plan[maxima.0], Some((Op::MaxPool(w), of)) if *w == pool && of[0] == below);
    let told_apart = pool.kernel[0] * pool.kernel[1] <= 256;
    // What is below is read by the pool and its gradient alone.
    if !(read && told_apart && only(spread, 1) && only(below, 2)) {
        return None;
    }
    plan[maxima.0] = Some((forward, operands.clone()));
    plan[id.0] = Some((backward, vec![x, below, maxima, dy]));
    plan[spread.0] = None;
    plan[below.0] = None;
    Some((maxima, below))
}

/// Takes one reader from each of `nodes`; what has no reader then is not computed.
fn release(plan: &mut Plan, uses: &mut [usize], kept: &[bool], nodes: &[NodeId]) {
    for node in nodes {
        uses[node.0] -= 1;
        if uses[node.0] == 0
            && !kept[node.0]
            && let Some((_, inputs)) = plan[node.0].take()
        {
            release(plan, uses, kept, &inputs);
        }
    }
}

type Fused = Option<(Op, Vec<NodeId>)>;

fn forward(plan: &Plan, op: &Op, inputs: &[NodeId], single: impl Fn(NodeId) -> bool) -> Fused {
    let made = |id: NodeId| plan[id.0].as_ref().filter(|_| single(id));
    match op {
        Op::BiasAdd => match made(inputs[0])? {
            (Op::Conv2d(window), operands) => Some((
                Op::Conv2dBias { window: *window, relu: false },
                vec![operands[0], operands[1], inputs[1]],
            )),
            (Op::MatMul { transpose_a: false, transpose_b: false }, operands) => {
                let operands = vec![operands[0], operands[1], inputs[1]];
                Some((Op::MatMulBias { relu: false }, operands))
            }
            _ => None,
        },
        Op::Relu => match made(inputs[0])? {
            (Op::Conv2dBias { window, relu: false }, operands) => {
                Some((Op::Conv2dBias { window: *window, relu: true }, operands.clone()))
            }
            (Op::MatMulBias { relu: false }, operands) => {
                Some((Op::MatMulBias { relu: true }, operands.clone()))
            }
            _ => None,
        },
        Op::Add => [(0, 1), (1, 0)].into_iter().find_map(|(a, x)| match made(inputs[x])? {
            (Op::Scale(factor), operands) => {
                Some((Op::AddScaled(*factor), vec![inputs[a], operands[0]]))
            }
            _ => None,
        }),
        _ => None,
    }
}

/// Where `y` is positive can be asked before the gradient is spread over the windows of a maximum as well as after: the maximum
/// is what its gradient's receiver is. So the relu below a pool costs nothing, and a sum over all positions needs the small
/// gradient only.
fn backward(plan: &Plan, op: &Op, inputs: &[NodeId], single: impl Fn(NodeId) -> bool) -> Fused {
    let (of, operands) = plan[inputs.first()?.0].as_ref()?;
    match (op, of) {
        (Op::ReluGrad, Op::MaxPoolGrad(window))
            if single(inputs[0]) && operands[0] == inputs[1] =>
        {
            Some((Op::MaxPoolReluGrad(*window), operands.clone()))
        }
        (Op::ReluGrad, Op::LrnGrad(params)) if single(inputs[0]) && operands[0] == inputs[1] => {
            Some((Op::LrnReluGrad(*params), operands.clone()))
        }
        (Op::BiasAddGrad, Op::MaxPoolReluGrad(_)) => {
            Some((Op::BiasReluGrad, vec![operands[2], operands[1]]))
        }
        _ => None,
    }
}
