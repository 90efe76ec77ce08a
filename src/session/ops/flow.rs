//! Operations that order others, check and tell.

use super::{Kernel, OpDef};
use crate::session::{Call, Data, Node, OpError, Tensor};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("NoOp", nothing),
    OpDef::new("ControlTrigger", nothing),
    OpDef::new("Assert", assert),
    OpDef::new("Print", print),
    OpDef::new("PrintV2", print_text),
];

fn nothing(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|_| Ok(())))
}

/// The first elements of a tensor, as TensorFlow prints them: `[1 2 3...]`.
fn summary(tensor: &Tensor, most: usize) -> String {
    fn list<T: ToString>(values: &[T], most: usize) -> Vec<String> {
        values.iter().take(most).map(T::to_string).collect()
    }
    let shown = match tensor.data() {
        Data::F32(v) => list(v, most),
        Data::F64(v) => list(v, most),
        Data::I32(v) => list(v, most),
        Data::I64(v) => list(v, most),
        Data::U8(v) => list(v, most),
        Data::Bool(v) => v.iter().take(most).map(|x| u8::from(*x).to_string()).collect(),
        Data::Str(v) => {
            v.iter().take(most).map(|x| String::from_utf8_lossy(x).into_owned()).collect()
        }
    };
    let more = if tensor.len() > most { "..." } else { "" };
    match tensor.shape().is_empty() {
        true => shown.concat(),
        false => format!("[{}{more}]", shown.join(" ")),
    }
}

fn all(call: &Call<'_>, most: usize) -> Result<String, OpError> {
    (1..call.inputs()).map(|i| Ok(format!("[{}]", summary(&call.tensor(i)?, most)))).collect()
}

/// No message is longer.
const MOST: usize = 1000;

/// How many elements of each tensor are shown.
fn most(node: &Node<'_>) -> Result<usize, OpError> {
    Ok(usize::try_from(node.int("summarize", 3)?).map_or(MOST, |most| most.min(MOST)))
}

fn assert(node: &Node<'_>) -> Result<Kernel, OpError> {
    let most = most(node)?;
    Ok(Kernel::new(move |call| match call.tensor(0)?.item::<bool>()? {
        true => Ok(()),
        false => Err(OpError::invalid(format!("assertion failed: {}", all(call, most)?))),
    }))
}

fn print(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (message, most) = (node.text("message")?.to_owned(), most(node)?);
    Ok(Kernel::new(move |call| {
        tracing::info!("{message}{}", all(call, most)?);
        let value = call.take(0)?;
        call.set(0, value);
        Ok(())
    }))
}

fn print_text(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        tracing::info!("{}", summary(&call.tensor(0)?, MOST));
        Ok(())
    }))
}
