//! Operations that make tensors and change their shapes.

#![allow(clippy::clone_on_copy, reason = "strings share the code of numbers")]

use super::broadcast::{self, axis, text};
use super::number::{Number, all_types, numbers};
use super::{Kernel, OpDef, no_kernel};
use crate::session::{Call, DType, Element, Node, OpError, Tensor, Value, codec, tensor_elements};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Const", constant),
    OpDef::new("Identity", identity),
    OpDef::new("IdentityN", identity_n),
    OpDef::new("Snapshot", copy),
    OpDef::new("StopGradient", copy),
    OpDef::new("PreventGradient", copy),
    OpDef::new("GuaranteeConst", copy),
    OpDef::new("DeepCopy", copy),
    OpDef::new("CheckNumerics", check_numerics),
    OpDef::new("EnsureShape", ensure_shape),
    OpDef::new("Placeholder", placeholder),
    OpDef::new("PlaceholderV2", placeholder),
    OpDef::new("PlaceholderWithDefault", identity),
    OpDef::new("Shape", shape),
    OpDef::new("ShapeN", shape),
    OpDef::new("Size", size),
    OpDef::new("Rank", rank),
    OpDef::new("Reshape", reshape),
    OpDef::new("ExpandDims", expand_dims),
    OpDef::new("Squeeze", squeeze),
    OpDef::new("Fill", fill),
    OpDef::new("ZerosLike", like),
    OpDef::new("OnesLike", like),
    OpDef::new("BroadcastTo", broadcast_to),
    OpDef::new("BroadcastArgs", broadcast_args),
    OpDef::new("BroadcastGradientArgs", broadcast_gradient_args),
    OpDef::new("Range", range),
    OpDef::new("LinSpace", lin_space),
    OpDef::new("Where", where_true),
    OpDef::new("OneHot", one_hot),
    OpDef::new("InvertPermutation", invert_permutation),
];

fn constant(node: &Node<'_>) -> Result<Kernel, OpError> {
    let value = node.tensor("value")?;
    if value.dtype() != node.dtype("dtype")? {
        return Err(OpError::invalid("the value of a constant is of another type"));
    }
    Ok(Kernel::new(move |call| {
        call.set(0, value.clone());
        Ok(())
    }))
}

/// Hands a reference on as it is: who reads the variable by way of `Identity` sees later updates, as in TensorFlow, and the
/// tokens of `SyncReplicasOptimizer` rely on it.
fn identity(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let value = match call.value(0)? {
            Value::Tensor(_) => Value::Tensor(call.take(0)?),
            Value::Ref(variable) => {
                variable.read()?;
                Value::Ref(variable.clone())
            }
            Value::Resource(handle) => Value::Resource(handle.clone()),
        };
        call.set_value(0, value);
        Ok(())
    }))
}

/// Only runs where nobody feeds it.
fn placeholder(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (name, dtype) = (node.name().to_owned(), node.dtype("dtype")?);
    let known = node.shape("shape")?.filter(|shape| !shape.unknown_rank && !shape.dim.is_empty());
    let shape = known.map_or(String::new(), |s| format!(" and shape {}", codec::shape_text(s)));
    Ok(Kernel::new(move |_| {
        Err(OpError::invalid(format!(
            "You must feed a value for placeholder tensor '{name}' with dtype {dtype}{shape}"
        )))
    }))
}

/// The value without the reference.
fn copy(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let value = call.take(0)?;
        call.set(0, value);
        Ok(())
    }))
}

fn identity_n(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        for i in 0..call.inputs() {
            let value = call.take(i)?;
            call.set(i, value);
        }
        Ok(())
    }))
}

fn check_numerics(node: &Node<'_>) -> Result<Kernel, OpError> {
    let message = node.text("message")?.to_owned();
    Ok(Kernel::new(move |call| {
        let value = call.take(0)?;
        let (mut nan, mut infinite) = (false, false);
        numbers!(value.dtype(), T => {
            for x in value.slice::<T>()? {
                nan |= x.to_f64().is_nan();
                infinite |= x.to_f64().is_infinite();
            }
            Ok(())
        })?;
        let found = match (infinite, nan) {
            (false, false) => {
                call.set(0, value);
                return Ok(());
            }
            (true, true) => "Inf and NaN",
            (true, false) => "Inf",
            (false, true) => "NaN",
        };
        Err(OpError::invalid(format!("{message} : Tensor had {found} values")))
    }))
}

