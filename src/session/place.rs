//! Placement: the device of every node, as TensorFlow's placer chooses it, with its log and its errors.

use super::graph::Graph;
use super::proto::attr_value::Value as Attr;
use super::{Node, OpError};
use crate::cluster::{DeviceKind, DeviceName};

/// The devices that a session may use.
#[derive(Clone, Debug)]
pub(super) struct Devices {
    /// In the order of their names.
    pub(super) all: Vec<Device>,
    /// The one for nodes that do not care.
    pub(super) default: usize,
}

/// One device.
#[derive(Clone, Debug)]
pub(super) struct Device {
    pub(super) text: String,
    pub(super) name: DeviceName,
    pub(super) incarnation: u64,
}

/// The wire's number of the type of resources.
const RESOURCE: i32 = 20;

/// Nodes that only look at the shape of their input.
const METADATA: [&str; 4] = ["Shape", "ShapeN", "Size", "Rank"];

impl Devices {
    /// The first device that fits: the default one where it does, then CPUs, then the others, by name.
    fn first(&self, wanted: &DeviceName, soft: bool) -> Option<usize> {
        let fits = |wanted: &DeviceName| {
            let accepts = |i: &usize| wanted.accepts(&self.all[*i].name);
            let cpu_last = |i: &usize| (self.all[*i].name.kind != Some(DeviceKind::Cpu), *i);
            let default = Some(self.default).filter(|i| accepts(i));
            default.or_else(|| (0..self.all.len()).filter(accepts).min_by_key(cpu_last))
        };
        fits(wanted).or_else(|| {
            // Soft placement gives up the kind and number of a device, not its task.
            let softer = DeviceName { kind: None, ordinal: None, ..wanted.clone() };
            if soft { fits(&softer) } else { None }
        })
    }

    fn refuse(&self, node: &Node<'_>, wanted: &str, is_gpu: bool) -> OpError {
        let name = node.name();
        let available: Vec<&str> = self.all.iter().map(|device| device.text.as_str()).collect();
        let gpu = match is_gpu {
            true => " The requested device appears to be a GPU, but CUDA is not enabled.",
            false => "",
        };
        OpError::invalid(format!(
            "Cannot assign a device for operation {name}: {{{{node {name}}}}} was explicitly assigned to {wanted} but \
             available devices are [ {} ]. Make sure the device specification refers to a valid device.{gpu}\n\t [[{name}]]",
            available.join(", ")
        ))
    }
}

/// Nodes that must be on one device, as a forest.
struct Groups {
    parent: Vec<usize>,
    /// What the members of a root's group ask for.
    wanted: Vec<DeviceName>,
}

impl Groups {
    fn root(&mut self, mut node: usize) -> usize {
        while self.parent[node] != node {
            self.parent[node] = self.parent[self.parent[node]];
            node = self.parent[node];
        }
        node
    }

    /// Puts a node beside another, whose wishes count more.
    fn join(&mut self, owner: usize, node: usize) {
        let (owner, node) = (self.root(owner), self.root(node));
        if owner != node {
            self.parent[node] = owner;
            let (strong, weak) = (&self.wanted[owner], &self.wanted[node]);
            // A device is meant as a whole: its number belongs to its kind.
            let weak = match strong.kind {
                Some(_) => DeviceName { kind: None, ordinal: None, ..weak.clone() },
                None => weak.clone(),
            };
            self.wanted[owner] = weak.merged(strong);
        }
    }
}

