//! Operations through graph, gradient, lowering and any device: one case each, TensorFlow's recorded values, and a table for
//! comparisons.

use serde_json::Value;
use tftrain::device::{Device, Executable, Feeds, Slab};
use tftrain::graph::{
    Builder, Fusions, Graph, GraphError, Init, LrnParams, NodeId, Op, Padding, Program, Window,
    gradients,
};
use tftrain::tensor::Shape;

use super::{assert_digest, extents, golden, wave};

/// `sum(op(inputs) * upstream)` with its gradient by every input, bound to a device.
pub(crate) struct Case {
    pub(crate) program: Box<dyn Executable>,
    variables: Slab,
    gradients: Slab,
    upstream: Vec<f32>,
    labels: Vec<f32>,
}

pub(crate) type Build<'a> =
    dyn Fn(&mut Builder<'_>, &[NodeId], NodeId) -> Result<NodeId, GraphError> + 'a;

impl Case {
    /// Input `i` is `wave(shape, 10 + i)`, the upstream gradient `wave(output, 50)`.
    pub(crate) fn new(
        device: &dyn Device,
        shapes: &[Vec<usize>],
        labels: &[f32],
        build: &Build<'_>,
    ) -> Self {
        Self::lowered(device, device.fusions(), shapes, labels, build)
    }

    /// The same, fused otherwise than the device asks for.
    pub(crate) fn lowered(
        device: &dyn Device,
        fusions: Fusions,
        shapes: &[Vec<usize>],
        labels: &[f32],
        build: &Build<'_>,
    ) -> Self {
        let mut graph = Graph::default();
        let mut b = Builder::new(&mut graph);
        let label_node = b.placeholder("labels", [labels.len()].into()).unwrap();
        let inputs: Vec<NodeId> = shapes
            .iter()
            .enumerate()
            .map(|(i, s)| b.variable(&format!("x{i}"), s.clone(), Init::Constant(0.0)).unwrap())
            .collect();
        let out = build(&mut b, &inputs, label_node).unwrap();
        let shape = b.shape(out).clone();
        let upstream = wave(shape.elements(), 50, 1.0);
        let up = b.placeholder("upstream", shape).unwrap();
        let product = b.op(Op::Mul, &[out, up]).unwrap();
        let loss = b.op(Op::Sum, &[product]).unwrap();
        let grads = gradients(&mut graph, loss, &inputs).unwrap();
        let program = Program::lower(&graph, &[out], &grads, fusions);
        let len = graph.table().slab_len();
        let mut variables = device.alloc(len).unwrap();
        for (i, row) in graph.table().rows().iter().enumerate() {
            let values = wave(row.shape.elements(), 10 + i as u64, 1.0);
            variables.write(row.range(), &values).unwrap();
        }
        let gradients = device.alloc(len).unwrap();
        let program = device.load(program).unwrap();
        Self { program, variables, gradients, upstream, labels: labels.to_vec() }
    }

    /// Runs and returns the output.
    pub(crate) fn run(&mut self) -> Vec<f32> {
        let feeds: [&[f32]; 2] = [&self.labels, &self.upstream];
        self.program
            .run(&self.variables, Feeds::only(&feeds), Some(&mut self.gradients), &mut |_, _| ())
            .unwrap();
        let mut out = vec![0.0; self.upstream.len()];
        self.program.fetch(0, &mut out).unwrap();
        out
    }

    pub(crate) fn gradient(&self, input: usize) -> Vec<f32> {
        let range = self.program.program().table.rows()[input].range();
        let mut values = vec![0.0; range.len()];
        self.gradients.read(range, &mut values).unwrap();
        values
    }

    fn loss(&mut self) -> f64 {
        let out = self.run();
        out.iter().zip(&self.upstream).map(|(o, u)| f64::from(*o) * f64::from(*u)).sum()
    }

    /// The gradient along a direction, against a central difference.
    pub(crate) fn assert_derivative(&mut self, what: &str, input: usize) {
        let range = self.program.program().table.rows()[input].range();
        let mut at = vec![0.0; range.len()];
        self.variables.read(range.clone(), &mut at).unwrap();
        let direction = wave(at.len(), 90, 1.0);
        self.run();
        let gradient = self.gradient(input);
        let along = gradient.iter().zip(&direction);
        let expected: f64 = along.map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
        let step = 1e-3;
        let mut moved = |by: f32| {
            let values: Vec<f32> = at.iter().zip(&direction).map(|(x, d)| x + by * d).collect();
            self.variables.write(range.clone(), &values).unwrap();
            self.loss()
        };
        let difference = (moved(step) - moved(-step)) / (2.0 * f64::from(step));
        self.variables.write(range, &at).unwrap();
        let scale = expected.abs().max(1.0);
        let error = (difference - expected).abs() / scale;
        assert!(
            error < 5e-3,
            "{what}, input {input}: {expected} by gradient, {difference} by difference"
        );
    }
}

pub(crate) const LRN: LrnParams =
    LrnParams { radius: 4, bias: 1.0, alpha: 0.001 / 9.0, beta: 0.75 };

pub(crate) fn window(input: &[usize], kernel: &[usize], stride: usize, padding: Padding) -> Window {
    let (input, kernel) = ([input[1], input[2]], [kernel[0], kernel[1]]);
    Window::new(input, kernel, [stride, stride], padding).unwrap()
}

/// The operation of a recorded case.
fn recorded(case: &Value, shapes: &[Vec<usize>]) -> Option<Op> {
    let attrs = &case["attrs"];
    let slide = |kernel: &[usize]| {
        let padding = match attrs["padding"].as_str().unwrap() {
            "SAME" => Padding::Same,
            _ => Padding::Valid,
        };
        window(&shapes[0], kernel, attrs["stride"].as_u64().unwrap() as usize, padding)
    };
    Some(match case["op"].as_str().unwrap() {
        "conv2d" => Op::Conv2d(slide(&shapes[1])),
        "depthwise_conv2d" => Op::DepthwiseConv2d(slide(&shapes[1])),
        "max_pool" => Op::MaxPool(slide(&extents(&attrs["ksize"]))),
        "avg_pool" => Op::AvgPool(slide(&extents(&attrs["ksize"]))),
        "lrn" => Op::Lrn(LRN),
        "batch_norm_training" => Op::BatchNorm { epsilon: 1e-5 },
        "global_avg_pool" => Op::AvgPool(window(&shapes[0], &shapes[0][1..3], 1, Padding::Valid)),
        "matmul" => Op::MatMul { transpose_a: false, transpose_b: false },
        "concat" => Op::Concat,
        "softmax_cross_entropy" => Op::SoftmaxCrossEntropy,
        _ => return None,
    })
}

/// Demands TensorFlow's recorded values and gradients of a device, for the operations that `wanted` accepts.
pub(crate) fn agrees_with_tensorflow(
    device: &dyn Device,
    on: &str,
    tolerance: f64,
    wanted: impl Fn(&str) -> bool,
) {
    let golden = golden("ops.json");
    let cases = golden.as_array().unwrap();
    assert_eq!(cases.len(), 54);
    for case in cases.iter().filter(|case| wanted(case["op"].as_str().unwrap())) {
        let op = &case["op"];
        let name = format!("{op} {} {} on {on}", case["attrs"], case["inputs"]);
        let shapes: Vec<Vec<usize>> =
            case["inputs"].as_array().unwrap().iter().map(extents).collect();
        let op = recorded(case, &shapes).unwrap_or_else(|| panic!("no operation for {name}"));
        let labels: Vec<f32> = match case["attrs"]["labels"].as_array() {
            Some(labels) => labels.iter().map(|l| l.as_f64().unwrap() as f32).collect(),
            None => Vec::new(),
        };
        let out_shape = Shape::from(extents(&case["output_shape"]));
        let build = |b: &mut Builder<'_>, inputs: &[NodeId], labels: NodeId| {
            let mut operands = inputs.to_vec();
            if op == Op::SoftmaxCrossEntropy {
                operands.push(labels);
            }
            let out = apply(b, &op, &operands)?;
            if *b.shape(out) == out_shape {
                return Ok(out);
            }
            b.op(Op::Reshape(out_shape.clone()), &[out])
        };
        let mut case_run = Case::new(device, &shapes, &labels, &build);
        assert_digest(&name, &case_run.run(), &case["output"], tolerance);
        for (i, digest) in case["input_gradients"].as_array().unwrap().iter().enumerate() {
            let gradient = case_run.gradient(i);
            assert_digest(&format!("{name}, gradient {i}"), &gradient, digest, 2.0 * tolerance);
        }
    }
}

