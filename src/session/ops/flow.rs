//! Operations that order others.

use super::{Kernel, OpDef};
use crate::session::{Node, OpError};

pub(super) const OPS: &[OpDef] =
    &[OpDef::new("NoOp", nothing), OpDef::new("ControlTrigger", nothing)];

fn nothing(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|_| Ok(())))
}
