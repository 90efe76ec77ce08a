//! Queues and conditional accumulators.

use super::OpDef;

pub(super) const OPS: &[OpDef] = &[];