/// The devices of all nodes; `before` are those of the nodes that were placed earlier and keep their state there.
///
/// # Errors
/// INVALID_ARGUMENT in TensorFlow's words where a device is not there.
pub(super) fn place(
    graph: &Graph,
    devices: &Devices,
    soft: bool,
    before: &[usize],
) -> Result<(Vec<usize>, Vec<usize>), OpError> {
    let count = graph.nodes.len();
    let mut wanted = Vec::with_capacity(count);
    for def in &graph.nodes {
        let name: Result<DeviceName, _> = def.device.parse();
        let malformed = |_| {
            let (name, device) = (&def.name, &def.device);
            OpError::invalid(format!(
                "Malformed device specification '{device}' in node: {{{{node {name}}}}}"
            ))
        };
        wanted.push(name.map_err(malformed)?);
    }
    let mut groups = Groups { parent: (0..count).collect(), wanted };
    for node in 0..count {
        for name in Node::new(&graph.nodes[node]).colocated() {
            if let Some(other) = graph.find(name) {
                groups.join(other, node);
            }
        }
    }
    for (node, inputs) in graph.inputs.iter().enumerate() {
        let refs = graph.op(node).map_or(0, |op| op.refs);
        for (place, &(from, output)) in inputs.iter().enumerate() {
            if output.is_some() && (gives_resource(graph, from) || place < refs) {
                groups.join(from, node);
            }
        }
    }
    let mut consumers = vec![Vec::new(); count];
    for (node, inputs) in graph.inputs.iter().enumerate() {
        for &(from, _) in inputs {
            consumers[from].push(node);
        }
    }
    // Of a group's root.
    let mut placed: Vec<Option<usize>> = vec![None; count];
    for (node, &device) in before.iter().enumerate() {
        if keeps_state(graph, node) {
            let root = groups.root(node);
            placed[root] = Some(device);
        }
    }
    let late =
        |node: usize| is_source(graph, node) && !(node < before.len() && keeps_state(graph, node));
    let mut order: Vec<usize> = (0..count).filter(|&node| !late(node)).collect();
    order.extend((0..count).filter(|&node| late(node)));
    for &node in &order {
        let root = groups.root(node);
        if placed[root].is_some() {
            continue;
        }
        let wanted = groups.wanted[root].clone();
        let near = if is_source(graph, node) {
            // With those who read it, where they are together.
            let mut homes = consumers[node].iter().map(|&reader| placed[groups.root(reader)]);
            let first = homes.next().flatten();
            first.filter(|home| homes.all(|other| other == Some(*home)))
        } else if METADATA.contains(&graph.nodes[node].op.as_str()) {
            graph.inputs[node].first().and_then(|&(from, _)| placed[groups.root(from)])
        } else {
            None
        };
        let near = near.filter(|&device| wanted.accepts(&devices.all[device].name));
        let device = near.or_else(|| devices.first(&wanted, soft)).ok_or_else(|| {
            let own = &graph.nodes[node].device;
            let text = if own.is_empty() { wanted.to_string() } else { own.clone() };
            devices.refuse(
                &Node::new(&graph.nodes[node]),
                &text,
                wanted.kind == Some(DeviceKind::Gpu),
            )
        })?;
        placed[root] = Some(device);
    }
    let chosen =
        (0..count).map(|node| placed[groups.root(node)].unwrap_or(devices.default)).collect();
    Ok((chosen, order))
}

/// A node without inputs that makes one value; a reference to a variable is not one.
fn is_source(graph: &Graph, node: usize) -> bool {
    let single = !["NoOp", "ControlTrigger"].contains(&graph.nodes[node].op.as_str());
    let values = graph.inputs[node].iter().filter(|(_, output)| output.is_some()).count();
    values == 0 && single && !graph.op(node).is_some_and(|op| op.reference)
}

/// Whether a node gives a resource, or hands one on as `Switch` does in `tf.cond`.
fn gives_resource(graph: &Graph, node: usize) -> bool {
    let handed_on = || match Node::new(&graph.nodes[node]).attr("T") {
        Some(Attr::Type(number)) => *number == RESOURCE,
        _ => false,
    };
    graph.op(node).is_some_and(|op| op.handle) || handed_on()
}

/// A node whose place may not change while sessions live.
fn keeps_state(graph: &Graph, node: usize) -> bool {
    graph.op(node).is_some_and(|op| op.handle || op.reference)
}

/// The placement log: a line for each node in the order in which they were placed.
pub(super) fn log(graph: &Graph, devices: &Devices, chosen: &[usize], order: &[usize]) -> String {
    let line = |&node: &usize| {
        let def = &graph.nodes[node];
        format!("{}: ({}): {}\n", def.name, def.op, devices.all[chosen[node]].text)
    };
    order.iter().map(line).collect()
}
