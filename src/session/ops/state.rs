//! Variables, by reference and as resources.

use std::sync::Arc;

use super::broadcast::text;
use super::number::{Number, numbers};
use super::{Kernel, OpDef};
use crate::session::{Call, DType, Handle, Node, OpError, Tensor, Value, Variable};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Variable", variable).reference(),
    OpDef::new("VariableV2", variable).reference(),
    OpDef::new("TemporaryVariable", variable).reference(),
    OpDef::new("VarHandleOp", var_handle).handle(),
    OpDef::new("IsVariableInitialized", is_initialized).refs(1),
    OpDef::new("VarIsInitializedOp", is_initialized),
    OpDef::new("Assign", assign).refs(1).reference(),
    OpDef::new("AssignAdd", assign_add).refs(1).reference(),
    OpDef::new("AssignSub", assign_add).refs(1).reference(),
    OpDef::new("ReadVariableOp", read),
    OpDef::new("AssignVariableOp", assign),
    OpDef::new("AssignAddVariableOp", assign_add),
    OpDef::new("AssignSubVariableOp", assign_add),
    OpDef::new("VariableShape", variable_shape),
    OpDef::new("DestroyResourceOp", destroy),
    OpDef::new("CountUpTo", count_up_to).refs(1),
    OpDef::new("ResourceCountUpTo", count_up_to),
    OpDef::new("ScatterUpdate", scatter).refs(1).reference(),
    OpDef::new("ScatterAdd", scatter).refs(1).reference(),
    OpDef::new("ScatterSub", scatter).refs(1).reference(),
    OpDef::new("ResourceScatterUpdate", scatter),
    OpDef::new("ResourceScatterAdd", scatter),
    OpDef::new("ResourceScatterSub", scatter),
];

/// A variable that graphs know as a resource; one by reference may have the same name, and is another.
pub(super) struct Owned(pub(super) Arc<Variable>);

fn of_type(variable: &Variable, dtype: DType) -> Result<(), OpError> {
    if variable.dtype() == dtype {
        return Ok(());
    }
    Err(OpError::invalid(format!(
        "Trying to share variable {}, which is of type {}, as one of type {dtype}: another graph made it; reset its container or rename it",
        variable.name(),
        variable.dtype()
    )))
}

fn variable(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (name, dtype) = (node.name().to_owned(), node.dtype("dtype")?);
    let (container, shared) = (node.text("container")?.to_owned(), node.shared_name()?.to_owned());
    Ok(Kernel::new(move |call| {
        let make = || Ok(Variable::new(&name, dtype));
        let variable = call.resources().find_or(&container, &shared, make)?;
        of_type(&variable, dtype)?;
        call.set_value(0, Value::Ref(variable));
        Ok(())
    }))
}

fn var_handle(node: &Node<'_>) -> Result<Kernel, OpError> {
    let dtype = node.dtype("dtype")?;
    let (container, shared) = (node.text("container")?.to_owned(), node.shared_name()?.to_owned());
    Ok(Kernel::new(move |call| {
        let make = || Ok(Owned(Arc::new(Variable::new(&shared, dtype))));
        let owned: Arc<Owned> = call.resources().find_or(&container, &shared, make)?;
        of_type(&owned.0, dtype)?;
        call.set_value(0, Value::Resource(Handle::new(&shared, owned.0.clone())));
        Ok(())
    }))
}

fn is_initialized(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let initialized = call.variable(0)?.get().is_some();
        call.set(0, Tensor::scalar(initialized));
        Ok(())
    }))
}

/// The value of a resource variable, or TensorFlow's word that there is none.
fn value_of(call: &Call<'_>, variable: &Variable) -> Result<Tensor, OpError> {
    variable.get().ok_or_else(|| {
        let (name, job) = (variable.name(), call.job());
        OpError::precondition(format!(
            "Could not find variable {name}. This could mean that the variable has been deleted. In TF1, it can also mean the variable is uninitialized. Debug info: container={job}, status error message=Resource {job}/{name}/N10tensorflow3VarE does not exist."
        ))
    })
}

fn read(node: &Node<'_>) -> Result<Kernel, OpError> {
    let dtype = node.dtype("dtype")?;
    Ok(Kernel::new(move |call| {
        let variable = call.variable(0)?;
        of_type(&variable, dtype)?;
        call.set(0, value_of(call, &variable)?);
        Ok(())
    }))
}

fn variable_shape(node: &Node<'_>) -> Result<Kernel, OpError> {
    let dtype = node.dtype_or("out_type", DType::I32)?;
    Ok(Kernel::new(move |call| {
        let shape = value_of(call, &*call.variable(0)?)?.shape().clone();
        call.set(0, super::array::whole(dtype, &[shape.len()], shape.iter().copied())?);
        Ok(())
    }))
}

/// Hands the reference on, where there is one.
fn pass(call: &mut Call<'_>) -> Result<(), OpError> {
    if let Value::Ref(variable) = call.value(0)? {
        let variable = variable.clone();
        call.set_value(0, Value::Ref(variable));
    }
    Ok(())
}

