//! Every operation, through graph, gradient, lowering and device: against TensorFlow's recorded values, and its gradient
//! against finite differences. (The kernels alone are compared to naive loops in `tests/kernels`.)

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use serde_json::Value;
use support::{assert_digest, extents, golden, wave};
use tftrain::device::cpu::{ConvAlgorithm, CpuDevice, Isa};
use tftrain::device::{Device, Executable, Slab};
use tftrain::graph::{
    Builder, Graph, GraphError, Init, LrnParams, NodeId, Op, Padding, Program, Window, gradients,
};
use tftrain::tensor::Shape;

/// `sum(op(inputs) * upstream)` with its gradient by every input, bound to a device.
struct Case {
    program: Box<dyn Executable>,
    variables: Slab,
    gradients: Slab,
    upstream: Vec<f32>,
    labels: Vec<f32>,
}

type Build<'a> = dyn Fn(&mut Builder<'_>, &[NodeId], NodeId) -> Result<NodeId, GraphError> + 'a;

impl Case {
    /// Input `i` is `wave(shape, 10 + i)`, the upstream gradient `wave(output, 50)`.
    fn new(device: &dyn Device, shapes: &[Vec<usize>], labels: &[f32], build: &Build<'_>) -> Self {
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
        let program = Program::lower(&graph, &[out], &grads);
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
    fn run(&mut self) -> Vec<f32> {
        let feeds: [&[f32]; 2] = [&self.labels, &self.upstream];
        self.program
            .run(&self.variables, &feeds, Some(&mut self.gradients), &mut |_, _| ())
            .unwrap();
        let mut out = vec![0.0; self.upstream.len()];
        self.program.fetch(0, &mut out).unwrap();
        out
    }

    fn gradient(&self, input: usize) -> &[f32] {
        let range = self.program.program().table.rows()[input].range();
        &self.gradients.as_host().unwrap()[range]
    }

    fn loss(&mut self) -> f64 {
        let out = self.run();
        out.iter().zip(&self.upstream).map(|(o, u)| f64::from(*o) * f64::from(*u)).sum()
    }

    /// The gradient along a direction, against a central difference.
    fn assert_derivative(&mut self, what: &str, input: usize) {
        let range = self.program.program().table.rows()[input].range();
        let at: Vec<f32> = self.variables.as_host().unwrap()[range.clone()].to_vec();
        let direction = wave(at.len(), 90, 1.0);
        self.run();
        let along = self.gradient(input).iter().zip(&direction);
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

fn device(isa: Isa) -> CpuDevice {
    CpuDevice::with_isa(0, 2, isa).unwrap()
}

const LRN: LrnParams = LrnParams { radius: 4, bias: 1.0, alpha: 0.001 / 9.0, beta: 0.75 };

fn window(input: &[usize], kernel: &[usize], stride: usize, padding: Padding) -> Window {
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

#[test]
fn agrees_with_tensorflow() {
    let golden = golden("ops.json");
    let cases = golden.as_array().unwrap();
    assert_eq!(cases.len(), 54);
    let ways = [ConvAlgorithm::Auto, ConvAlgorithm::Winograd];
    for (isa, way) in Isa::available().into_iter().flat_map(|isa| ways.map(|way| (isa, way))) {
        let device = device(isa).with_conv(way);
        for case in cases {
            let op = &case["op"];
            if way != ConvAlgorithm::Auto && op != "conv2d" {
                continue;
            }
            let name = format!("{op} {} {} on {isa}, {way:?}", case["attrs"], case["inputs"]);
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
                let out = b.op(op.clone(), &operands)?;
                if *b.shape(out) == out_shape {
                    return Ok(out);
                }
                b.op(Op::Reshape(out_shape.clone()), &[out])
            };
            let mut case_run = Case::new(&device, &shapes, &labels, &build);
            assert_digest(&name, &case_run.run(), &case["output"], 1e-5);
            for (i, digest) in case["input_gradients"].as_array().unwrap().iter().enumerate() {
                assert_digest(&format!("{name}, gradient {i}"), case_run.gradient(i), digest, 2e-5);
            }
        }
    }
}

/// One differentiable operation over inputs of the given shapes.
fn differentiable() -> Vec<(Op, Vec<Vec<usize>>)> {
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

#[test]
fn gradients_agree_with_finite_differences() {
    let device = device(Isa::detect());
    for (op, shapes) in differentiable() {
        // A scaled copy in front, so that no fetched value is a variable itself.
        let build = |b: &mut Builder<'_>, inputs: &[NodeId], _| {
            let copies: Result<Vec<NodeId>, _> =
                inputs.iter().map(|&i| b.op(Op::Scale(1.0), &[i])).collect();
            b.op(op.clone(), &copies?)
        };
        let mut case = Case::new(&device, &shapes, &[], &build);
        for input in 0..shapes.len() {
            case.assert_derivative(op.name(), input);
        }
    }
}

#[test]
fn cross_entropy_agrees_with_finite_differences() {
    let build = |b: &mut Builder<'_>, inputs: &[NodeId], labels: NodeId| {
        b.op(Op::SoftmaxCrossEntropy, &[inputs[0], labels])
    };
    let labels = [3.0, 0.0, 6.0, 6.0];
    let mut case = Case::new(&device(Isa::detect()), &[vec![4, 7]], &labels, &build);
    case.assert_derivative("SoftmaxCrossEntropy", 0);
}

/// Fused steps must give the bits of their parts.
#[test]
fn fusion_changes_nothing() {
    let slide = window(&[2, 7, 6, 5], &[3, 3], 1, Padding::Same);
    let picture = vec![vec![2, 7, 6, 5], vec![3, 3, 5, 4], vec![4]];
    let matrix = vec![vec![5, 7], vec![7, 3], vec![3]];
    let product = Op::MatMul { transpose_a: false, transpose_b: false };
    let device = device(Isa::detect());
    for (op, shapes) in [(Op::Conv2d(slide), picture), (product, matrix)] {
        let chain = |keep: bool| {
            let op = op.clone();
            move |b: &mut Builder<'_>, inputs: &[NodeId], _: NodeId| {
                let product = b.op(op.clone(), &inputs[..2])?;
                let sum = b.bias_add(product, inputs[2])?;
                let out = b.relu(sum)?;
                if !keep {
                    return Ok(out);
                }
                // A second reader of the sum, which adds nothing, keeps the parts apart.
                let nothing = b.op(Op::Scale(0.0), &[sum])?;
                b.op(Op::Add, &[out, nothing])
            }
        };
        let (fused, apart) = (chain(false), chain(true));
        let mut fused = Case::new(&device, &shapes, &[], &fused);
        let mut apart = Case::new(&device, &shapes, &[], &apart);
        let steps = |case: &Case| -> Vec<&str> {
            case.program.program().steps.iter().map(|step| step.op.name()).collect()
        };
        // Op::Conv2dBias and Op::MatMulBias with their relu.
        assert!(steps(&fused).iter().any(|name| name.starts_with("Fused")), "{:?}", steps(&fused));
        assert!(steps(&apart).contains(&"Relu"), "{:?}", steps(&apart));
        assert_eq!(fused.run(), apart.run());
    }
}

/// Op::AddScaled: the sum of a gradient and a weight decay.
#[test]
fn scaled_sums_are_one_step() {
    let build = |b: &mut Builder<'_>, inputs: &[NodeId], _| {
        let scaled = b.op(Op::Scale(0.25), &[inputs[1]])?;
        b.op(Op::Add, &[inputs[0], scaled])
    };
    let mut case = Case::new(&device(Isa::detect()), &[vec![40], vec![40]], &[], &build);
    let names: Vec<&str> = case.program.program().steps.iter().map(|s| s.op.name()).collect();
    assert!(names.contains(&"AddScaled") && !names.contains(&"Add"), "{names:?}");
    let (a, x) = (wave(40, 10, 1.0), wave(40, 11, 1.0));
    let expected: Vec<f32> = a.iter().zip(&x).map(|(a, x)| a + 0.25 * x).collect();
    assert_eq!(case.run(), expected);
}

