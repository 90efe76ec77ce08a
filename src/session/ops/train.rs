//! The updates of optimizers, of variables by reference and as resources.

use std::sync::Arc;

use super::broadcast::text;
use super::number::reals;
use super::{Kernel, OpDef};
use crate::session::{Call, Element, Node, OpError, Tensor, Value, Variable};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("ApplyGradientDescent", gradient_descent).refs(1).reference(),
    OpDef::new("ApplyMomentum", momentum).refs(2).reference(),
    OpDef::new("ApplyAdagrad", adagrad).refs(2).reference(),
    OpDef::new("ApplyAdagradV2", adagrad).refs(2).reference(),
    OpDef::new("ApplyAdam", adam).refs(3).reference(),
    OpDef::new("ApplyRMSProp", rms_prop).refs(3).reference(),
    OpDef::new("SparseApplyMomentum", momentum).refs(2).reference(),
    OpDef::new("SparseApplyAdagrad", adagrad).refs(2).reference(),
    OpDef::new("SparseApplyAdagradV2", adagrad).refs(2).reference(),
    OpDef::new("SparseApplyRMSProp", rms_prop).refs(3).reference(),
    OpDef::new("ResourceSparseApplyMomentum", momentum),
    OpDef::new("ResourceSparseApplyAdagrad", adagrad),
    OpDef::new("ResourceSparseApplyAdagradV2", adagrad),
    OpDef::new("ResourceSparseApplyRMSProp", rms_prop),
    OpDef::new("ResourceApplyGradientDescent", gradient_descent),
    OpDef::new("ResourceApplyMomentum", momentum),
    OpDef::new("ResourceApplyAdagrad", adagrad),
    OpDef::new("ResourceApplyAdagradV2", adagrad),
    OpDef::new("ResourceApplyAdam", adam),
    OpDef::new("ResourceApplyRMSProp", rms_prop),
];

/// Whether the gradient is of some rows only, which the input after it names.
fn sparse(node: &Node<'_>) -> bool {
    node.op().contains("Sparse")
}

/// Where in a variable of shape `shape` each element of the gradient belongs; `None` for one after the other.
fn places(
    shape: &[usize],
    gradient: &Tensor,
    rows: Option<&[i64]>,
) -> Result<Option<Vec<usize>>, OpError> {
    let Some(rows) = rows else {
        if shape == &**gradient.shape() {
            return Ok(None);
        }
        return Err(OpError::invalid(format!(
            "var and grad do not have the same shape {} {}",
            text(shape),
            text(gradient.shape())
        )));
    };
    let (count, run) =
        (shape.first().copied().unwrap_or(0), shape.iter().skip(1).product::<usize>());
    if gradient.len() != rows.len().saturating_mul(run) {
        return Err(OpError::invalid(format!(
            "grad of shape {} does not fit {} rows of a variable of shape {}",
            text(gradient.shape()),
            rows.len(),
            text(shape)
        )));
    }
    let mut places = Vec::with_capacity(gradient.len());
    for (i, &row) in rows.iter().enumerate() {
        let inside = usize::try_from(row).ok().filter(|row| *row < count);
        let row = inside.ok_or_else(|| {
            OpError::invalid(format!("indices[{i}] = {row} is not in [0, {count})"))
        })?;
        places.extend(row * run..(row + 1) * run);
    }
    Ok(Some(places))
}

/// Runs `rule` on the elements of a variable and its slots and that of the gradient, once all are found to be of one shape.
fn apply<T: Element + Copy, const N: usize>(
    call: &mut Call<'_>,
    gradient: usize,
    sparse: bool,
    rule: impl Fn(&mut [T; N], T),
) -> Result<(), OpError> {
    let variables: Result<Vec<Arc<Variable>>, OpError> = (0..N).map(|i| call.variable(i)).collect();
    let rows = if sparse { Some(call.tensor(gradient + 1)?.integers()?) } else { None };
    let (variables, gradient) = (variables?, call.tensor(gradient)?);
    Variable::update_all(&variables, |values| {
        let shape = values.first().map(|value| value.shape().clone()).unwrap_or_default();
        if values.iter().any(|value| *value.shape() != shape) {
            return Err(OpError::invalid("a variable and its slots differ in shape"));
        }
        let places = places(&shape, &gradient, rows.as_deref())?;
        let slices: Result<Vec<&mut [T]>, OpError> =
            values.iter_mut().map(|value| value.slice_mut::<T>()).collect();
        let mut slices = slices?;
        for (i, &g) in gradient.slice::<T>()?.iter().enumerate() {
            let at = places.as_ref().map_or(i, |places| places[i]);
            let mut elements = std::array::from_fn(|k| slices[k][at]);
            rule(&mut elements, g);
            slices.iter_mut().zip(elements).for_each(|(slice, x)| slice[at] = x);
        }
        Ok(())
    })?;
    if let Value::Ref(variable) = call.value(0)? {
        let variable = variable.clone();
        call.set_value(0, Value::Ref(variable));
    }
    Ok(())
}

