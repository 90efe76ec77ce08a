//! Every operation, through graph, gradient, lowering and device: against TensorFlow's recorded values, and its gradient
//! against finite differences. (The kernels alone are compared to naive loops in `tests/kernels`.)

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use support::cases::{self, Case, LRN, apply, differentiable, window};
use support::wave;
use tftrain::device::cpu::bf16::Unit;
use tftrain::device::cpu::{ConvAlgorithm, CpuDevice, Isa, Precision};
use tftrain::graph::{Builder, Fusions, Graph, Init, NodeId, Op, Padding, gradients};

fn device(isa: Isa) -> CpuDevice {
    CpuDevice::with_isa(0, 2, isa).unwrap()
}

#[test]
fn agrees_with_tensorflow() {
    let ways = [ConvAlgorithm::Auto, ConvAlgorithm::Winograd];
    for (isa, way) in Isa::available().into_iter().flat_map(|isa| ways.map(|way| (isa, way))) {
        let device = device(isa).with_conv(way);
        let wanted = |op: &str| way == ConvAlgorithm::Auto || op == "conv2d";
        cases::agrees_with_tensorflow(&device, &format!("{isa}, {way:?}"), 1e-5, wanted);
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    let device = device(Isa::detect());
    for (op, shapes) in differentiable() {
        // A scaled copy in front, so that no fetched value is a variable itself.
        let build = |b: &mut Builder<'_>, inputs: &[NodeId], _| {
            let copies: Result<Vec<NodeId>, _> =
                inputs.iter().map(|&i| b.op(Op::Scale(1.0), &[i])).collect();
            apply(b, &op, &copies?)
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

/// A convolution below a relu below what its gradient is fused with: the gradients' bits are those of the parts, but for the
/// bias's below a pool, whose sum runs over fewer terms.
#[test]
fn fused_gradients_are_those_of_their_parts() {
    let shapes = [vec![3, 9, 7, 5], vec![3, 3, 5, 20], vec![20]];
    let slide = window(&shapes[0], &[3, 3], 1, Padding::Same);
    let device = device(Isa::detect());
    let pool = Op::MaxPool(window(&[3, 9, 7, 20], &[3, 3], 2, Padding::Same));
    for (above, names) in
        [(pool, &["FusedMaxPoolGrad", "FusedBiasAddGrad"][..]), (Op::Lrn(LRN), &["FusedLRNGrad"])]
    {
        let build = |b: &mut Builder<'_>, inputs: &[NodeId], _: NodeId| {
            let product = b.op(Op::Conv2d(slide), &inputs[..2])?;
            let sum = b.bias_add(product, inputs[2])?;
            let out = b.relu(sum)?;
            b.op(above.clone(), &[out])
        };
        let lower = |fusions| Case::lowered(&device, fusions, &shapes, &[], &build);
        let (mut fused, mut apart) = (lower(Fusions::Backward), lower(Fusions::Forward));
        let steps: Vec<&str> =
            fused.program.program().steps.iter().map(|step| step.op.name()).collect();
        assert!(names.iter().all(|name| steps.contains(name)), "{steps:?}");
        assert!(!steps.contains(&"ReluGrad"), "{steps:?}");
        assert_eq!(fused.run(), apart.run());
        assert_eq!(fused.gradient(0), apart.gradient(0));
        assert_eq!(fused.gradient(1), apart.gradient(1));
        for (a, b) in fused.gradient(2).iter().zip(&apart.gradient(2)) {
            assert!((a - b).abs() < 1e-5 * b.abs().max(1.0), "{a} {b}");
        }
    }
}

/// Op::Conv2dPool and Op::Conv2dPoolFilterGrad: a convolution of a fed picture of which only the maxima are used, in every way to
/// convolve.
#[test]
fn a_convolution_below_a_pool_is_not_kept() {
    let slide = window(&[3, 9, 7, 5], &[3, 3], 1, Padding::Same);
    let pool = window(&[3, 9, 7, 21], &[3, 3], 2, Padding::Same);
    let shapes = [vec![3, 3, 5, 21], vec![21]];
    let picture = wave(3 * 9 * 7 * 5, 60, 1.0);
    let build = |b: &mut Builder<'_>, inputs: &[NodeId], fed: NodeId| {
        let x = b.op(Op::Reshape([3, 9, 7, 5].into()), &[fed])?;
        let product = b.op(Op::Conv2d(slide), &[x, inputs[0]])?;
        let sum = b.bias_add(product, inputs[1])?;
        let out = b.relu(sum)?;
        b.op(Op::MaxPool(pool), &[out])
    };
    let precisions = Unit::available().iter().map(|unit| Precision::Bf16(*unit));
    for precision in [Precision::F32].into_iter().chain(precisions) {
        for way in [ConvAlgorithm::Direct, ConvAlgorithm::Winograd] {
            let device = device(Isa::detect()).with_conv(way).with_precision(precision);
            let lower = |fusions| Case::lowered(&device, fusions, &shapes, &picture, &build);
            let (mut fused, mut apart) = (lower(Fusions::Backward), lower(Fusions::Forward));
            let steps: Vec<&str> =
                fused.program.program().steps.iter().map(|step| step.op.name()).collect();
            for name in ["FusedConv2DMaxPool", "FusedConv2DMaxPoolBackpropFilter"] {
                assert!(steps.contains(&name), "{steps:?}");
            }
            assert!(!steps.contains(&"FusedMaxPoolGrad"), "{steps:?}");
            assert_eq!(fused.run(), apart.run(), "{precision:?} {way:?}");
            assert_eq!(fused.gradient(0), apart.gradient(0), "{precision:?} {way:?}");
        }
    }
}

/// Op::LrnPool and Op::LrnPoolGrad: a normalisation of a relu's output of which only the maxima are used, with windows that overlap,
/// reach over the border or leave some values out; where something else reads the values too, they stay.
#[test]
fn a_normalisation_below_a_pool_is_not_kept() {
    let shapes = [vec![9, 9, 7, 21]];
    for (kernel, stride) in [(3, 2), (2, 2), (2, 3)] {
        let pool = window(&shapes[0], &[kernel, kernel], stride, Padding::Same);
        let chain = |second: Option<f32>| {
            move |b: &mut Builder<'_>, inputs: &[NodeId], _: NodeId| {
                let out = b.relu(inputs[0])?;
                let normal = b.op(Op::Lrn(LRN), &[out])?;
                let maxima = b.op(Op::MaxPool(pool), &[normal])?;
                let Some(factor) = second else { return Ok(maxima) };
                let other = b.op(Op::Scale(factor), &[normal])?;
                let other = b.op(Op::MaxPool(pool), &[other])?;
                b.op(Op::Add, &[maxima, other])
            }
        };
        for threads in [1, 3] {
            let device = CpuDevice::with_isa(0, threads, Isa::detect()).unwrap();
            let lower = |fusions| Case::lowered(&device, fusions, &shapes, &[], &chain(None));
            let (mut fused, mut apart) = (lower(Fusions::Backward), lower(Fusions::Forward));
            let steps = |case: &Case| -> Vec<&str> {
                case.program.program().steps.iter().map(|step| step.op.name()).collect()
            };
            for name in ["FusedLRNMaxPool", "FusedLRNMaxPoolGrad"] {
                assert!(steps(&fused).contains(&name), "{:?}", steps(&fused));
            }
            assert!(!steps(&fused).contains(&"LRN"), "{:?}", steps(&fused));
            assert_eq!(fused.run(), apart.run(), "{kernel} {stride}");
            assert_eq!(fused.gradient(0), apart.gradient(0), "{kernel} {stride}");
            let both = Case::lowered(&device, Fusions::Backward, &shapes, &[], &chain(Some(0.5)));
            assert!(steps(&both).contains(&"LRN"), "{:?}", steps(&both));
        }
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
/// Op::BatchNormInputGrad, Op::BatchNormSums, Op::BiasAddGrad, Op::ReluGrad, Op::MaxPoolReluGrad, Op::LrnReluGrad, Op::BiasReluGrad, Op::SoftmaxCrossEntropyGrad,
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
