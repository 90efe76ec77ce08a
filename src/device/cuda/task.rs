//! [`Task`]: what one launch on a GPU computes, and [`Draft`]: a program as a list of them, before it has memory.
//!
//! A program's own plan of memory holds for its own steps. A GPU fuses more of them (each launch and each pass over memory
//! counts), so the draft names values, and `plan.rs` gives them memory of their own.

use crate::graph::{LrnParams, Op, Program, View, Window};
use crate::tensor::Shape;

/// What one launch computes. Operands are in brackets, in order; results after the arrow where there are several.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Task {
    /// A tensor of one value.
    Fill(f32),
    /// `[a, b]`, then a bias or what is added `factor` times.
    Product { transpose_a: bool, transpose_b: bool, bias: bool, relu: bool, plus: Option<f32> },
    /// `[x, filter]`, then a bias.
    Conv { window: Window, bias: bool, relu: bool },
    /// `[dy, filter]`.
    ConvInputGrad(Window),
    /// `[x, dy]`.
    ConvFilterGrad(Window),
    /// `[x]`: rows become columns; all but the last dimension are rows.
    Transpose { rows: usize, columns: usize },
    /// `[x, filter]`.
    Depthwise(Window),
    /// `[dy, filter]`.
    DepthwiseInputGrad(Window),
    /// `[x, dy]`.
    DepthwiseFilterGrad(Window),
    /// `[x]`.
    MaxPool(Window),
    /// `[x, y, dy]`; with `relu` through the relu that gave `x`.
    MaxPoolGrad { window: Window, relu: bool },
    /// `[x]`.
    AvgPool(Window),
    /// `[dy]`.
    AvgPoolGrad(Window),
    /// `[x]`.
    Lrn(LrnParams),
    /// `[x, dy]`; with `relu` through the relu that gave `x`.
    LrnGrad { params: LrnParams, relu: bool },
    /// `[x]`, and with `unbias` also `[moving mean, moving variance] -> [moments, what the two are too large by]`, where the variance is
    /// multiplied by `unbias`.
    Moments { unbias: Option<f32> },
    /// `[x, moments, scale, offset]`.
    BatchNorm(f32),
    /// `[x, moments, dy] -> [both gradients, that by scale, that by offset]`, the last two where asked for.
    BatchNormSums(f32),
    /// `[x, moments, scale, dy, sums]`.
    BatchNormInputGrad(f32),
    /// `[x, bias]`.
    BiasAdd,
    /// `[dy]`: the sum of all rows.
    ColumnSums,
    /// `[x]`.
    Relu,
    /// `[dy, y]`.
    ReluGrad,
    /// `[dy, y] -> [dx, the sum of its rows]`.
    ReluBiasGrad,
    /// `[logits, labels] -> [losses, their mean, the gradient by the logits]`, the last two where asked for, the gradient for this
    /// upstream.
    CrossEntropy { mean: bool, gradient: Option<f32> },
    /// `[upstream, logits, labels]`.
    CrossEntropyGrad,
    /// `[a, b]`.
    Add,
    /// `[a, b]`.
    Sub,
    /// `[a, b]`.
    Mul,
    /// `[x, scalar]`.
    ScaleBy,
    /// `[x]`.
    Scale(f32),
    /// `[x]`.
    Square,
    /// `[x]`: `factor` times the sum of all elements, or of their squares.
    Sum { squares: bool, factor: f32 },
    /// `[scalar]`.
    Broadcast,
    /// `[a, b]`.
    Concat,
    /// `[x]`.
    Slice { start: usize, len: usize },
    /// `[a, x]`: `a + factor * x`.
    AddScaled(f32),
}

