//! Operations that make tensors and change their shapes.

use super::{Kernel, OpDef};
use crate::session::{Node, OpError, Value};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Const", constant),
    OpDef::new("Identity", identity),
    OpDef::new("Placeholder", placeholder),
    OpDef::new("PlaceholderWithDefault", identity),
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
    Ok(Kernel::new(move |_| {
        Err(OpError::invalid(format!(
            "You must feed a value for placeholder tensor '{name}' with dtype {dtype}"
        )))
    }))
}
