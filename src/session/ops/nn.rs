//! Operations of neural networks and their gradients.

use super::OpDef;

pub(super) const OPS: &[OpDef] = &[];
