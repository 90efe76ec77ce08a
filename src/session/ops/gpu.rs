//! What GPUs do for operations: [`support`] says it for placement, [`on_gpu`] makes kernels.
//!
//! Tensors lie in the host's memory. A kernel of a GPU copies its operands there and its results back; what computes nothing may be placed
//! there, and works where the tensors are.
//!
//! # Add a kernel
//! A row in `COMPUTED`: how the operation is a [`Formula`], for the shapes of a call. Where it is none, the host computes.

use std::sync::Arc;

use super::broadcast::{self, extents};
use super::math::Shrink;
use super::picture::{Slide, four, lrn_channels, lrn_params, pair, pooled};
use super::{Kernel, OWN};
use crate::graph::{Op, Padding, Window};
use crate::session::gpu::{Formula, Gpu};
use crate::session::proto::attr_value::Value as Attr;
use crate::session::{Call, DType, Node, OpError, Tensor};
use crate::tensor::Shape;

/// What a GPU is to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::session) enum Support {
    /// It has no kernel.
    None,
    /// It has one that works in the host's memory.
    Host,
    /// It computes.
    Device,
}

impl Support {
    /// For nodes that must be on one device.
    pub(in crate::session) fn and(self, other: Self) -> Self {
        if self.min(other) == Self::None { Self::None } else { self.max(other) }
    }
}

/// Operations that keep, move or describe tensors, make such to begin with, or update variables.
const HOST: &[&str] = &[
    "NoOp",
    "ControlTrigger",
    "Placeholder",
    "PlaceholderV2",
    "PlaceholderWithDefault",
    "Identity",
    "IdentityN",
    "Snapshot",
    "StopGradient",
    "PreventGradient",
    "GuaranteeConst",
    "DeepCopy",
    "EnsureShape",
    "Cast",
    // Shapes.
    "Shape",
    "ShapeN",
    "Size",
    "Rank",
    "VariableShape",
    "BroadcastArgs",
    "BroadcastGradientArgs",
    "ConcatOffset",
    "Reshape",
    "ExpandDims",
    "Squeeze",
    // Parts.
    "BroadcastTo",
    "Concat",
    "ConcatV2",
    "DynamicStitch",
    "ParallelDynamicStitch",
    "Gather",
    "GatherV2",
    "ResourceGather",
    "Pack",
    "Pad",
    "PadV2",
    "ReverseV2",
    "Slice",
    "Split",
    "SplitV",
    "StridedSlice",
    "StridedSliceGrad",
    "Tile",
    "Transpose",
    "Unpack",
    // Values to begin with.
    "Fill",
    "OnesLike",
    "ZerosLike",
    "RandomStandardNormal",
    "RandomUniform",
    "TruncatedNormal",
    // Variables.
    "Variable",
    "VariableV2",
    "TemporaryVariable",
    "VarHandleOp",
    "IsVariableInitialized",
    "VarIsInitializedOp",
    "DestroyResourceOp",
    "ReadVariableOp",
    "Assign",
    "AssignAdd",
    "AssignSub",
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "ScatterAdd",
    "ScatterSub",
    "ScatterUpdate",
    "ResourceScatterAdd",
    "ResourceScatterSub",
    "ResourceScatterUpdate",
    "ApplyAdagrad",
    "ApplyAdagradV2",
    "ApplyAdam",
    "ApplyGradientDescent",
    "ApplyMomentum",
    "ApplyRMSProp",
    "ResourceApplyAdagrad",
    "ResourceApplyAdagradV2",
    "ResourceApplyAdam",
    "ResourceApplyGradientDescent",
    "ResourceApplyMomentum",
    "ResourceApplyRMSProp",
];

