//! [`Graph`]: the nodes that a session's client has sent so far.

use std::collections::HashMap;

use super::program::{OWN, known};
use super::proto::{GraphDef, NodeDef};
use super::{Input, Node, OpError, ops};

/// A graph that grows.
#[derive(Clone, Default)]
pub(super) struct Graph {
    pub(super) nodes: Vec<NodeDef>,
    /// Of each node: where its inputs come from, in order; `None` marks control.
    pub(super) inputs: Vec<Vec<(usize, Option<usize>)>>,
    index: HashMap<String, usize>,
}

impl Graph {
    /// Adds nodes; all or none.
    ///
    /// # Errors
    /// A name that is taken, an input that there is not, an operation that there is not.
    pub(super) fn extend(&mut self, graph: GraphDef) -> Result<(), OpError> {
        let before = self.nodes.len();
        self.nodes.extend(graph.node);
        let added = self.connect(before);
        if added.is_err() {
            for node in self.nodes.drain(before..) {
                if self.index.get(&node.name).is_some_and(|&i| i >= before) {
                    self.index.remove(&node.name);
                }
            }
            self.inputs.truncate(before);
        }
        added
    }

    fn connect(&mut self, before: usize) -> Result<(), OpError> {
        for (i, def) in self.nodes.iter().enumerate().skip(before) {
            if !OWN.contains(&def.op.as_str()) {
                known(&Node::new(def))?;
            }
            if def.name.is_empty() {
                let text = format!("a node of operation {} has no name", def.op);
                return Err(OpError::invalid(text));
            }
            if self.index.insert(def.name.clone(), i).is_some_and(|other| other != i) {
                let text = format!("Node '{}' already exists in the Graph", def.name);
                return Err(OpError::invalid(text).at(&def.name));
            }
        }
        for def in &self.nodes[before..] {
            let find = |text: &String| {
                let input = Input::parse(text);
                let found = self.index.get(input.node).map(|&from| (from, input.output));
                found.ok_or_else(|| {
                    let (name, input) = (&def.name, input.node);
                    OpError::invalid(format!("Node '{name}': Unknown input node '{input}'"))
                })
            };
            let inputs: Result<Vec<_>, _> = def.input.iter().map(find).collect();
            self.inputs.push(inputs?);
        }
        Ok(())
    }

    /// The node of this name.
    pub(super) fn find(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    /// The operation of a node; none for the executor's own.
    pub(super) fn op(&self, node: usize) -> Option<&'static ops::OpDef> {
        ops::find(&self.nodes[node].op)
    }

    /// A node and an output, by the name that the client gives a tensor.
    pub(super) fn tensor(&self, name: &str) -> Result<(usize, usize), OpError> {
        let input = Input::parse(name);
        let found = self.find(input.node).zip(input.output);
        found.ok_or_else(|| {
            OpError::invalid(format!(
                "Tensor {name}, specified in either feed_devices or fetch_devices was not found in the Graph"
            ))
        })
    }
}
