//! Functions of one, two or three operands, element by element.

use bytes::Bytes;

use super::broadcast::{self, zip, zip_into};
use super::number::{Float, Number, all_types, numbers, reals};
use super::{Kernel, OpDef, no_kernel};
use crate::session::{DType, Data, Element, Node, OpError, Tensor};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Add", binary),
    OpDef::new("AddV2", binary),
    OpDef::new("Sub", binary),
    OpDef::new("Mul", binary),
    OpDef::new("Div", binary),
    OpDef::new("RealDiv", binary),
    OpDef::new("DivNoNan", binary),
    OpDef::new("MulNoNan", binary),
    OpDef::new("FloorDiv", binary),
    OpDef::new("TruncateDiv", binary),
    OpDef::new("FloorMod", binary),
    OpDef::new("Mod", binary),
    OpDef::new("TruncateMod", binary),
    OpDef::new("Pow", binary),
    OpDef::new("Maximum", binary),
    OpDef::new("Minimum", binary),
    OpDef::new("SquaredDifference", binary),
    OpDef::new("Less", compare),
    OpDef::new("LessEqual", compare),
    OpDef::new("Greater", compare),
    OpDef::new("GreaterEqual", compare),
    OpDef::new("Equal", equal),
    OpDef::new("NotEqual", equal),
    OpDef::new("LogicalAnd", logical),
    OpDef::new("LogicalOr", logical),
    OpDef::new("LogicalNot", logical_not),
    OpDef::new("Neg", unary),
    OpDef::new("Abs", unary),
    OpDef::new("Sign", unary),
    OpDef::new("Square", unary),
    OpDef::new("Relu", unary),
    OpDef::new("Relu6", unary),
    OpDef::new("Floor", real),
    OpDef::new("Ceil", real),
    OpDef::new("Round", real),
    OpDef::new("Rint", real),
    OpDef::new("Sqrt", real),
    OpDef::new("Rsqrt", real),
    OpDef::new("Reciprocal", real),
    OpDef::new("Inv", real),
    OpDef::new("Exp", real),
    OpDef::new("Expm1", real),
    OpDef::new("Log", real),
    OpDef::new("Log1p", real),
    OpDef::new("Sin", real),
    OpDef::new("Cos", real),
    OpDef::new("Tan", real),
    OpDef::new("Tanh", real),
    OpDef::new("Sigmoid", real),
    OpDef::new("Softplus", real),
    OpDef::new("Softsign", real),
    OpDef::new("Elu", real),
    OpDef::new("IsNan", real_test),
    OpDef::new("IsInf", real_test),
    OpDef::new("IsFinite", real_test),
    OpDef::new("ReluGrad", gradient),
    OpDef::new("Relu6Grad", gradient),
    OpDef::new("EluGrad", gradient),
    OpDef::new("SoftplusGrad", gradient),
    OpDef::new("SoftsignGrad", gradient),
    OpDef::new("SigmoidGrad", gradient),
    OpDef::new("TanhGrad", gradient),
    OpDef::new("SqrtGrad", gradient),
    OpDef::new("RsqrtGrad", gradient),
    OpDef::new("ReciprocalGrad", gradient),
    OpDef::new("InvGrad", gradient),
    OpDef::new("Select", select),
    OpDef::new("SelectV2", select),
    OpDef::new("Cast", cast),
    OpDef::new("ClipByValue", clip),
];

/// A kernel of one operand whose result may lie in the operand's memory.
fn map<T: Number>(f: impl Fn(T) -> T + Send + Sync + 'static) -> Result<Kernel, OpError> {
    Ok(Kernel::new(move |call| {
        let mut x = call.take(0)?;
        x.slice_mut::<T>()?.iter_mut().for_each(|x| *x = f(*x));
        call.set(0, x);
        Ok(())
    }))
}

/// A kernel of two operands of the result's type.
fn join<T: Number>(f: impl Fn(T, T) -> T + Send + Sync + 'static) -> Result<Kernel, OpError> {
    Ok(Kernel::new(move |call| {
        let a = call.take(0)?;
        let out = zip_into::<T>(a, &call.tensor(1)?, &f)?;
        call.set(0, out);
        Ok(())
    }))
}

