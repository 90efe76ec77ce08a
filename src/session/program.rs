//! [`Program`]: the part of a graph that one task runs in a step, as flat arrays.

use std::collections::HashMap;
use std::sync::Arc;

use super::ops::{self, Kernel};
use super::proto::GraphDef;
use super::weight::Weight;
use super::{Gpu, Input, Node, OpError, Tensor};
use crate::cluster::{DeviceKind, DeviceName, TaskId};

/// What the executor does for a node.
pub(super) enum Action {
    Kernel(Kernel),
    Const(Tensor),
    Nothing,
    Switch,
    Merge,
    /// Hands a tensor to another task, or another device of this one.
    Send(Arc<str>),
    /// Waits for one; from another task where one is named.
    Receive(Arc<str>, Option<TaskId>),
    /// Takes the client's tensor of this place.
    Feed(usize),
    /// Keeps a tensor for the client.
    Fetch(usize),
}

/// An edge out of a node.
#[derive(Clone, Copy)]
pub(super) struct Edge {
    /// The node it leads to.
    pub(super) to: u32,
    /// The slot whose value it carries; `None` for a control edge.
    pub(super) slot: Option<u32>,
    /// Which input of that node.
    pub(super) input: u32,
}

/// A node; ranges are of the program's arrays.
pub(super) struct Item {
    pub(super) name: String,
    pub(super) action: Action,
    pub(super) weight: Weight,
    pub(super) inputs: std::ops::Range<usize>,
    pub(super) slots: std::ops::Range<usize>,
    pub(super) edges: std::ops::Range<usize>,
    /// Edges into it.
    pub(super) pending: u32,
    /// Those of them that are control.
    pub(super) controls: u32,
}

/// A graph of one task, ready to run any number of times at once.
pub struct Program {
    pub(super) items: Vec<Item>,
    /// The slot of each input.
    pub(super) inputs: Vec<u32>,
    pub(super) edges: Vec<Edge>,
    /// How many inputs read each slot.
    pub(super) readers: Vec<u32>,
    /// Nodes that wait for nothing, those that wait for other tasks last.
    pub(super) sources: Vec<u32>,
    /// The keys of what the client feeds and fetches, by place.
    pub(super) feeds: Vec<Arc<str>>,
    pub(super) fetches: Vec<Arc<str>>,
}

/// The rendezvous key of a `_Send` or `_Recv`.
pub(super) fn key(from: &str, incarnation: i64, to: &str, tensor: &str) -> String {
    format!("{from};{:016x};{to};{tensor};0:0", incarnation as u64)
}

fn key_of(node: &Node<'_>) -> Result<Arc<str>, OpError> {
    let incarnation = node.int("send_device_incarnation", 0)?;
    let (from, to) = (node.text("send_device")?, node.text("recv_device")?);
    Ok(key(from, incarnation, to, node.text("tensor_name")?).into())
}

/// The task of a device.
pub(super) fn task_of(device: &str) -> Result<TaskId, OpError> {
    let bad = || OpError::invalid(format!("'{device}' does not name a task"));
    let name: DeviceName = device.parse().map_err(|_| bad())?;
    Ok(TaskId::new(name.job.ok_or_else(bad)?, name.task.ok_or_else(bad)?))
}

