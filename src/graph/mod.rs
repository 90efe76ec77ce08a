//! The trainer's graph: append-only, static shapes, one dtype (f32), one device.
//!
//! Reading order: [`Op`] is the closed set of operations, [`Builder`] appends them, [`infer`] gives shapes,
//! [`gradients`] appends the backward pass, [`Program::lower`] turns it all into a straight line over planned memory.
//! Class labels are whole numbers in f32, exact up to 2^24.

mod builder;
mod cost;
mod fuse;
mod grad;
mod infer;
mod memory;
mod op;
mod program;
mod text;
mod vars;
mod window;

pub use builder::Builder;
pub use fuse::Fusions;
pub use grad::gradients;
pub use infer::infer;
pub(crate) use memory::{Buffer, plan};
pub use op::{LrnParams, Op};
pub use program::{Fetch, Place, Program, Step, View};
pub use text::dump;
pub use vars::{Init, Role, VarRow, VarTable};
pub use window::{Padding, Window};

use crate::tensor::Shape;

/// A node by its position in the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub usize);

/// One operation with its single output.
#[derive(Clone, Debug)]
pub struct Node {
    /// Unique, with `/` between scopes: `conv1/Conv2D`.
    pub name: String,
    /// What it computes.
    pub op: Op,
    /// Its operands; always earlier nodes.
    pub inputs: Vec<NodeId>,
    /// The extents of its output.
    pub shape: Shape,
}

/// An append-only list of nodes; inputs precede users, so it is its own topological order.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    nodes: Vec<Node>,
    feeds: Vec<NodeId>,
    table: VarTable,
    variables: Vec<NodeId>,
    followed: Vec<(usize, NodeId)>,
}

impl Graph {
    /// The node behind an id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0]
    }

    /// All nodes, inputs before users.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = (NodeId, &Node)> + DoubleEndedIterator {
        self.nodes.iter().enumerate().map(|(i, node)| (NodeId(i), node))
    }

    /// The layout of the variables, in the order of their creation.
    pub fn table(&self) -> &VarTable {
        &self.table
    }

    /// The node of each row of [`Graph::table`].
    pub fn variables(&self) -> &[NodeId] {
        &self.variables
    }

    /// The placeholders in the order in which a step feeds them.
    pub fn feeds(&self) -> &[NodeId] {
        &self.feeds
    }

    /// The statistics by their rows of [`Graph::table`], each with the value that it follows.
    pub fn followed(&self) -> &[(usize, NodeId)] {
        &self.followed
    }

    /// Appends a node. The name gets a suffix `_1`, `_2`, ... if it is taken.
    pub fn add(&mut self, name: &str, op: Op, inputs: &[NodeId]) -> Result<NodeId, GraphError> {
        let name = self.unique(name);
        let shapes: Vec<&Shape> = inputs.iter().map(|&i| &self.node(i).shape).collect();
        let shape = infer(&op, &shapes).map_err(|reason| GraphError::Node {
            node: name.clone(),
            op: op.name(),
            reason,
        })?;
        let id = NodeId(self.nodes.len());
        match op {
            Op::Placeholder(_) => self.feeds.push(id),
            Op::Variable { .. } => self.variables.push(id),
            _ => {}
        }
        self.nodes.push(Node { name, op, inputs: inputs.to_vec(), shape });
        Ok(id)
    }

    /// Appends a variable and its row in the layout.
    fn add_variable(
        &mut self,
        name: &str,
        shape: Shape,
        init: Init,
        role: Role,
    ) -> Result<NodeId, GraphError> {
        let row = self.table.push(name, shape.clone(), init, role)?;
        self.add(name, Op::Variable { row, shape }, &[])
    }

    fn unique(&self, name: &str) -> String {
        let taken = |n: &str| self.nodes.iter().any(|node| node.name == n);
        if !taken(name) {
            return name.to_owned();
        }
        let mut suffixes = (1usize..).map(|i| format!("{name}_{i}"));
        suffixes.find(|n| !taken(n)).expect("the suffixes never end")
    }
}

/// What can be wrong with a graph. Every variant names the node or variable.
#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    /// The operands do not fit the operation.
    #[error("node {node} ({op}): {reason}")]
    Node {
        /// Name of the node.
        node: String,
        /// Its operation.
        op: &'static str,
        /// What does not fit.
        reason: String,
    },
    /// The operation has no gradient.
    #[error("node {node} ({op}) has no gradient, but the loss depends on a variable through it")]
    NoGradient {
        /// Name of the node.
        node: String,
        /// Its operation.
        op: &'static str,
    },
    /// The loss is not a scalar.
    #[error("node {node} cannot be a loss: its shape is {shape}, not a scalar")]
    NotScalar {
        /// Name of the node.
        node: String,
        /// Its shape.
        shape: Shape,
    },
    /// Two variables of one name.
    #[error("variable {name} exists already")]
    DuplicateVariable {
        /// Name of the variable.
        name: String,
    },
}