fn ensure_shape(node: &Node<'_>) -> Result<Kernel, OpError> {
    let wanted = node.shape("shape")?.cloned().unwrap_or_default();
    Ok(Kernel::new(move |call| {
        let value = call.take(0)?;
        let dims = || wanted.dim.iter().map(|dim| dim.size);
        let fits = |(wanted, &got): (i64, &usize)| wanted < 0 || wanted as usize == got;
        let shape = value.shape();
        let ok = wanted.unknown_rank
            || wanted.dim.len() == shape.len() && dims().zip(shape.iter()).all(fits);
        if !ok {
            return Err(OpError::invalid(format!(
                "Shape of tensor {} is not compatible with expected shape {}.",
                text(shape),
                codec::shape_text(&wanted)
            )));
        }
        call.set(0, value);
        Ok(())
    }))
}

/// Whole numbers as a tensor of the type that a node asks for.
pub(super) fn whole(
    dtype: DType,
    shape: &[usize],
    values: impl Iterator<Item = usize>,
) -> Result<Tensor, OpError> {
    match dtype {
        DType::I32 => Tensor::new(shape, values.map(|v| v as i32).collect()),
        DType::I64 => Tensor::new(shape, values.map(|v| v as i64).collect()),
        other => Err(no_kernel(other)),
    }
}

/// The shape of an input, of a variable too, without copying what it holds.
fn shape(node: &Node<'_>) -> Result<Kernel, OpError> {
    let dtype = node.dtype_or("out_type", DType::I32)?;
    Ok(Kernel::new(move |call| {
        for i in 0..call.inputs() {
            let shape = call.tensor(i)?.shape().clone();
            call.set(i, whole(dtype, &[shape.len()], shape.iter().copied())?);
        }
        Ok(())
    }))
}

fn size(node: &Node<'_>) -> Result<Kernel, OpError> {
    let dtype = node.dtype_or("out_type", DType::I32)?;
    Ok(Kernel::new(move |call| {
        let len = call.tensor(0)?.len();
        call.set(0, whole(dtype, &[], std::iter::once(len))?);
        Ok(())
    }))
}

fn rank(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let rank = call.tensor(0)?.shape().len() as i32;
        call.set(0, Tensor::scalar(rank));
        Ok(())
    }))
}

fn reshape(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (value, wanted) = (call.take(0)?, call.tensor(1)?.integers()?);
        let mut dims = Vec::with_capacity(wanted.len());
        let mut open = None;
        for (i, &dim) in wanted.iter().enumerate() {
            match usize::try_from(dim) {
                Ok(dim) => dims.push(dim),
                Err(_) if dim == -1 && open.is_none() => {
                    open = Some(i);
                    dims.push(1);
                }
                Err(_) if dim == -1 => {
                    let first = open.unwrap_or(0);
                    let text = format!("Only one input size may be -1, not both {first} and {i}");
                    return Err(OpError::invalid(text));
                }
                Err(_) => {
                    return Err(OpError::invalid(format!(
                        "Size {i} must be non-negative, not {dim}"
                    )));
                }
            }
        }
        if let Some(open) = open {
            let known = tensor_elements(value.dtype(), &dims)?;
            if known == 0 || value.len() % known != 0 {
                return Err(OpError::invalid(format!(
                    "Input to reshape is a tensor with {} values, but the requested shape requires a multiple of {known}",
                    value.len()
                )));
            }
            dims[open] = value.len() / known;
        }
        call.set(0, value.reshaped(dims)?);
        Ok(())
    }))
}

fn expand_dims(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (value, at) = (call.take(0)?, one_integer(call, 1)?);
        let mut dims = value.shape().to_vec();
        dims.insert(axis(at, dims.len() + 1)?, 1);
        call.set(0, value.reshaped(dims)?);
        Ok(())
    }))
}

/// The one whole number of an input.
pub(super) fn one_integer(call: &Call<'_>, index: usize) -> Result<i64, OpError> {
    match call.tensor(index)?.integers()?[..] {
        [value] => Ok(value),
        _ => Err(OpError::invalid(format!("input {index} must be a scalar"))),
    }
}

