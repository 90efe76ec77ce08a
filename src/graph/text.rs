//! A graph as text, one line a node.

use std::fmt::Write;

use super::Graph;

/// `name: (Op) [shape] <- inputs`, in execution order.
pub fn dump(graph: &Graph) -> String {
    let mut out = String::new();
    for (_, node) in graph.nodes() {
        let inputs: Vec<&str> =
            node.inputs.iter().map(|&input| graph.node(input).name.as_str()).collect();
        // Writing to a string cannot fail.
        let _ = write!(out, "{}: ({}) {}", node.name, node.op.name(), node.shape);
        if !inputs.is_empty() {
            let _ = write!(out, " <- {}", inputs.join(", "));
        }
        out.push('\n');
    }
    out
}
