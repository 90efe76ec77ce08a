//! The shape of each operation's output, and whether its operands fit.

use super::{Op, Window};
use crate::tensor::Shape;

/// The output's shape, or what does not fit.
pub fn infer(op: &Op, inputs: &[&Shape]) -> Result<Shape, String> {
    let arity = arity(op);
    if inputs.len() != arity {
        return Err(format!("takes {arity} operands, got {}", inputs.len()));
    }
    match op {
        Op::Placeholder(shape) | Op::Variable { shape, .. } | Op::Fill(_, shape) => {
            Ok(shape.clone())
        }
        Op::MatMul { transpose_a, transpose_b } => {
            matmul(inputs[0], inputs[1], *transpose_a, *transpose_b)
        }
        Op::MatMulBias { .. } => {
            let product = matmul(inputs[0], inputs[1], false, false)?;
            bias(&product, inputs[2])
        }
        Op::Conv2d(window) => conv2d(window, inputs[0], inputs[1]),
        Op::Conv2dBias { window, .. } => {
            let out = conv2d(window, inputs[0], inputs[1])?;
            bias(&out, inputs[2])
        }
        Op::Conv2dPool { window, pool } => {
            let conv = conv2d(window, inputs[0], inputs[1])?;
            let [n, c] = input_of(pool, &bias(&conv, inputs[2])?)?;
            Ok([n, pool.output[0], pool.output[1], c].into())
        }
        Op::Conv2dPoolFilterGrad { window, pool } => {
            same(inputs[2], inputs[3])?;
            let ([n, ci], [m, co]) = (input_of(window, inputs[0])?, output_of(pool, inputs[3])?);
            equal("batch of x", n, "of dy", m)?;
            Ok([window.kernel[0], window.kernel[1], ci, co].into())
        }
        Op::Conv2dInputGrad(window) => {
            let [n, c] = output_of(window, inputs[0])?;
            let [_, _, ci, co] = filter_of(window, inputs[1])?;
            equal("channels of dy", c, "of the filter", co)?;
            Ok([n, window.input[0], window.input[1], ci].into())
        }
        Op::Conv2dFilterGrad(window) => {
            let ([n, ci], [m, co]) = (input_of(window, inputs[0])?, output_of(window, inputs[1])?);
            equal("batch of x", n, "of dy", m)?;
            Ok([window.kernel[0], window.kernel[1], ci, co].into())
        }
        Op::DepthwiseConv2d(window) => {
            let [n, c] = input_of(window, inputs[0])?;
            let [_, _, ci, multiplier] = filter_of(window, inputs[1])?;
            equal("channels of x", c, "of the filter", ci)?;
            Ok([n, window.output[0], window.output[1], ci * multiplier].into())
        }
        Op::DepthwiseConv2dInputGrad(window) => {
            let [n, c] = output_of(window, inputs[0])?;
            let [_, _, ci, multiplier] = filter_of(window, inputs[1])?;
            equal("channels of dy", c, "of the filter", ci * multiplier)?;
            Ok([n, window.input[0], window.input[1], ci].into())
        }
        Op::DepthwiseConv2dFilterGrad(window) => {
            let ([n, ci], [m, co]) = (input_of(window, inputs[0])?, output_of(window, inputs[1])?);
            equal("batch of x", n, "of dy", m)?;
            equal("channels of dy modulo those of x", co % ci.max(1), "expected", 0)?;
            Ok([window.kernel[0], window.kernel[1], ci, co / ci.max(1)].into())
        }
        Op::MaxPool(window) | Op::AvgPool(window) | Op::LrnPool { pool: window, .. } => {
            let [n, c] = input_of(window, inputs[0])?;
            Ok([n, window.output[0], window.output[1], c].into())
        }
        Op::MaxPoolGrad(window) | Op::MaxPoolReluGrad(window) => {
            let [n, c] = input_of(window, inputs[0])?;
            same(inputs[1], inputs[2])?;
            let [m, d] = output_of(window, inputs[2])?;
            equal("batch of x", n, "of dy", m)?;
            equal("channels of x", c, "of dy", d)?;
            Ok(inputs[0].clone())
        }
        Op::LrnPoolGrad { pool, .. } => {
            same(inputs[2], inputs[3])?;
            let ([n, c], [m, d]) = (input_of(pool, inputs[0])?, output_of(pool, inputs[3])?);
            equal("batch of x", n, "of dy", m)?;
            equal("channels of x", c, "of dy", d)?;
            Ok(inputs[0].clone())
        }
        Op::AvgPoolGrad(window) => {
            let [n, c] = output_of(window, inputs[0])?;
            Ok([n, window.input[0], window.input[1], c].into())
        }
        Op::Lrn(_) | Op::Relu | Op::Scale(_) | Op::Square => Ok(inputs[0].clone()),
        Op::LrnGrad(_)
        | Op::LrnReluGrad(_)
        | Op::ReluGrad
        | Op::Add
        | Op::Sub
        | Op::AddScaled(_) => same(inputs[0], inputs[1]),
        Op::Mul if inputs[1].elements() == 1 => Ok(inputs[0].clone()),
        Op::Mul => same(inputs[0], inputs[1]),
        Op::Moments if inputs[0].is_empty() => Err("needs at least one dimension".to_owned()),
        Op::Moments => Ok([2 * inputs[0].last_dim()].into()),
        Op::BatchNorm { .. } => {
            pairs(inputs[0], inputs[1])?;
            bias(inputs[0], inputs[2])?;
            bias(inputs[0], inputs[3])
        }
        Op::BatchNormSums { .. } => {
            same(inputs[0], inputs[2])?;
            pairs(inputs[0], inputs[1])
        }
        Op::BatchNormInputGrad { .. } => {
            pairs(inputs[0], inputs[1])?;
            bias(inputs[0], inputs[2])?;
            pairs(inputs[0], inputs[4])?;
            same(inputs[0], inputs[3])
        }
        Op::BiasAdd => bias(inputs[0], inputs[1]),
        Op::BiasAddGrad if inputs[0].is_empty() => Err("needs at least one dimension".to_owned()),
        Op::BiasAddGrad => Ok([inputs[0].last_dim()].into()),
        Op::BiasReluGrad => Ok([same(inputs[0], inputs[1])?.last_dim()].into()),
        Op::SoftmaxCrossEntropy => rows(inputs[0], inputs[1]),
        Op::SoftmaxCrossEntropyGrad => {
            rows(inputs[1], inputs[0])?;
            rows(inputs[1], inputs[2])?;
            Ok(inputs[1].clone())
        }
        Op::L2Loss | Op::Mean | Op::Sum => Ok(Shape::scalar()),
        Op::Broadcast(shape) => {
            equal("elements", inputs[0].elements(), "of a scalar", 1)?;
            Ok(shape.clone())
        }
        Op::Reshape(shape) => {
            equal("elements", inputs[0].elements(), "of the new shape", shape.elements())?;
            Ok(shape.clone())
        }
        Op::Concat => {
            let [a, b] = [inputs[0], inputs[1]];
            if a.is_empty() || a.len() != b.len() || a[..a.len() - 1] != b[..b.len() - 1] {
                return Err(format!("{a} and {b} differ outside the innermost dimension"));
            }
            let mut dims = a.to_vec();
            dims[a.len() - 1] += b.last_dim();
            Ok(dims.into())
        }
        Op::Slice { start, len } => {
            let mut dims = inputs[0].to_vec();
            match dims.last_mut() {
                Some(last) if start + len <= *last => *last = *len,
                _ => return Err(format!("{start}..{} is outside {}", start + len, inputs[0])),
            }
            Ok(dims.into())
        }
    }
}

