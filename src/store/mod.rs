//! Where the parameters live and how they change.

mod init;
mod layout;
mod local;
mod shared;

pub use layout::StateLayout;
pub use local::{LocalStore, StoreSettings};
pub use shared::SharedStore;

use crate::device::{DeviceError, Slab};
use crate::tensor::{HostTensor, Shape};

/// Owns the parameters, the optimizer's state and the global step.
pub trait VariableStore: Send {
    /// The variables as the towers shall see them in this step.
    fn pull(&mut self) -> Result<Pulled<'_>, StoreError>;
    /// One optimizer step by the averaged gradient: one slab for all, or one per master. `share` tells what is behind it,
    /// where others contribute too.
    fn apply(&mut self, mean: &[Slab], share: Contribution) -> Result<Applied, StoreError>;
    /// Updates so far.
    fn global_step(&self) -> u64;
    /// Everything a checkpoint must hold, under TensorFlow's names.
    fn snapshot(&mut self) -> Result<State, StoreError>;
    /// Takes over a snapshot; every variable, average and slot must be there with its shape.
    fn restore(&mut self, from: &State) -> Result<(), StoreError>;
}

/// The parameters of a step: one slab for all towers, or one each.
#[derive(Debug)]
pub struct Pulled<'a> {
    replicas: &'a [Slab],
}

impl<'a> Pulled<'a> {
    /// One slab for all towers, or one per tower; never none.
    pub(crate) fn of(replicas: &'a [Slab]) -> Self {
        Self { replicas }
    }

    /// What tower `tower` reads.
    pub fn replica(&self, tower: usize) -> &'a Slab {
        &self.replicas[tower.min(self.replicas.len() - 1)]
    }
}

/// What is behind a gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Contribution {
    /// Examples.
    pub examples: usize,
    /// Their mean loss.
    pub loss: f64,
}

/// What an update did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Applied {
    /// The step number after it.
    pub global_step: u64,
    /// The learning rate it used.
    pub rate: f64,
    /// The mean loss of everybody whose gradients were in it; `None` where nobody else's could be.
    pub loss: Option<f64>,
}

/// Variables, moving averages and slots by name, at one global step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// Updates so far.
    pub global_step: u64,
    /// In the layout's order; then averages, then slots.
    pub tensors: Vec<(String, HostTensor)>,
}

impl State {
    /// The floats of a tensor.
    pub fn find(&self, name: &str) -> Option<&HostTensor> {
        self.tensors.iter().find(|(n, _)| n == name).map(|(_, tensor)| tensor)
    }

    /// The first tensor that holds a NaN or an infinity.
    pub fn first_non_finite(&self) -> Option<&str> {
        let bad =
            |tensor: &HostTensor| tensor.as_f32().is_some_and(|x| !x.iter().all(|v| v.is_finite()));
        self.tensors.iter().find(|(_, tensor)| bad(tensor)).map(|(name, _)| name.as_str())
    }
}

/// What can be wrong with a store. Variants name the tensor.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A snapshot lacks a tensor.
    #[error("the checkpoint has no tensor {name}; {hint}")]
    Missing {
        /// The tensor.
        name: String,
        /// Why that may be.
        hint: &'static str,
    },
    /// A snapshot's tensor has another shape.
    #[error("tensor {name} has shape {found} in the checkpoint, the model needs {expected}")]
    Shape {
        /// The tensor.
        name: String,
        /// In the checkpoint.
        found: Shape,
        /// In the model.
        expected: Shape,
    },
    /// The variables are elsewhere and cannot be reached.
    #[error("{0}")]
    Remote(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Another thread died while it held the variables.
    #[error("a tower died while it updated the shared variables")]
    Poisoned,
}
