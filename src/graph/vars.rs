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
    /// Who changes it.
    pub role: Role,
}

/// Who changes a variable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// The optimizer.
    #[default]
    Trained,
    /// It follows a statistic of the batches, as the moving mean of a batch normalisation does. Its row of a slab of gradients
    /// holds what it is too large by; no rule of an optimizer applies to it, and it has no average.
    Statistic,
}

impl VarRow {
    /// Its floats in a slab.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.shape.elements()
    }
}

/// The layout of every slab: one row per variable, aligned, zeros between; what is trained comes first, then the statistics, each in
/// the order of creation.
#[derive(Clone, Debug, Default)]
pub struct VarTable {
    rows: Vec<VarRow>,
    trained: usize,
    len: usize,
}

impl VarTable {
    /// Appends a variable and returns its row.
    pub(super) fn push(
        &mut self,
        name: &str,
        shape: Shape,
        init: Init,
        role: Role,
    ) -> Result<usize, GraphError> {
        if self.find(name).is_some() {
            return Err(GraphError::DuplicateVariable { name: name.to_owned() });
        }
        self.rows.push(VarRow { name: name.to_owned(), shape, offset: 0, init, role });
        self.trained = self.place(Role::Trained, 0);
        self.len = self.place(Role::Statistic, self.trained);
        Ok(self.rows.len() - 1)
    }

    /// Places the variables of a role from `end` on, and returns where they end.
    fn place(&mut self, role: Role, mut end: usize) -> usize {
        for row in self.rows.iter_mut().filter(|row| row.role == role) {
            row.offset = end;
            end = row.range().end.next_multiple_of(ALIGN);
        }
        end
    }

    /// The rows in creation order.
    pub fn rows(&self) -> &[VarRow] {
        &self.rows
    }

    /// The row of a name.
    pub fn find(&self, name: &str) -> Option<&VarRow> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// The rows as they lie in a slab.
    pub fn placed(&self) -> impl Iterator<Item = &VarRow> + Clone {
        let of = |role| self.rows.iter().filter(move |row| row.role == role);
        of(Role::Trained).chain(of(Role::Statistic))
    }

    /// Floats of a slab that are trained, gaps included; statistics begin here.
    pub fn trained_len(&self) -> usize {
        self.trained
    }

    /// Floats of a slab, gaps included.
    pub fn slab_len(&self) -> usize {
        self.len
    }

    /// Floats of all variables, gaps left out.
    pub fn floats(&self) -> usize {
        self.rows.iter().map(|row| row.shape.elements()).sum()
    }

    /// Floats of what is trained, gaps left out: the parameter count.
    pub fn parameters(&self) -> usize {
        let trained = self.rows.iter().filter(|row| row.role == Role::Trained);
        trained.map(|row| row.shape.elements()).sum()
    }

    /// Equal for two processes exactly when names, shapes, roles and order are (FNV-1a, 64 bits).
    pub fn fingerprint(&self) -> u64 {
        let role = |row: &VarRow| match row.role {
            Role::Trained => "",
            Role::Statistic => " statistic",
        };
        let text: String = self
            .rows
            .iter()
            .map(|row| format!("{} {}{};", row.name, row.shape, role(row)))
            .collect();
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }
}