fn squeeze(node: &Node<'_>) -> Result<Kernel, OpError> {
    let mut given = node.ints("squeeze_dims")?.to_vec();
    given.extend(node.ints("axis")?);
    Ok(Kernel::new(move |call| {
        let value = call.take(0)?;
        let shape = value.shape();
        let axes: Result<Vec<usize>, _> = given.iter().map(|&at| axis(at, shape.len())).collect();
        let axes = axes?;
        if let Some(&at) = axes.iter().find(|&&at| shape[at] != 1) {
            return Err(OpError::invalid(format!(
                "Can not squeeze dim[{at}], expected a dimension of 1, got {}",
                shape[at]
            )));
        }
        let gone = |at: usize| if axes.is_empty() { shape[at] == 1 } else { axes.contains(&at) };
        let dims: Vec<usize> =
            (0..shape.len()).filter(|&at| !gone(at)).map(|at| shape[at]).collect();
        call.set(0, value.reshaped(dims)?);
        Ok(())
    }))
}

fn fill(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (dims, value) = (broadcast::extents(&call.tensor(0)?)?, call.tensor(1)?);
        let out = all_types!(value.dtype(), T => Tensor::full(dims, value.item::<T>()?)?);
        call.set(0, out);
        Ok(())
    }))
}

fn like(node: &Node<'_>) -> Result<Kernel, OpError> {
    let ones = node.op() == "OnesLike";
    Ok(Kernel::new(move |call| {
        let value = call.tensor(0)?;
        let out = match value.dtype() {
            dtype if !ones => Tensor::zeros(dtype, value.shape().clone())?,
            DType::Bool => Tensor::full(value.shape().clone(), true)?,
            dtype => numbers!(dtype, T => Tensor::full(value.shape().clone(), T::ONE))?,
        };
        call.set(0, out);
        Ok(())
    }))
}

fn broadcast_to(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (value, to) = (call.tensor(0)?, broadcast::extents(&call.tensor(1)?)?);
        if *broadcast::shape(value.shape(), &to)? != *to {
            return Err(OpError::invalid(format!(
                "Incompatible shapes: {} vs. {}",
                text(value.shape()),
                text(&to)
            )));
        }
        let out = all_types!(value.dtype(), T => {
            Tensor::new(to.clone(), broadcast::stretch::<T>(&value, &to)?)?
        });
        call.set(0, out);
        Ok(())
    }))
}

fn broadcast_args(node: &Node<'_>) -> Result<Kernel, OpError> {
    let dtype = node.dtype_or("T", DType::I32)?;
    Ok(Kernel::new(move |call| {
        let (a, b) = (broadcast::extents(&call.tensor(0)?)?, broadcast::extents(&call.tensor(1)?)?);
        let to = broadcast::shape(&a, &b)?;
        call.set(0, whole(dtype, &[to.len()], to.iter().copied())?);
        Ok(())
    }))
}

/// Over which axes each side's gradient is summed: where it is stretched.
fn broadcast_gradient_args(node: &Node<'_>) -> Result<Kernel, OpError> {
    let dtype = node.dtype_or("T", DType::I32)?;
    Ok(Kernel::new(move |call| {
        let (a, b) = (broadcast::extents(&call.tensor(0)?)?, broadcast::extents(&call.tensor(1)?)?);
        let rank = broadcast::shape(&a, &b)?.len();
        if *a == *b {
            let none = || whole(dtype, &[0], std::iter::empty());
            call.set(0, none()?);
            call.set(1, none()?);
            return Ok(());
        }
        for (output, own) in [&a, &b].into_iter().enumerate() {
            let stretched =
                |i: &usize| (i + own.len()).checked_sub(rank).is_none_or(|i| own[i] == 1);
            let axes: Vec<usize> = (0..rank).filter(stretched).collect();
            call.set(output, whole(dtype, &[axes.len()], axes.into_iter())?);
        }
        Ok(())
    }))
}