/// The operation over these inputs; batch normalisation, by the moments of its first.
pub(crate) fn apply(b: &mut Builder<'_>, op: &Op, inputs: &[NodeId]) -> Result<NodeId, GraphError> {
    match op {
        Op::BatchNorm { .. } => {
            let moments = b.op(Op::Moments, &inputs[..1])?;
            b.op(op.clone(), &[inputs[0], moments, inputs[1], inputs[2]])
        }
        _ => b.op(op.clone(), inputs),
    }
}

/// One differentiable operation over inputs of the given shapes.
pub(crate) fn differentiable() -> Vec<(Op, Vec<Vec<usize>>)> {
    let picture = vec![2, 7, 6, 5];
    let slide = |kernel: [usize; 2], stride| window(&picture, &kernel, stride, Padding::Same);
    vec![
        (Op::MatMul { transpose_a: false, transpose_b: false }, vec![vec![5, 7], vec![7, 3]]),
        (Op::Conv2d(slide([3, 2], 2)), vec![picture.clone(), vec![3, 2, 5, 4]]),
        (Op::DepthwiseConv2d(slide([3, 3], 1)), vec![picture.clone(), vec![3, 3, 5, 2]]),
        (Op::MaxPool(slide([3, 3], 2)), vec![picture.clone()]),
        (Op::AvgPool(slide([2, 3], 2)), vec![picture.clone()]),
        (Op::Lrn(LrnParams { radius: 2, bias: 2.0, alpha: 0.3, beta: 0.6 }), vec![picture.clone()]),
        (Op::BatchNorm { epsilon: 1e-3 }, vec![picture.clone(), vec![5], vec![5]]),
        (Op::BiasAdd, vec![picture.clone(), vec![5]]),
        (Op::Relu, vec![picture.clone()]),
        (Op::Add, vec![vec![4, 3], vec![4, 3]]),
        (Op::Sub, vec![vec![4, 3], vec![4, 3]]),
        (Op::Mul, vec![vec![4, 3], vec![4, 3]]),
        (Op::Scale(-2.5), vec![vec![9]]),
        (Op::Square, vec![vec![9]]),
        (Op::L2Loss, vec![vec![6, 5]]),
        (Op::Mean, vec![vec![6, 5]]),
        (Op::Sum, vec![vec![6, 5]]),
        (Op::Broadcast([3, 4].into()), vec![vec![]]),
        (Op::Reshape([2, 15].into()), vec![vec![6, 5]]),
        (Op::Concat, vec![vec![3, 2, 4], vec![3, 2, 1]]),
    ]
}