/// A kernel of two operands that says yes or no.
fn test<T: Element + Copy>(
    f: impl Fn(T, T) -> bool + Send + Sync + 'static,
) -> Result<Kernel, OpError> {
    Ok(Kernel::new(move |call| {
        let out = zip::<T, T, bool>(&call.tensor(0)?, &call.tensor(1)?, &f)?;
        call.set(0, out);
        Ok(())
    }))
}

/// Whole numbers have no quotient by zero.
fn divide<T: Number>(f: impl Fn(T, T) -> T + Send + Sync + 'static) -> Result<Kernel, OpError> {
    if !T::WHOLE {
        return join(f);
    }
    Ok(Kernel::new(move |call| {
        let (a, b) = (call.take(0)?, call.tensor(1)?);
        if b.slice::<T>()?.contains(&T::ZERO) {
            return Err(OpError::invalid("Integer division by zero"));
        }
        call.set(0, zip_into::<T>(a, &b, &f)?);
        Ok(())
    }))
}

/// Powers of whole numbers must not have negative exponents.
fn power<T: Number>() -> Result<Kernel, OpError> {
    if !T::WHOLE {
        return join(T::pow);
    }
    Ok(Kernel::new(move |call| {
        let (a, b) = (call.take(0)?, call.tensor(1)?);
        if b.slice::<T>()?.iter().any(|b| *b < T::ZERO) {
            return Err(OpError::invalid("Integers to negative integer powers are not allowed"));
        }
        call.set(0, zip_into::<T>(a, &b, T::pow)?);
        Ok(())
    }))
}

fn binary(node: &Node<'_>) -> Result<Kernel, OpError> {
    let dtype = node.dtype("T")?;
    if dtype == DType::Str && ["Add", "AddV2"].contains(&node.op()) {
        return Ok(Kernel::new(|call| {
            let (a, b) = (call.tensor(0)?, call.tensor(1)?);
            let to = broadcast::shape(a.shape(), b.shape())?;
            let (x, y) = (broadcast::stretch(&a, &to)?, broadcast::stretch(&b, &to)?);
            broadcast::bounded([x.as_slice(), y.as_slice()].into_iter())?;
            let texts =
                x.iter().zip(&y).map(|(x, y): (&Bytes, &Bytes)| [&x[..], &y[..]].concat().into());
            call.set(0, Tensor::new(to, texts.collect::<Vec<Bytes>>())?);
            Ok(())
        }));
    }
    numbers!(dtype, T => match node.op() {
        "Add" | "AddV2" => join(T::add),
        "Sub" => join(T::sub),
        "Mul" => join(T::mul),
        "Div" | "RealDiv" | "TruncateDiv" => divide(T::div),
        "DivNoNan" => join(|a: T, b: T| if b == T::ZERO { T::ZERO } else { a.div(b) }),
        "MulNoNan" => join(|a: T, b: T| if b == T::ZERO { T::ZERO } else { a.mul(b) }),
        "FloorDiv" => divide(T::floor_div),
        "FloorMod" => divide(T::floor_mod),
        "Mod" | "TruncateMod" => divide(T::trunc_mod),
        "Pow" => power::<T>(),
        "Maximum" => join(T::greater),
        "Minimum" => join(T::lesser),
        _ => join(|a: T, b: T| {
            let d = a.sub(b);
            d.mul(d)
        }),
    })
}

fn compare(node: &Node<'_>) -> Result<Kernel, OpError> {
    numbers!(node.dtype("T")?, T => match node.op() {
        "Less" => test(|a: T, b: T| a < b),
        "LessEqual" => test(|a: T, b: T| a <= b),
        "Greater" => test(|a: T, b: T| a > b),
        _ => test(|a: T, b: T| a >= b),
    })
}

fn equal(node: &Node<'_>) -> Result<Kernel, OpError> {
    let wanted = node.op() == "Equal";
    let strict = node.bool("incompatible_shape_error", true)?;
    let dtype = node.dtype("T")?;
    Ok(Kernel::new(move |call| {
        let (a, b) = (call.tensor(0)?, call.tensor(1)?);
        let to = match broadcast::shape(a.shape(), b.shape()) {
            Err(_) if !strict => {
                call.set(0, Tensor::scalar(!wanted));
                return Ok(());
            }
            to => to?,
        };
        let out: Vec<bool> = all_types!(dtype, T => {
            let (x, y) = (broadcast::stretch::<T>(&a, &to)?, broadcast::stretch::<T>(&b, &to)?);
            x.iter().zip(&y).map(|(x, y)| (x == y) == wanted).collect()
        });
        call.set(0, Tensor::new(to, out)?);
        Ok(())
    }))
}