fn range(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (start, limit, delta) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?);
        let out = numbers!(start.dtype(), T => {
            let (start, limit, delta) = (start.item::<T>()?, limit.item::<T>()?, delta.item::<T>()?);
            if delta == T::ZERO {
                return Err(OpError::invalid("Requires delta != 0: 0"));
            }
            let span = (limit.to_f64() - start.to_f64()) / delta.to_f64();
            if span < 0.0 || span.is_nan() {
                return Err(OpError::invalid(format!(
                    "Requires start <= limit when delta > 0: {start}/{limit}"
                )));
            }
            let count = tensor_elements(T::DTYPE, &[span.ceil() as usize])?;
            let step = |i: usize| T::from_f64(start.to_f64() + i as f64 * delta.to_f64());
            Tensor::new([count], (0..count).map(step).collect::<Vec<T>>())
        })?;
        call.set(0, out);
        Ok(())
    }))
}

fn lin_space(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (start, stop, count) = (call.tensor(0)?, call.tensor(1)?, one_integer(call, 2)?);
        let count = usize::try_from(count).ok().filter(|&n| n > 0);
        let count = count.ok_or_else(|| OpError::invalid("Requires num > 0"))?;
        let out = numbers!(start.dtype(), T => {
            let (start, stop) = (start.item::<T>()?.to_f64(), stop.item::<T>()?.to_f64());
            let count = tensor_elements(T::DTYPE, &[count])?;
            let step = (stop - start) / (count.max(2) - 1) as f64;
            let value = |i| if i + 1 == count && i > 0 { stop } else { start + i as f64 * step };
            Tensor::new([count], (0..count).map(|i| T::from_f64(value(i))).collect::<Vec<T>>())
        })?;
        call.set(0, out);
        Ok(())
    }))
}

/// The coordinates of what is not zero.
fn where_true(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let value = super::elementwise::converted(&call.tensor(0)?, DType::Bool)?;
        let strides = broadcast::strides(value.shape());
        let count = value.slice::<bool>()?.iter().filter(|x| **x).count();
        let mut out: Vec<i64> =
            Vec::with_capacity(tensor_elements(DType::I64, &[count, strides.len()])?);
        for (i, _) in value.slice::<bool>()?.iter().enumerate().filter(|(_, x)| **x) {
            let dims = value.shape().iter().zip(&strides);
            out.extend(dims.map(|(&dim, stride)| (i / stride % dim) as i64));
        }
        call.set(0, Tensor::new([count, strides.len()], out)?);
        Ok(())
    }))
}

fn one_hot(node: &Node<'_>) -> Result<Kernel, OpError> {
    let at = node.int("axis", -1)?;
    Ok(Kernel::new(move |call| {
        let (indices, depth) = (call.tensor(0)?, one_integer(call, 1)?);
        let (on, off) = (call.tensor(2)?, call.tensor(3)?);
        let depth = usize::try_from(depth)
            .map_err(|_| OpError::invalid(format!("depth must be non-negative, got: {depth}")))?;
        let mut dims = indices.shape().to_vec();
        let at = axis(at, dims.len() + 1)?;
        let inner: usize = dims[at..].iter().product();
        dims.insert(at, depth);
        let out = all_types!(on.dtype(), T => {
            let mut out = Tensor::full(dims, off.item::<T>()?)?;
            let (on, values) = (on.item::<T>()?, out.slice_mut::<T>()?);
            for (i, index) in indices.integers()?.into_iter().enumerate() {
                if let Some(class) = usize::try_from(index).ok().filter(|&class| class < depth) {
                    values[(i / inner * depth + class) * inner + i % inner] = on.clone();
                }
            }
            out
        });
        call.set(0, out);
        Ok(())
    }))
}

fn invert_permutation(node: &Node<'_>) -> Result<Kernel, OpError> {
    let dtype = node.dtype_or("T", DType::I32)?;
    Ok(Kernel::new(move |call| {
        let order = call.tensor(0)?.integers()?;
        let mut inverse = vec![usize::MAX; order.len()];
        for (i, &to) in order.iter().enumerate() {
            let place = usize::try_from(to).ok().and_then(|to| inverse.get_mut(to));
            match place {
                Some(place) if *place == usize::MAX => *place = i,
                _ => {
                    return Err(OpError::invalid(format!(
                        "{to} is not a new index of a permutation"
                    )));
                }
            }
        }
        call.set(0, whole(dtype, &[order.len()], inverse.into_iter())?);
        Ok(())
    }))
}
