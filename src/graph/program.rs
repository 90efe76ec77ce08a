//! [`Program`]: a graph lowered to a straight line of steps over planned memory.

use std::sync::Arc;

use super::fuse::{Fusions, Plan, fuse};
use super::memory::{Buffer, plan};
use super::{Graph, NodeId, Op, VarTable};
use crate::tensor::Shape;

/// The memory a view lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A value fed at each step, by its number.
    Feed(usize),
    /// The slab of parameters.
    Variables,
    /// The slab of gradients.
    Gradients,
    /// The program's own memory.
    Arena,
}

/// A range of floats in one of the program's memories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Which memory.
    pub place: Place,
    /// First float.
    pub offset: usize,
    /// Number of floats.
    pub len: usize,
}

/// One operation over views.
#[derive(Clone, Debug)]
pub struct Step {
    /// Name of the node it computes.
    pub name: String,
    /// What it computes.
    pub op: Op,
    /// Where its operands lie, and their extents.
    pub inputs: Vec<(View, Shape)>,
    /// Where its output lies; overlaps no operand.
    pub output: View,
    /// Extents of the output.
    pub shape: Shape,
    /// Where [`Op::Conv2dPool`] or [`Op::LrnPool`] notes, a byte each, which tap of its window each maximum was; apart from all else.
    pub winners: Option<View>,
}

/// A value to be read after a run.
#[derive(Clone, Debug)]
pub struct Fetch {
    /// Name of the node.
    pub name: String,
    /// Where it lies.
    pub view: View,
    /// Its extents.
    pub shape: Shape,
}

/// A one-device graph as a straight line of steps over views of the feeds, two slabs and one arena.
#[derive(Clone, Debug)]
pub struct Program {
    /// In execution order.
    pub steps: Vec<Step>,
    /// Floats of the arena.
    pub arena: usize,
    /// Layout of both slabs.
    pub table: Arc<VarTable>,
    /// Extents of the feeds.
    pub feeds: Vec<Shape>,
    /// What can be read after a run.
    pub fetches: Vec<Fetch>,
}

impl Program {
    /// Lowers what `fetches` and `gradients` need. `gradients` is empty, or has one node per row of the table;
    /// each is computed in place in the slab of gradients. `fusions` are those that the device has kernels for.
    pub fn lower(
        graph: &Graph,
        fetches: &[NodeId],
        gradients: &[NodeId],
        fusions: Fusions,
    ) -> Program {
        assert!(gradients.is_empty() || gradients.len() == graph.table().rows().len());
        let n = graph.nodes().len();
        let mut kept = vec![false; n];
        fetches.iter().chain(gradients).for_each(|id| kept[id.0] = true);
        let mut needed = kept.clone();
        let mut uses = vec![0; n];
        for (id, node) in graph.nodes().rev() {
            if needed[id.0] {
                for input in &node.inputs {
                    needed[input.0] = true;
                    uses[input.0] += 1;
                }
            }
        }
        let mut fused: Plan = graph
            .nodes()
            .map(|(id, node)| needed[id.0].then(|| (node.op.clone(), node.inputs.clone())))
            .collect();
        let pools = fuse(graph, &mut fused, uses, &kept, fusions);

        // A gradient is computed in place where its node is a fresh result that no other row claims.
        let mut home: Vec<Option<View>> = vec![None; n];
        let mut copies = Vec::new();
        for (&id, row) in gradients.iter().zip(graph.table().rows()) {
            let slot = View { place: Place::Gradients, offset: row.offset, len: row.range().len() };
            let fresh = !matches!(
                graph.node(id).op,
                Op::Placeholder(_) | Op::Variable { .. } | Op::Reshape(_)
            );
            if fresh && home[id.0].is_none() {
                home[id.0] = Some(slot);
            } else {
                copies.push((id, slot));
            }
        }

        // Order of execution; reshapes are other names for their operand.
        let mut root: Vec<NodeId> = (0..n).map(NodeId).collect();
        let mut order = Vec::new();
        for (id, node) in graph.nodes() {
            match (&fused[id.0], &node.op) {
                (Some((Op::Reshape(_), inputs)), _) => root[id.0] = root[inputs[0].0],
                (Some(_), Op::Placeholder(_)) => {
                    let feed = graph.feeds().iter().position(|f| *f == id);
                    let place = Place::Feed(feed.expect("every placeholder is a feed"));
                    home[id.0] = Some(View { place, offset: 0, len: node.shape.elements() });
                }
                (Some(_), Op::Variable { row, shape }) => {
                    let offset = graph.table().rows()[*row].offset;
                    let view = View { place: Place::Variables, offset, len: shape.elements() };
                    home[id.0] = Some(view);
                }
                (Some(_), _) => order.push(id),
                (None, _) => {}
            }
        }

        let mut last: Vec<usize> = vec![0; n];
        for (position, id) in order.iter().enumerate() {
            let (_, inputs) = fused[id.0].as_ref().expect("ordered nodes are planned");
            last[id.0] = last[id.0].max(position);
            inputs.iter().for_each(|input| last[root[input.0].0] = position);
        }
        for id in fetches.iter().chain(copies.iter().map(|(id, _)| id)) {
            last[root[id.0].0] = order.len();
        }
        let mut temporaries: Vec<(NodeId, Buffer)> = order
            .iter()
            .enumerate()
            .filter(|(_, id)| home[id.0].is_none())
            .map(|(first, &id)| {
                let len = graph.node(id).shape.elements();
                (id, Buffer { len, first, last: last[id.0] })
            })
            .collect();
        for (position, id) in order.iter().enumerate() {
            if let Some((_, winners)) = pools.iter().find(|(pool, _)| pool == id) {
                let shape = &graph.node(*id).shape;
                let len =
                    shape[0] * (shape.elements() / shape[0].max(1)).div_ceil(size_of::<f32>());
                let last = last[winners.0];
                temporaries.push((*winners, Buffer { len, first: position, last }));
            }
        }
        let (offsets, arena) = plan(&temporaries.iter().map(|(_, b)| *b).collect::<Vec<_>>());
        for ((id, buffer), offset) in temporaries.iter().zip(offsets) {
            home[id.0] = Some(View { place: Place::Arena, offset, len: buffer.len });
        }

        let view = |id: NodeId| home[root[id.0].0].expect("every needed value has a home");
        let operand = |id: &NodeId| (view(*id), graph.node(*id).shape.clone());
        let mut steps: Vec<Step> = order
            .iter()
            .map(|&id| {
                let (op, inputs) = fused[id.0].clone().expect("ordered nodes are planned");
                let node = graph.node(id);
                let inputs = inputs.iter().map(operand).collect();
                let (name, shape) = (node.name.clone(), node.shape.clone());
                let winners = pools.iter().find(|(pool, _)| *pool == id).map(|(_, id)| view(*id));
                Step { name, op, inputs, output: view(id), shape, winners }
            })
            .collect();
        steps.extend(copies.into_iter().map(|(id, slot)| Step {
            name: graph.node(id).name.clone(),
            op: Op::Scale(1.0),
            inputs: vec![operand(&id)],
            output: slot,
            shape: graph.node(id).shape.clone(),
            winners: None,
        }));
        Program {
            steps,
            arena,
            table: Arc::new(graph.table().clone()),
            feeds: graph.feeds().iter().map(|&f| graph.node(f).shape.clone()).collect(),
            fetches: fetches
                .iter()
                .map(|&id| {
                    let node = graph.node(id);
                    Fetch { name: node.name.clone(), view: view(id), shape: node.shape.clone() }
                })
                .collect(),
        }
    }
}
