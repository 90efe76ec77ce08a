//! Random numbers.

use super::OpDef;

pub(super) const OPS: &[OpDef] = &[];