fn logical(node: &Node<'_>) -> Result<Kernel, OpError> {
    match node.op() {
        "LogicalAnd" => test(|a: bool, b| a && b),
        _ => test(|a: bool, b| a || b),
    }
}

fn logical_not(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let mut x = call.take(0)?;
        x.slice_mut::<bool>()?.iter_mut().for_each(|x| *x = !*x);
        call.set(0, x);
        Ok(())
    }))
}

fn unary(node: &Node<'_>) -> Result<Kernel, OpError> {
    numbers!(node.dtype("T")?, T => match node.op() {
        "Neg" => map(T::neg),
        "Abs" => map(T::abs),
        "Sign" => map(T::sign),
        "Square" => map(|x: T| x.mul(x)),
        // NaN passes.
        "Relu" => map(|x: T| x.greater(T::ZERO)),
        _ => map(|x: T| x.greater(T::ZERO).lesser(T::from_f64(6.0))),
    })
}

fn sigmoid<T: Float>(x: T) -> T {
    T::ONE.div(T::ONE.add(x.neg().exp()))
}

fn softplus<T: Float>(x: T) -> T {
    // The exponential of a large number is not needed, nor finite.
    let positive = if x > T::ZERO { x } else { T::ZERO };
    positive.add(x.abs().neg().exp().ln_1p())
}

fn real(node: &Node<'_>) -> Result<Kernel, OpError> {
    use super::number::Real;
    let dtype = node.dtype("T")?;
    if matches!(dtype, DType::I32 | DType::I64) && ["Floor", "Ceil", "Round"].contains(&node.op()) {
        return numbers!(dtype, T => map(|x: T| x));
    }
    reals!(dtype, T => match node.op() {
        "Floor" => map(<T as Real>::floor),
        "Ceil" => map(<T as Real>::ceil),
        "Round" | "Rint" => map(<T as Real>::round),
        "Sqrt" => map(<T as Real>::sqrt),
        "Rsqrt" => map(|x: T| T::ONE / x.sqrt()),
        "Reciprocal" | "Inv" => map(|x: T| T::ONE / x),
        "Exp" => map(<T as Real>::exp),
        "Expm1" => map(<T as Real>::exp_m1),
        "Log" => map(<T as Real>::ln),
        "Log1p" => map(<T as Real>::ln_1p),
        "Sin" => map(<T as Real>::sin),
        "Cos" => map(<T as Real>::cos),
        "Tan" => map(<T as Real>::tan),
        "Tanh" => map(<T as Real>::tanh),
        "Sigmoid" => map(sigmoid::<T>),
        "Softplus" => map(softplus::<T>),
        "Softsign" => map(|x: T| x / (T::ONE + x.abs())),
        _ => map(|x: T| if x < T::ZERO { x.exp_m1() } else { x }),
    })
}

fn real_test(node: &Node<'_>) -> Result<Kernel, OpError> {
    fn ask<T: Float>(f: fn(T) -> bool) -> Result<Kernel, OpError> {
        Ok(Kernel::new(move |call| {
            let x = call.tensor(0)?;
            let out = x.slice::<T>()?.iter().map(|x| f(*x)).collect::<Vec<bool>>();
            call.set(0, Tensor::new(x.shape().clone(), out)?);
            Ok(())
        }))
    }
    use super::number::Real;
    reals!(node.dtype("T")?, T => match node.op() {
        "IsNan" => ask(<T as Real>::nan),
        "IsInf" => ask(<T as Real>::infinite),
        _ => ask(<T as Real>::finite),
    })
}

