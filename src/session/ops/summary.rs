//! Summaries for TensorBoard.

use super::OpDef;

pub(super) const OPS: &[OpDef] = &[];
