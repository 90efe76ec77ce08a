//! The operations of sessions: [`find`] knows them by name, one file a family holds their kernels.
//!
//! # Add an operation
//! A row in `OPS` of its family: its name, how its kernel is built from a node (attributes are read and checked there, once),
//! and, where it is not a plain function, what it does to variables and resources. `Switch`, `Merge`, `_Send` and `_Recv` are
//! the executor's own: they decide which nodes run.

mod array;
mod broadcast;
mod elementwise;
mod flow;
mod gather;
mod gpu;
mod io;
mod math;
mod nn;
mod number;
mod parts;
mod picture;
mod queue;
mod random;
mod state;
mod summary;
mod train;

use std::collections::HashMap;
use std::sync::OnceLock;

use super::program::OWN;
use super::{Call, DType, Node, OpError};
use crate::device::cpu::{Ctx, Isa};

pub use gpu::on_gpu;
pub(super) use gpu::{Support, support};

/// A kernel's function.
type Run = Box<dyn Fn(&mut Call<'_>) -> Result<(), OpError> + Send + Sync>;

/// What a node does, built once for every graph that it is in.
pub struct Kernel {
    /// Computes outputs from inputs.
    pub run: Run,
    /// Whether it may block its thread, as files do: it never runs where the network is served.
    pub blocks: bool,
}

impl Kernel {
    /// A kernel that computes, or waits for other steps by [`Call::wait`].
    pub fn new(run: impl Fn(&mut Call<'_>) -> Result<(), OpError> + Send + Sync + 'static) -> Self {
        Self { run: Box::new(run), blocks: false }
    }

    /// A kernel that may block its thread.
    pub fn blocking(
        run: impl Fn(&mut Call<'_>) -> Result<(), OpError> + Send + Sync + 'static,
    ) -> Self {
        Self { run: Box::new(run), blocks: true }
    }
}

/// Where and how wide the kernels that are shared with the trainer run.
fn context() -> Ctx {
    static CONTEXT: OnceLock<Ctx> = OnceLock::new();
    *CONTEXT.get_or_init(|| Ctx { isa: Isa::detect(), threads: crate::util::cores() })
}

/// The operation exists, but not for this type.
fn no_kernel(dtype: DType) -> OpError {
    OpError::unimplemented(format!("this operation has no kernel for tensors of type {dtype}"))
}

/// How a kernel is made from a node.
type Build = fn(&Node<'_>) -> Result<Kernel, OpError>;

/// An operation.
pub struct OpDef {
    /// TensorFlow's name.
    pub name: &'static str,
    /// Makes the kernel of a node; fails where the node's attributes do not fit.
    pub build: Build,
    /// Its first so many inputs are references to variables, which it must be beside.
    pub refs: usize,
    /// Whether its output is a resource, which those that use it must be beside.
    pub handle: bool,
    /// Whether its output is a reference to a variable.
    pub reference: bool,
}

impl OpDef {
    const fn new(name: &'static str, build: Build) -> Self {
        Self { name, build, refs: 0, handle: false, reference: false }
    }

    /// Its first so many inputs are references to variables.
    const fn refs(mut self, refs: usize) -> Self {
        self.refs = refs;
        self
    }

    /// Its output is a resource.
    const fn handle(mut self) -> Self {
        self.handle = true;
        self
    }

    /// Its output is a reference to a variable.
    const fn reference(mut self) -> Self {
        self.reference = true;
        self
    }
}

const FAMILIES: [&[OpDef]; 14] = [
    array::OPS,
    elementwise::OPS,
    flow::OPS,
    gather::OPS,
    parts::OPS,
    picture::OPS,
    io::OPS,
    math::OPS,
    nn::OPS,
    queue::OPS,
    random::OPS,
    state::OPS,
    summary::OPS,
    train::OPS,
];

/// The operation of this name.
pub fn find(name: &str) -> Option<&'static OpDef> {
    static ALL: OnceLock<HashMap<&'static str, &'static OpDef>> = OnceLock::new();
    let all = || FAMILIES.iter().flat_map(|family| family.iter()).map(|op| (op.name, op)).collect();
    ALL.get_or_init(all).get(name).copied()
}