fn assign(node: &Node<'_>) -> Result<Kernel, OpError> {
    let resource = node.op() == "AssignVariableOp";
    let validate = node.bool("validate_shape", !resource)?;
    Ok(Kernel::new(move |call| {
        let (variable, value) = (call.variable(0)?, call.tensor(1)?);
        match variable.get() {
            Some(old) if validate && old.shape() != value.shape() => {
                let (lhs, rhs) = (text(old.shape()), text(value.shape()));
                return Err(OpError::invalid(match resource {
                    false => format!(
                        "Assign requires shapes of both tensors to match. lhs shape= {lhs} rhs shape= {rhs}"
                    ),
                    true => format!(
                        "Trying to assign to variable with tensor with wrong shape. Expected {lhs} got {rhs}"
                    ),
                }));
            }
            _ => variable.set(value)?,
        }
        pass(call)
    }))
}

fn assign_add(node: &Node<'_>) -> Result<Kernel, OpError> {
    let op = node.op().to_owned();
    let minus = op.starts_with("AssignSub");
    let dtype = node.dtype(if op.ends_with("Op") { "dtype" } else { "T" })?;
    numbers!(dtype, T => Ok(Kernel::new(move |call| {
        let (variable, change) = (call.variable(0)?, call.tensor(1)?);
        if matches!(call.value(0)?, Value::Resource(_)) {
            value_of(call, &variable)?;
        }
        variable.update(|value| {
            if value.shape() != change.shape() {
                return Err(OpError::invalid(format!(
                    "Cannot update variable with shape {} using a Tensor with shape {}, shapes must be equal.",
                    text(value.shape()),
                    text(change.shape())
                )));
            }
            let pairs = value.slice_mut::<T>()?.iter_mut().zip(change.slice::<T>()?);
            pairs.for_each(|(x, dx)| *x = if minus { x.sub(*dx) } else { x.add(*dx) });
            Ok(())
        })?;
        pass(call)
    })))
}

fn destroy(node: &Node<'_>) -> Result<Kernel, OpError> {
    let lenient = node.bool("ignore_lookup_error", true)?;
    Ok(Kernel::new(move |call| {
        let Value::Resource(handle) = call.value(0)? else {
            return Err(OpError::invalid("input 0 is no resource"));
        };
        let name = handle.name.clone();
        if !call.resources().remove(&name) && !lenient {
            return Err(OpError::not_found(format!("Resource {name} does not exist.")));
        }
        Ok(())
    }))
}

fn count_up_to(node: &Node<'_>) -> Result<Kernel, OpError> {
    let limit = node.int("limit", 0)?;
    numbers!(node.dtype("T")?, T => Ok(Kernel::new(move |call| {
        let before = call.variable(0)?.update(|value| {
            let before = value.item::<T>()?;
            if before.to_f64() >= limit as f64 {
                return Err(OpError::out_of_range(format!("Reached limit of {limit}")));
            }
            value.slice_mut::<T>()?.iter_mut().for_each(|x| *x = x.add(T::ONE));
            Ok(before)
        })?;
        call.set(0, Tensor::scalar(before));
        Ok(())
    })))
}

fn scatter(node: &Node<'_>) -> Result<Kernel, OpError> {
    let op = node.op().trim_start_matches("Resource").to_owned();
    let dtype = node.dtype(if op == node.op() { "T" } else { "dtype" })?;
    numbers!(dtype, T => Ok(Kernel::new(move |call| {
        let (indices, updates) = (call.tensor(1)?.integers()?, call.tensor(2)?);
        call.variable(0)?.update(|value| {
            let rows = value.shape().first().copied().unwrap_or(0);
            let run: usize = value.shape().iter().skip(1).product();
            let one = updates.len() == 1 && indices.len() * run != 1;
            if !one && updates.len() != indices.len().saturating_mul(run) {
                return Err(OpError::invalid(format!(
                    "updates of shape {} do not fit {} rows of a variable of shape {}",
                    text(updates.shape()),
                    indices.len(),
                    text(value.shape())
                )));
            }
            let (to, from) = (value.slice_mut::<T>()?, updates.slice::<T>()?);
            for (i, &index) in indices.iter().enumerate() {
                let row = usize::try_from(index).ok().filter(|row| *row < rows);
                let row = row.ok_or_else(|| {
                    OpError::invalid(format!("indices[{i}] = {index} is not in [0, {rows})"))
                })?;
                for (k, x) in to[row * run..(row + 1) * run].iter_mut().enumerate() {
                    let update = from[if one { 0 } else { i * run + k }];
                    *x = match op.as_str() {
                        "ScatterAdd" => x.add(update),
                        "ScatterSub" => x.sub(update),
                        _ => update,
                    };
                }
            }
            Ok(())
        })?;
        pass(call)
    })))
}