impl Task {
    /// The launch of one operation; `first` is its first operand. `None` for what is only another name.
    fn of(op: &Op, inputs: &[(usize, Shape)]) -> Option<Self> {
        let count = inputs.first().map_or(0, |(_, shape)| shape.elements());
        let product = |transpose_a, transpose_b, bias, relu| Task::Product {
            transpose_a,
            transpose_b,
            bias,
            relu,
            plus: None,
        };
        Some(match op {
            Op::Placeholder(_) | Op::Variable { .. } | Op::Reshape(_) => return None,
            Op::Fill(value, _) => Task::Fill(*value),
            &Op::MatMul { transpose_a, transpose_b } => {
                product(transpose_a, transpose_b, false, false)
            }
            &Op::MatMulBias { relu } => product(false, false, true, relu),
            Op::Conv2d(w) => Task::Conv { window: *w, bias: false, relu: false },
            &Op::Conv2dBias { window, relu } => Task::Conv { window, bias: true, relu },
            Op::Conv2dInputGrad(w) => Task::ConvInputGrad(*w),
            Op::Conv2dFilterGrad(w) => Task::ConvFilterGrad(*w),
            Op::DepthwiseConv2d(w) => Task::Depthwise(*w),
            Op::DepthwiseConv2dInputGrad(w) => Task::DepthwiseInputGrad(*w),
            Op::DepthwiseConv2dFilterGrad(w) => Task::DepthwiseFilterGrad(*w),
            Op::MaxPool(w) => Task::MaxPool(*w),
            Op::MaxPoolGrad(w) => Task::MaxPoolGrad { window: *w, relu: false },
            Op::AvgPool(w) => Task::AvgPool(*w),
            Op::AvgPoolGrad(w) => Task::AvgPoolGrad(*w),
            Op::Lrn(params) => Task::Lrn(*params),
            Op::LrnGrad(params) => Task::LrnGrad { params: *params, relu: false },
            Op::Moments => Task::Moments { unbias: None },
            &Op::BatchNorm { epsilon } => Task::BatchNorm(epsilon),
            &Op::BatchNormSums { epsilon } => Task::BatchNormSums(epsilon),
            &Op::BatchNormInputGrad { epsilon } => Task::BatchNormInputGrad(epsilon),
            Op::BiasAdd => Task::BiasAdd,
            Op::BiasAddGrad => Task::ColumnSums,
            Op::Relu => Task::Relu,
            Op::ReluGrad => Task::ReluGrad,
            Op::SoftmaxCrossEntropy => Task::CrossEntropy { mean: false, gradient: None },
            Op::SoftmaxCrossEntropyGrad => Task::CrossEntropyGrad,
            Op::Add => Task::Add,
            Op::Sub => Task::Sub,
            Op::Mul if inputs.get(1).is_some_and(|(_, b)| b.elements() == 1) => Task::ScaleBy,
            Op::Mul => Task::Mul,
            Op::Scale(factor) => Task::Scale(*factor),
            Op::Square => Task::Square,
            Op::L2Loss => Task::Sum { squares: true, factor: 0.5 },
            Op::Mean => Task::Sum { squares: false, factor: 1.0 / count as f32 },
            Op::Sum => Task::Sum { squares: false, factor: 1.0 },
            Op::Broadcast(_) => Task::Broadcast,
            Op::Concat => Task::Concat,
            &Op::Slice { start, len } => Task::Slice { start, len },
            Op::AddScaled(factor) => Task::AddScaled(*factor),
            Op::MaxPoolReluGrad(window) => Task::MaxPoolGrad { window: *window, relu: true },
            Op::LrnReluGrad(params) => Task::LrnGrad { params: *params, relu: true },
            Op::Conv2dPool { .. }
            | Op::Conv2dPoolFilterGrad { .. }
            | Op::LrnPool { .. }
            | Op::LrnPoolGrad { .. }
            | Op::BiasReluGrad => {
                unreachable!("lowering makes these for devices that ask for them, and GPUs do not")
            }
        })
    }
}

/// A task with its operands and results, by their numbers.
#[derive(Clone, Debug)]
pub(super) struct Node {
    /// Of the operation that it computes; the last one where it computes several.
    pub(super) name: String,
    pub(super) task: Task,
    /// With their extents, which may be others than where a value was made.
    pub(super) inputs: Vec<(usize, Shape)>,
    pub(super) outputs: Vec<(usize, Shape)>,
}

/// A value of a draft.
#[derive(Clone, Copy, Debug)]
pub(super) struct Value {
    /// Floats.
    pub(super) len: usize,
    /// Where it must lie; none where any place will do.
    pub(super) home: Option<View>,
}

/// A program as tasks over values, each made once.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    pub(super) nodes: Vec<Node>,
    pub(super) values: Vec<Value>,
    /// What is fetched; `None` for what no step makes.
    pub(super) fetches: Vec<Option<usize>>,
}

impl Draft {
    /// One task per step.
    pub(super) fn of(program: &Program) -> Self {
        let mut draft = Self::default();
        // What lies where, the latest last.
        let mut latest: Vec<(View, usize)> = Vec::new();
        for step in &program.steps {
            let mut inputs = Vec::new();
            for (view, shape) in &step.inputs {
                let value = match find(&latest, view) {
                    Some(value) => value,
                    None => {
                        let value = draft.value(view.len, Some(*view));
                        latest.push((*view, value));
                        value
                    }
                };
                inputs.push((value, shape.clone()));
            }
            let home = (!view_is_free(&step.output)).then_some(step.output);
            let value = draft.value(step.output.len, home);
            latest.push((step.output, value));
            if let Some(task) = Task::of(&step.op, &inputs) {
                let outputs = vec![(value, step.shape.clone())];
                draft.nodes.push(Node { name: step.name.clone(), task, inputs, outputs });
            }
        }
        draft.fetches = program
            .fetches
            .iter()
            .map(|fetch| find(&latest, &fetch.view).filter(|_| view_is_free(&fetch.view)))
            .collect();
        draft
    }

    pub(super) fn value(&mut self, len: usize, home: Option<View>) -> usize {
        self.values.push(Value { len, home });
        self.values.len() - 1
    }

    /// The nodes that read a value.
    pub(super) fn readers(&self, value: usize) -> impl Iterator<Item = usize> {
        let reads = move |node: &Node| node.inputs.iter().any(|(input, _)| *input == value);
        self.nodes.iter().enumerate().filter(move |(_, node)| reads(node)).map(|(i, _)| i)
    }

    /// The node that makes a value.
    pub(super) fn maker(&self, value: usize) -> Option<usize> {
        self.nodes.iter().position(|node| node.outputs.iter().any(|(output, _)| *output == value))
    }

    /// Whether somebody outside the draft sees a value.
    pub(super) fn is_seen(&self, value: usize) -> bool {
        self.values[value].home.is_some() || self.fetches.contains(&Some(value))
    }
}

/// Whether a value may lie elsewhere than where the program has it.
fn view_is_free(view: &View) -> bool {
    view.place == crate::graph::Place::Arena
}

fn find(latest: &[(View, usize)], view: &View) -> Option<usize> {
    latest.iter().rev().find(|(known, _)| known == view).map(|(_, value)| *value)
}