fn arity(op: &Op) -> usize {
    match op {
        Op::Placeholder(_) | Op::Variable { .. } | Op::Fill(..) => 0,
        Op::MaxPool(_)
        | Op::AvgPool(_)
        | Op::AvgPoolGrad(_)
        | Op::Lrn(_)
        | Op::BiasAddGrad
        | Op::Moments
        | Op::Relu
        | Op::Scale(_)
        | Op::Square
        | Op::L2Loss
        | Op::Mean
        | Op::Sum
        | Op::Broadcast(_)
        | Op::Reshape(_)
        | Op::LrnPool { .. }
        | Op::Slice { .. } => 1,
        Op::MatMul { .. }
        | Op::Conv2d(_)
        | Op::Conv2dInputGrad(_)
        | Op::Conv2dFilterGrad(_)
        | Op::DepthwiseConv2d(_)
        | Op::DepthwiseConv2dInputGrad(_)
        | Op::DepthwiseConv2dFilterGrad(_)
        | Op::LrnGrad(_)
        | Op::LrnReluGrad(_)
        | Op::BiasReluGrad
        | Op::BiasAdd
        | Op::ReluGrad
        | Op::SoftmaxCrossEntropy
        | Op::Add
        | Op::Sub
        | Op::Mul
        | Op::Concat
        | Op::AddScaled(_) => 2,
        Op::MaxPoolGrad(_)
        | Op::MaxPoolReluGrad(_)
        | Op::BatchNormSums { .. }
        | Op::SoftmaxCrossEntropyGrad
        | Op::Conv2dBias { .. }
        | Op::Conv2dPool { .. }
        | Op::MatMulBias { .. } => 3,
        Op::BatchNorm { .. } | Op::Conv2dPoolFilterGrad { .. } | Op::LrnPoolGrad { .. } => 4,
        Op::BatchNormInputGrad { .. } => 5,
    }
}