impl Program {
    /// Builds the kernels of a graph that runs on task `own`, which has these GPUs.
    ///
    /// # Errors
    /// An operation or a GPU that there is not, attributes that do not fit, an input that is not in the graph, a loop.
    pub fn build(graph: &GraphDef, own: &TaskId, gpus: &[Arc<Gpu>]) -> Result<Self, OpError> {
        let nodes = &graph.node;
        let mut index = HashMap::with_capacity(nodes.len());
        for (i, def) in nodes.iter().enumerate() {
            if index.insert(def.name.as_str(), i).is_some() {
                let text = format!("Node '{}' is not unique", def.name);
                return Err(OpError::invalid(text));
            }
        }
        // Who reads which output.
        let mut parsed = Vec::with_capacity(nodes.len());
        let mut outputs = vec![0; nodes.len()];
        for def in nodes {
            let mut list = Vec::with_capacity(def.input.len());
            for text in &def.input {
                let input = Input::parse(text);
                let Some(&from) = index.get(input.node) else {
                    let (name, input) = (&def.name, input.node);
                    let text = format!("Node '{name}': Unknown input node '{input}'");
                    return Err(OpError::invalid(text));
                };
                if let Some(output) = input.output {
                    if output >= MAX_OUTPUTS {
                        return Err(OpError::invalid(format!(
                            "Node '{}': input '{text}' is out of range",
                            def.name
                        )));
                    }
                    outputs[from] = outputs[from].max(output + 1);
                }
                list.push((from, input.output));
            }
            parsed.push(list);
        }
        let mut first = Vec::with_capacity(nodes.len() + 1);
        let mut total = 0usize;
        for count in &outputs {
            first.push(total);
            total += count;
        }
        let edges: usize = parsed.iter().map(Vec::len).sum();
        if total > MAX_OUTPUTS + 64 * edges {
            return Err(OpError::invalid("the graph names more outputs than it reads"));
        }
        let mut program = Self {
            items: Vec::with_capacity(nodes.len()),
            inputs: Vec::new(),
            edges: Vec::new(),
            readers: vec![0; total],
            sources: Vec::new(),
            feeds: Vec::new(),
            fetches: Vec::new(),
        };
        let mut out: Vec<Vec<Edge>> = vec![Vec::new(); nodes.len()];
        for (i, (def, list)) in nodes.iter().zip(&parsed).enumerate() {
            let start = program.inputs.len();
            let mut controls = 0;
            for &(from, output) in list {
                let slot = output.map(|output| (first[from] + output) as u32);
                let input = (program.inputs.len() - start) as u32;
                if let Some(slot) = slot {
                    program.readers[slot as usize] += 1;
                    program.inputs.push(slot);
                } else {
                    controls += 1;
                }
                out[from].push(Edge { to: i as u32, slot, input });
            }
            let action = program.action(&Node::new(def), own, gpus).map_err(|e| e.at(&def.name))?;
            program.items.push(Item {
                name: def.name.clone(),
                action,
                weight: Weight::of(&def.op),
                inputs: start..program.inputs.len(),
                slots: first[i]..first[i] + outputs[i],
                edges: 0..0,
                pending: list.len() as u32,
                controls,
            });
        }
        for (item, edges) in program.items.iter_mut().zip(out) {
            let start = program.edges.len();
            program.edges.extend(edges);
            item.edges = start..program.edges.len();
        }
        program.check_order()?;
        let waits = |i: &u32| matches!(program.items[*i as usize].action, Action::Receive(..));
        let all = 0..program.items.len() as u32;
        let sources = all.filter(|i| program.items[*i as usize].pending == 0);
        let (waiting, others): (Vec<u32>, Vec<u32>) = sources.partition(waits);
        program.sources = others.into_iter().chain(waiting).collect();
        Ok(program)
    }

    /// Those of the fetched values that have these keys.
    ///
    /// # Errors
    /// There is none of a key.
    pub(super) fn pick(
        &self,
        fetched: Vec<Tensor>,
        wanted: &[String],
    ) -> Result<Vec<Tensor>, OpError> {
        let of = |key: &String| {
            let missing = || OpError::invalid(format!("nothing is sent to the client as {key}"));
            let place = self.fetches.iter().position(|fetch| **fetch == **key);
            place.map(|place| fetched[place].clone()).ok_or_else(missing)
        };
        wanted.iter().map(of).collect()
    }