/// How a call is a calculation of the trainer's; none for shapes for which it is not, or that are wrong.
type Lower = Box<dyn Fn(&Call<'_>) -> Option<Work> + Send + Sync>;

/// How that is made from a node.
type Build = fn(&Node<'_>) -> Result<Lower, OpError>;

/// Operations that are computed on GPUs, for floats.
const COMPUTED: &[(&str, Build)] = &[
    ("Add", |_| elementwise(Op::Add)),
    ("AddN", add_n),
    ("AddV2", |_| elementwise(Op::Add)),
    ("AvgPool", |node| pool(node, Op::AvgPool)),
    ("AvgPoolGrad", avg_pool_grad),
    ("BiasAdd", |_| plain(Op::BiasAdd, &[0, 1])),
    ("BiasAddGrad", |_| plain(Op::BiasAddGrad, &[0])),
    ("BiasAddV1", |_| plain(Op::BiasAdd, &[0, 1])),
    ("Conv2D", conv2d),
    ("Conv2DBackpropFilter", conv2d_filter_grad),
    ("Conv2DBackpropInput", conv2d_input_grad),
    ("L2Loss", |_| plain(Op::L2Loss, &[0])),
    ("LRN", lrn),
    ("LRNGrad", lrn_grad),
    ("MatMul", matmul),
    ("MaxPool", |node| pool(node, Op::MaxPool)),
    ("MaxPoolGrad", max_pool_grad),
    ("Mean", reduction),
    ("Mul", |_| elementwise(Op::Mul)),
    ("Neg", |_| plain(Op::Scale(-1.0), &[0])),
    ("Relu", |_| plain(Op::Relu, &[0])),
    ("ReluGrad", |_| plain(Op::ReluGrad, &[0, 1])),
    ("SparseSoftmaxCrossEntropyWithLogits", |_| Ok(Box::new(sparse_cross_entropy))),
    ("Square", |_| plain(Op::Square, &[0])),
    ("Sub", |_| elementwise(Op::Sub)),
    ("Sum", reduction),
];

/// What a GPU is to a node. Whole numbers of 32 bits are shapes and indices, which are the host's wherever they are placed.
pub(in crate::session) fn support(node: &Node<'_>) -> Support {
    let dtype = match node.attr("T") {
        Some(Attr::Type(number)) => DType::from_wire(*number).ok(),
        _ => None,
    };
    let op = node.op();
    match dtype {
        None | Some(DType::F32) if COMPUTED.iter().any(|row| row.0 == op) => Support::Device,
        Some(DType::I32) => Support::Host,
        _ if HOST.contains(&op) || OWN.contains(&op) => Support::Host,
        _ => Support::None,
    }
}

/// The kernel of a node that was placed on a GPU; `host` is the one of the CPU, which answers where the GPU has nothing to compute.
///
/// # Errors
/// Attributes that do not fit.
pub fn on_gpu(node: &Node<'_>, host: Kernel, gpu: &Arc<Gpu>) -> Result<Kernel, OpError> {
    let row = COMPUTED.iter().find(|row| row.0 == node.op());
    let Some((_, build)) = row.filter(|_| support(node) == Support::Device) else {
        return Ok(host);
    };
    let (lower, gpu) = (build(node)?, gpu.clone());
    // The card is waited for, and other steps that are using it.
    Ok(Kernel::blocking(move |call| match lower(call) {
        Some(work) => work.run(&gpu, call),
        None => (host.run)(call),
    }))
}

/// A formula with what is fed to it.
struct Work {
    formula: Formula,
    fed: Vec<Tensor>,
    /// Of the results.
    shapes: Vec<Shape>,
}

impl Work {
    fn new(steps: Vec<(Op, Vec<usize>)>, results: Vec<usize>, fed: Vec<Tensor>) -> Option<Self> {
        let formula = Formula { steps, results };
        let extents: Vec<Shape> = fed.iter().map(|tensor| tensor.shape().clone()).collect();
        let shapes = formula.shapes(&extents)?;
        fed.iter().all(|tensor| tensor.dtype() == DType::F32).then_some(())?;
        Some(Self { formula, fed, shapes })
    }

    /// One operation on all that is fed.
    fn one(op: Op, fed: Vec<Tensor>) -> Option<Self> {
        Self::new(vec![(op, (0..fed.len()).collect())], vec![fed.len()], fed)
    }

    /// This, where its result has the extents that were announced.
    fn giving(self, shape: &[usize]) -> Option<Self> {
        (*self.shapes[0] == *shape).then_some(self)
    }

    fn run(self, gpu: &Gpu, call: &mut Call<'_>) -> Result<(), OpError> {
        let Self { formula, fed, shapes } = self;
        let extents: Vec<Shape> = fed.iter().map(|tensor| tensor.shape().clone()).collect();
        let feeds: Vec<&[f32]> = fed.iter().map(Tensor::slice).collect::<Result<_, _>>()?;
        let mut results: Vec<Vec<f32>> =
            shapes.iter().map(|shape| vec![0.0; shape.elements()]).collect();
        gpu.run(&formula, &extents, &feeds, &mut results)?;
        for (i, (shape, values)) in shapes.into_iter().zip(results).enumerate() {
            call.set(i, Tensor::new(shape, values)?);
        }
        Ok(())
    }
}

/// One operation on these inputs.
fn plain(op: Op, inputs: &'static [usize]) -> Result<Lower, OpError> {
    Ok(Box::new(move |call| {
        let fed: Result<Vec<Tensor>, _> = inputs.iter().map(|&i| call.tensor(i)).collect();
        Work::one(op.clone(), fed.ok()?)
    }))
}

/// One operation on two tensors; where their shapes differ they are stretched first.
fn elementwise(op: Op) -> Result<Lower, OpError> {
    Ok(Box::new(move |call| {
        let (mut a, mut b) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
        if a.shape() != b.shape() {
            let to = broadcast::shape(a.shape(), b.shape()).ok()?;
            for tensor in [&mut a, &mut b] {
                *tensor =
                    Tensor::new(to.clone(), broadcast::stretch::<f32>(tensor, &to).ok()?).ok()?;
            }
        }
        Work::one(op.clone(), vec![a, b])
    }))
}

fn add_n(_: &Node<'_>) -> Result<Lower, OpError> {
    Ok(Box::new(|call| {
        let count = call.inputs();
        let fed: Result<Vec<Tensor>, _> = (0..count).map(|i| call.tensor(i)).collect();
        let sum = |i: usize| (Op::Add, vec![if i == 1 { 0 } else { count + i - 2 }, i]);
        let steps: Vec<_> = (1..count).map(sum).collect();
        // A sum of one is no calculation.
        let last = steps.len().checked_sub(1)?;
        Work::new(steps, vec![count + last], fed.ok()?)
    }))
}

fn matmul(node: &Node<'_>) -> Result<Lower, OpError> {
    let transpose_a = node.bool("transpose_a", false)?;
    let transpose_b = node.bool("transpose_b", false)?;
    plain(Op::MatMul { transpose_a, transpose_b }, &[0, 1])
}

fn conv2d(node: &Node<'_>) -> Result<Lower, OpError> {
    let slide = Slide::of(node)?;
    Ok(Box::new(move |call| {
        let (x, filter) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
        let window = slide.conv(x.shape(), filter.shape()).ok()?.window;
        Work::one(Op::Conv2d(window), vec![x, filter])
    }))
}

fn conv2d_input_grad(node: &Node<'_>) -> Result<Lower, OpError> {
    let slide = Slide::of(node)?;
    Ok(Box::new(move |call| {
        let (filter, dy) = (call.tensor(1).ok()?, call.tensor(2).ok()?);
        let shape = extents(&call.tensor(0).ok()?).ok()?;
        let window = slide.conv(&shape, filter.shape()).ok()?.window;
        Work::one(Op::Conv2dInputGrad(window), vec![dy, filter])?.giving(&shape)
    }))
}

fn conv2d_filter_grad(node: &Node<'_>) -> Result<Lower, OpError> {
    let slide = Slide::of(node)?;
    Ok(Box::new(move |call| {
        let (x, dy) = (call.tensor(0).ok()?, call.tensor(2).ok()?);
        let shape = extents(&call.tensor(1).ok()?).ok()?;
        let window = slide.conv(x.shape(), &shape).ok()?.window;
        Work::one(Op::Conv2dFilterGrad(window), vec![x, dy])?.giving(&shape)
    }))
}

fn pool(node: &Node<'_>, op: fn(Window) -> Op) -> Result<Lower, OpError> {
    let (slide, kernel) = (Slide::of(node)?, pair(node, "ksize")?);
    Ok(Box::new(move |call| {
        let x = call.tensor(0).ok()?;
        let (window, _) = pooled(slide, kernel, four(&x).ok()?).ok()?;
        Work::one(op(window), vec![x])
    }))
}

fn max_pool_grad(node: &Node<'_>) -> Result<Lower, OpError> {
    let (slide, kernel) = (Slide::of(node)?, pair(node, "ksize")?);
    Ok(Box::new(move |call| {
        let (x, y, dy) = (call.tensor(0).ok()?, call.tensor(1).ok()?, call.tensor(2).ok()?);
        let (window, _) = pooled(slide, kernel, four(&x).ok()?).ok()?;
        Work::one(Op::MaxPoolGrad(window), vec![x, y, dy])
    }))
}

fn avg_pool_grad(node: &Node<'_>) -> Result<Lower, OpError> {
    let (slide, kernel) = (Slide::of(node)?, pair(node, "ksize")?);
    Ok(Box::new(move |call| {
        let (shape, dy) = (extents(&call.tensor(0).ok()?).ok()?, call.tensor(1).ok()?);
        let (window, _) = pooled(slide, kernel, shape[..].try_into().ok()?).ok()?;
        Work::one(Op::AvgPoolGrad(window), vec![dy])?.giving(&shape)
    }))
}

fn lrn(node: &Node<'_>) -> Result<Lower, OpError> {
    let params = lrn_params(node)?;
    Ok(Box::new(move |call| {
        let x = call.tensor(0).ok()?;
        lrn_channels(&params, four(&x).ok()?).ok()?;
        Work::one(Op::Lrn(params), vec![x])
    }))
}

fn lrn_grad(node: &Node<'_>) -> Result<Lower, OpError> {
    let params = lrn_params(node)?;
    Ok(Box::new(move |call| {
        let (dy, x) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
        lrn_channels(&params, four(&x).ok()?).ok()?;
        Work::one(Op::LrnGrad(params), vec![x, dy])
    }))
}

/// Sums and means over all axes, over the first ones, the last ones, or some between a first and a last one.
fn reduction(node: &Node<'_>) -> Result<Lower, OpError> {
    let (mean, keep) = (node.op() == "Mean", node.bool("keep_dims", false)?);
    Ok(Box::new(move |call| {
        let x = call.tensor(0).ok()?;
        let shrink = Shrink::new(x.shape(), &call.tensor(1).ok()?, keep).ok()?;
        let average = |n| Window::new([n, 1], [n, 1], [1, 1], Padding::Valid).map(Op::AvgPool);
        // The input as the operation sees it, and what makes a sum a mean, or a mean a sum.
        let (seen, op, factor) = match shrink.runs[..] {
            [(n, true)] => (vec![n], if mean { Op::Mean } else { Op::Sum }, 1.0),
            [(n, true), (c, false)] => {
                (vec![n, c], Op::BiasAddGrad, if mean { 1.0 / n as f32 } else { 1.0 })
            }
            [(m, false), (n, true), ref rest @ ..] if rest.len() < 2 => {
                let channels = rest.first().map_or(1, |kept| kept.0);
                (vec![m, n, 1, channels], average(n)?, if mean { 1.0 } else { n as f32 })
            }
            _ => return None,
        };
        let mut steps = vec![(op, vec![0])];
        if factor != 1.0 {
            steps.push((Op::Scale(factor), vec![1]));
        }
        steps.push((Op::Reshape(shrink.result.into()), vec![steps.len()]));
        let last = steps.len();
        Work::new(steps, vec![last], vec![x.reshaped(seen).ok()?])
    }))
}

/// Loss and gradient of each row; what classes there are is the host's to say.
fn sparse_cross_entropy(call: &Call<'_>) -> Option<Work> {
    /// Whole numbers that floats tell apart.
    const CLASSES: usize = 1 << 24;
    let (logits, labels) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
    let classes = *logits.shape().get(1).filter(|classes| **classes <= CLASSES)?;
    let rows = labels.shape().clone();
    let class = |label: i64| (0..classes as i64).contains(&label).then_some(label as f32);
    let values: Option<Vec<f32>> = labels.integers().ok()?.into_iter().map(class).collect();
    let labels = Tensor::new(rows.clone(), values?).ok()?;
    let mut steps = vec![(Op::SoftmaxCrossEntropy, vec![0, 1])];
    let mut results = vec![2];
    if call.wanted(1) {
        steps.push((Op::Fill(1.0, rows), Vec::new()));
        steps.push((Op::SoftmaxCrossEntropyGrad, vec![3, 0, 1]));
        results.push(4);
    }
    Work::new(steps, results, vec![logits, labels])
}