fn gradient_descent(node: &Node<'_>) -> Result<Kernel, OpError> {
    reals!(node.dtype("T")?, T => Ok(Kernel::new(|call| {
        let rate = call.tensor(1)?.item::<T>()?;
        apply(call, 2, false, |[x]: &mut [T; 1], g| *x -= rate * g)
    })))
}

fn momentum(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (nesterov, sparse) = (node.bool("use_nesterov", false)?, sparse(node));
    reals!(node.dtype("T")?, T => Ok(Kernel::new(move |call| {
        let at = if sparse { 5 } else { 4 };
        let (rate, momentum) = (call.tensor(2)?.item::<T>()?, call.tensor(at)?.item::<T>()?);
        apply(call, 3, sparse, |[x, velocity]: &mut [T; 2], g| {
            *velocity = *velocity * momentum + g;
            *x -= match nesterov {
                true => g * rate + *velocity * momentum * rate,
                false => rate * *velocity,
            };
        })
    })))
}

fn adagrad(node: &Node<'_>) -> Result<Kernel, OpError> {
    let update = node.bool("update_slots", true)?;
    let (second, sparse) = (node.op().ends_with("V2"), sparse(node));
    reals!(node.dtype("T")?, T => Ok(Kernel::new(move |call| {
        let rate = call.tensor(2)?.item::<T>()?;
        let epsilon = if second { call.tensor(3)?.item::<T>()? } else { 0.0 };
        apply(call, if second { 4 } else { 3 }, sparse, |[x, sum]: &mut [T; 2], g| {
            if update {
                *sum += g * g;
            }
            *x -= g * rate / (sum.sqrt() + epsilon);
        })
    })))
}

fn adam(node: &Node<'_>) -> Result<Kernel, OpError> {
    let nesterov = node.bool("use_nesterov", false)?;
    reals!(node.dtype("T")?, T => Ok(Kernel::new(move |call| {
        let scalar = |i: usize| call.tensor(i)?.item::<T>();
        let (power1, power2, rate) = (scalar(3)?, scalar(4)?, scalar(5)?);
        let (beta1, beta2, epsilon) = (scalar(6)?, scalar(7)?, scalar(8)?);
        let alpha = rate * (1.0 - power2).sqrt() / (1.0 - power1);
        apply(call, 9, false, |[x, m, v]: &mut [T; 3], g| {
            *m += (g - *m) * (1.0 - beta1);
            *v += (g * g - *v) * (1.0 - beta2);
            let step = if nesterov { g * (1.0 - beta1) + beta1 * *m } else { *m };
            *x -= step * alpha / (v.sqrt() + epsilon);
        })
    })))
}

fn rms_prop(node: &Node<'_>) -> Result<Kernel, OpError> {
    let sparse = sparse(node);
    reals!(node.dtype("T")?, T => Ok(Kernel::new(move |call| {
        let scalar = |i: usize| call.tensor(i)?.item::<T>();
        let (rate, rho, momentum, epsilon) = (scalar(3)?, scalar(4)?, scalar(5)?, scalar(6)?);
        apply(call, 7, sparse, |[x, mean, velocity]: &mut [T; 3], g| {
            *mean += (g * g - *mean) * (1.0 - rho);
            *velocity = *velocity * momentum + g * rate / (*mean + epsilon).sqrt();
            *x -= *velocity;
        })
    })))
}