/// Gradients of functions: of `(gradient, operand)` those whose names begin with `Relu`, `Elu` and `Soft`, of
/// `(result, gradient)` the others.
fn gradient(node: &Node<'_>) -> Result<Kernel, OpError> {
    reals!(node.dtype("T")?, T => match node.op() {
        "ReluGrad" => join(|g: T, x: T| if x > T::ZERO { g } else { T::ZERO }),
        "Relu6Grad" => join(|g: T, x: T| if x > T::ZERO && x < 6.0 { g } else { T::ZERO }),
        "EluGrad" => join(|g: T, y: T| if y < T::ZERO { (y + T::ONE) * g } else { g }),
        "SoftplusGrad" => join(|g: T, x: T| g * sigmoid(x)),
        "SoftsignGrad" => join(|g: T, x: T| g / ((T::ONE + x.abs()) * (T::ONE + x.abs()))),
        "SigmoidGrad" => join(|y: T, g: T| g * y * (T::ONE - y)),
        "TanhGrad" => join(|y: T, g: T| g * (T::ONE - y * y)),
        "SqrtGrad" => join(|y: T, g: T| g * 0.5 / y),
        "RsqrtGrad" => join(|y: T, g: T| g * -0.5 * y * y * y),
        _ => join(|y: T, g: T| -g * y * y),
    })
}

fn select(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (dtype, rows) = (node.dtype("T")?, node.op() == "Select");
    Ok(Kernel::new(move |call| {
        let (mut which, yes, no) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?);
        if rows && yes.shape() != no.shape() {
            return Err(OpError::invalid("'then' and 'else' must have the same size"));
        }
        // The older operation takes a vector for a choice among rows.
        if rows && which.shape().len() == 1 && yes.shape().len() > 1 {
            let mut dims = vec![1; yes.shape().len()];
            dims[0] = which.len();
            which = which.reshaped(dims)?;
        }
        let to = broadcast::shape(&broadcast::shape(which.shape(), yes.shape())?, no.shape())?;
        if rows && *to != **yes.shape() {
            return Err(OpError::invalid("the condition does not fit 'then' and 'else'"));
        }
        let which = broadcast::stretch::<bool>(&which, &to)?;
        let out = all_types!(dtype, T => {
            let (yes, no) = (broadcast::stretch::<T>(&yes, &to)?, broadcast::stretch::<T>(&no, &to)?);
            let chosen = which.iter().zip(yes.into_iter().zip(no));
            Tensor::new(to, chosen.map(|(which, (yes, no))| if *which { yes } else { no }).collect::<Vec<T>>())?
        });
        call.set(0, out);
        Ok(())
    }))
}

macro_rules! cast_to {
    ($from:expr, $t:ty) => {{
        let values: Vec<$t> = match $from.data() {
            Data::F32(v) => v.iter().map(|&x| x as $t).collect(),
            Data::F64(v) => v.iter().map(|&x| x as $t).collect(),
            Data::I32(v) => v.iter().map(|&x| x as $t).collect(),
            Data::I64(v) => v.iter().map(|&x| x as $t).collect(),
            Data::U8(v) => v.iter().map(|&x| x as $t).collect(),
            Data::Bool(v) => v.iter().map(|&x| u8::from(x) as $t).collect(),
            Data::Str(_) => return Err(no_kernel(DType::Str)),
        };
        Tensor::new($from.shape().clone(), values)
    }};
}

/// The same values as another type.
#[allow(clippy::unnecessary_cast, reason = "for the types that need it")]
pub(super) fn converted(x: &Tensor, to: DType) -> Result<Tensor, OpError> {
    match to {
        to if to == x.dtype() => Ok(x.clone()),
        DType::F32 => cast_to!(x, f32),
        DType::F64 => cast_to!(x, f64),
        DType::I32 => cast_to!(x, i32),
        DType::I64 => cast_to!(x, i64),
        DType::U8 => cast_to!(x, u8),
        DType::Bool => numbers!(x.dtype(), T => {
            let values = x.slice::<T>()?.iter().map(|x| *x != T::ZERO).collect();
            Tensor::new::<bool>(x.shape().clone(), values)
        }),
        DType::Str => Err(no_kernel(DType::Str)),
    }
}

fn cast(node: &Node<'_>) -> Result<Kernel, OpError> {
    let to = node.dtype("DstT")?;
    Ok(Kernel::new(move |call| {
        let out = converted(&call.take(0)?, to)?;
        call.set(0, out);
        Ok(())
    }))
}

fn clip(node: &Node<'_>) -> Result<Kernel, OpError> {
    numbers!(node.dtype("T")?, T => Ok(Kernel::new(|call| {
        let x = zip_into::<T>(call.take(0)?, &call.tensor(1)?, T::greater)?;
        let out = zip_into::<T>(x, &call.tensor(2)?, T::lesser)?;
        call.set(0, out);
        Ok(())
    })))
}
