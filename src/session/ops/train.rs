//! The updates of optimizers.

use super::OpDef;

pub(super) const OPS: &[OpDef] = &[];