    fn action(
        &mut self,
        node: &Node<'_>,
        own: &TaskId,
        gpus: &[Arc<Gpu>],
    ) -> Result<Action, OpError> {
        let client = || node.bool("client_terminated", false);
        let place = |keys: &mut Vec<Arc<str>>, key| {
            keys.push(key);
            keys.len() - 1
        };
        let needs = |n: usize| match node.inputs() {
            inputs if inputs == n => Ok(()),
            inputs => {
                let op = node.op();
                Err(OpError::invalid(format!("{op} takes {n} inputs, not {inputs}")))
            }
        };
        Ok(match node.op() {
            "Const" => {
                let def = ops::find("Const").ok_or_else(|| OpError::internal("no Const"))?;
                (def.build)(node)?;
                Action::Const(node.tensor("value")?)
            }
            "NoOp" | "ControlTrigger" => Action::Nothing,
            "Switch" | "RefSwitch" => {
                needs(2)?;
                Action::Switch
            }
            "Merge" | "RefMerge" => Action::Merge,
            "_Send" | "_HostSend" => {
                needs(1)?;
                match client()? {
                    true => Action::Fetch(place(&mut self.fetches, key_of(node)?)),
                    false => Action::Send(key_of(node)?),
                }
            }
            "_Recv" | "_HostRecv" if client()? => {
                Action::Feed(place(&mut self.feeds, key_of(node)?))
            }
            "_Recv" | "_HostRecv" => {
                let from = task_of(node.text("send_device")?)?;
                Action::Receive(key_of(node)?, (from != *own).then_some(from))
            }
            _ => {
                let host = (known(node)?.build)(node)?;
                Action::Kernel(match gpu_of(node, gpus)? {
                    Some(gpu) => ops::on_gpu(node, host, gpu)?,
                    None => host,
                })
            }
        })
    }

    /// A graph whose nodes wait for each other in a circle never ends.
    fn check_order(&self) -> Result<(), OpError> {
        let mut pending: Vec<u32> = self.items.iter().map(|item| item.pending).collect();
        let mut ready: Vec<usize> = (0..pending.len()).filter(|&i| pending[i] == 0).collect();
        let mut done = 0;
        while let Some(i) = ready.pop() {
            done += 1;
            for edge in &self.edges[self.items[i].edges.clone()] {
                let left = &mut pending[edge.to as usize];
                *left -= 1;
                if *left == 0 {
                    ready.push(edge.to as usize);
                }
            }
        }
        match pending.iter().position(|&left| left > 0) {
            None => Ok(()),
            Some(_) if done == pending.len() => Ok(()),
            Some(i) => {
                let name = &self.items[i].name;
                let text = format!(
                    "the graph has a cycle at node '{name}'; while loops are not supported"
                );
                Err(OpError::invalid(text).at(name))
            }
        }
    }
}

/// The GPU that a node was placed on.
fn gpu_of<'a>(node: &Node<'_>, gpus: &'a [Arc<Gpu>]) -> Result<Option<&'a Arc<Gpu>>, OpError> {
    let device = &node.def().device;
    let place: DeviceName = device.parse().unwrap_or_default();
    if place.kind != Some(DeviceKind::Gpu) {
        return Ok(None);
    }
    let gpu = gpus.get(place.ordinal.unwrap_or_default() as usize);
    let missing =
        || OpError::invalid(format!("this task has {} GPUs, and no {device}", gpus.len()));
    gpu.map(Some).ok_or_else(missing)
}

/// No operation has more outputs. A name with a large index asks for memory, and so do many such names.
const MAX_OUTPUTS: usize = 1 << 16;

/// Operations that the executor does itself.
pub(super) const OWN: [&str; 9] = [
    "Switch",
    "RefSwitch",
    "Merge",
    "RefMerge",
    "_Send",
    "_Recv",
    "_HostSend",
    "_HostRecv",
    "Const",
];

/// The operation of a node.
///
/// # Errors
/// UNIMPLEMENTED, with names as TensorFlow's client looks for them.
pub(super) fn known(node: &Node<'_>) -> Result<&'static ops::OpDef, OpError> {
    ops::find(node.op()).ok_or_else(|| {
        let (op, name) = (node.op(), node.name());
        OpError::unimplemented(format!(
            "Op type not registered '{op}': node {{{{node {name}}}}} needs an operation that tftrain does not have; \
             docs/sessions.md lists those that it has"
        ))
    })
}
