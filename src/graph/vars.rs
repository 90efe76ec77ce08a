//! [`VarTable`]: where each variable lies in a slab. A function of the model alone.

use super::GraphError;
use crate::tensor::Shape;

/// Floats between the starts of variables are multiples of this: a cache line, and the widest vector.
const ALIGN: usize = 16;

/// The values a variable starts with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All the same.
    Constant(f32),
    /// Normal of this standard deviation, redrawn outside two of them.
    TruncatedNormal(f32),
}

/// One variable of the layout.
#[derive(Clone, Debug)]
pub struct VarRow {
    /// TensorFlow's name: `conv1/weights`.
    pub name: String,
    /// Its extents.
    pub shape: Shape,
    /// Its first float in a slab.
    pub offset: usize,
    /// Its initial values.
    pub init: Init,
}

impl VarRow {
    /// Its floats in a slab.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.shape.elements()
    }
}

/// The layout of every slab: one row per variable, offsets ascending and aligned, zeros between.
#[derive(Clone, Debug, Default)]
pub struct VarTable {
    rows: Vec<VarRow>,
    len: usize,
}

impl VarTable {
    /// Appends a variable and returns its row.
    pub(super) fn push(
        &mut self,
        name: &str,
        shape: Shape,
        init: Init,
    ) -> Result<usize, GraphError> {
        if self.find(name).is_some() {
            return Err(GraphError::DuplicateVariable { name: name.to_owned() });
        }
        let row = VarRow { name: name.to_owned(), shape, offset: self.len, init };
        self.len = row.range().end.next_multiple_of(ALIGN);
        self.rows.push(row);
        Ok(self.rows.len() - 1)
    }

    /// The rows in creation order.
    pub fn rows(&self) -> &[VarRow] {
        &self.rows
    }

    /// The row of a name.
    pub fn find(&self, name: &str) -> Option<&VarRow> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Floats of a slab, gaps included.
    pub fn slab_len(&self) -> usize {
        self.len
    }

    /// Floats of all variables, gaps left out: the parameter count.
    pub fn parameters(&self) -> usize {
        self.rows.iter().map(|row| row.shape.elements()).sum()
    }

    /// Equal for two processes exactly when names, shapes and order are (FNV-1a, 64 bits).
    pub fn fingerprint(&self) -> u64 {
        let text: String =
            self.rows.iter().map(|row| format!("{} {};", row.name, row.shape)).collect();
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }
}