/// Gradient operations are reached through the forward ones above: Op::Conv2dInputGrad, Op::Conv2dFilterGrad,
/// Op::DepthwiseConv2dInputGrad, Op::DepthwiseConv2dFilterGrad, Op::MaxPoolGrad, Op::AvgPoolGrad, Op::LrnGrad,
/// Op::BatchNormInputGrad, Op::BatchNormScaleGrad, Op::BiasAddGrad, Op::ReluGrad, Op::SoftmaxCrossEntropyGrad,
/// Op::Slice, Op::Fill; Op::Placeholder and Op::Variable are every case's inputs.
#[test]
fn errors_name_the_node() {
    let mut graph = Graph::default();
    let mut b = Builder::new(&mut graph);
    let x = b.variable("x", [4, 3], Init::Constant(0.0)).unwrap();
    let y = b.variable("y", [4, 3], Init::Constant(0.0)).unwrap();
    let error = b.scope("local3", |b| b.matmul(x, y)).unwrap_err();
    assert_eq!(error.to_string(), "node local3/MatMul (MatMul): columns of a is 3, rows of b 4");
    let error = b.variable("x", [1], Init::Constant(0.0)).unwrap_err();
    assert_eq!(error.to_string(), "variable x exists already");
    let error = gradients(&mut graph, x, &[x]).unwrap_err();
    assert_eq!(error.to_string(), "node x cannot be a loss: its shape is [4, 3], not a scalar");
}
