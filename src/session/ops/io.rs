//! Operations that read and write files.

use super::OpDef;

pub(super) const OPS: &[OpDef] = &[];
