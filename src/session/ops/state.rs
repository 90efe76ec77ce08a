//! Variables, by reference and as resources.

use super::OpDef;

pub(super) const OPS: &[OpDef] = &[];