fn equal(what: &str, a: usize, other: &str, b: usize) -> Result<(), String> {
    if a == b { Ok(()) } else { Err(format!("{what} is {a}, {other} {b}")) }
}

fn same(a: &Shape, b: &Shape) -> Result<Shape, String> {
    if a == b { Ok(a.clone()) } else { Err(format!("shapes {a} and {b} differ")) }
}

fn matmul(a: &Shape, b: &Shape, transpose_a: bool, transpose_b: bool) -> Result<Shape, String> {
    let ([a0, a1], [b0, b1]) = (&a[..], &b[..]) else {
        return Err(format!("needs two matrices, got {a} and {b}"));
    };
    let (m, k) = if transpose_a { (a1, a0) } else { (a0, a1) };
    let (l, n) = if transpose_b { (b1, b0) } else { (b0, b1) };
    equal("columns of a", *k, "rows of b", *l)?;
    Ok([*m, *n].into())
}

fn bias(x: &Shape, bias: &Shape) -> Result<Shape, String> {
    if x.is_empty() || bias[..] != [x.last_dim()] {
        return Err(format!("{bias} is not one value per innermost index of {x}"));
    }
    Ok(x.clone())
}

/// Two values per innermost index of `x`, one after the other.
fn pairs(x: &Shape, values: &Shape) -> Result<Shape, String> {
    if x.is_empty() || values[..] != [2 * x.last_dim()] {
        return Err(format!("{values} is not two values per innermost index of {x}"));
    }
    Ok(values.clone())
}

fn rows(matrix: &Shape, vector: &Shape) -> Result<Shape, String> {
    if matrix.len() != 2 || vector[..] != [matrix[0]] {
        return Err(format!("{vector} is not one value per row of {matrix}"));
    }
    Ok(vector.clone())
}

fn conv2d(window: &Window, x: &Shape, filter: &Shape) -> Result<Shape, String> {
    let [n, c] = input_of(window, x)?;
    let [_, _, ci, co] = filter_of(window, filter)?;
    equal("channels of x", c, "of the filter", ci)?;
    Ok([n, window.output[0], window.output[1], co].into())
}

/// Batch and channels of a tensor that must have the window's input extents.
fn input_of(window: &Window, x: &Shape) -> Result<[usize; 2], String> {
    picture(x, window.input)
}

/// Batch and channels of a tensor that must have the window's output extents.
fn output_of(window: &Window, y: &Shape) -> Result<[usize; 2], String> {
    picture(y, window.output)
}

fn picture(x: &Shape, extents: [usize; 2]) -> Result<[usize; 2], String> {
    match x[..] {
        [n, h, w, c] if [h, w] == extents => Ok([n, c]),
        _ => Err(format!("{x} is not [batch, {}, {}, channels]", extents[0], extents[1])),
    }
}

fn filter_of(window: &Window, filter: &Shape) -> Result<[usize; 4], String> {
    match filter[..] {
        [kh, kw, ci, co] if [kh, kw] == window.kernel => Ok([kh, kw, ci, co]),
        _ => {
            let [kh, kw] = window.kernel;
            Err(format!("filter {filter} is not [{kh}, {kw}, in, out]"))
        }
    }
}
