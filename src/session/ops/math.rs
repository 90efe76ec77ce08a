//! Operations on numbers, element by element, reductions and products.

use super::OpDef;

pub(super) const OPS: &[OpDef] = &[];
