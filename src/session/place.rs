//! Placement: the device of every node, as TensorFlow's placer chooses it, with its log and its errors.

use std::collections::BTreeMap;

use super::graph::Graph;
use super::ops::{self, Support};
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
    /// Whether a device is one that is wished for, with kernels for all who share it.
    fn suits(&self, device: usize, wish: &Wish) -> bool {
        let name = &self.all[device].name;
        let has_kernels = name.kind != Some(DeviceKind::Gpu) || wish.support != Support::None;
        wish.device.accepts(name) && has_kernels
    }

    /// The first device that suits: of the default one's task where there is one, then a GPU for those who compute there and a CPU for
    /// all others, then by name.
    fn first(&self, wish: &Wish, soft: bool) -> Option<usize> {
        let home = &self.all[self.default].name;
        let best = match wish.support {
            Support::Device => DeviceKind::Gpu,
            Support::Host | Support::None => DeviceKind::Cpu,
        };
        let order = |i: &usize| {
            let name = &self.all[*i].name;
            let away = (&name.job, name.task) != (&home.job, home.task);
            (away, name.kind != Some(best), *i)
        };
        let fits =
            |wish: &Wish| (0..self.all.len()).filter(|i| self.suits(*i, wish)).min_by_key(order);
        fits(wish).or_else(|| {
            // Soft placement gives up the kind and number of a device, not its task.
            let device = DeviceName { kind: None, ordinal: None, ..wish.device.clone() };
            if soft { fits(&Wish { device, ..wish.clone() }) } else { None }
        })
    }

    fn names(&self) -> String {
        self.all.iter().map(|device| device.text.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// Why no device suits a node, whose group has these members.
    fn refuse(&self, graph: &Graph, node: usize, wish: &Wish, members: &[usize]) -> OpError {
        let def = &graph.nodes[node];
        let (name, own) = (&def.name, &def.device);
        let is_gpu = |name: &DeviceName| name.kind == Some(DeviceKind::Gpu);
        let why = if !self.all.iter().any(|device| wish.device.accepts(&device.name)) {
            let wanted = if own.is_empty() { wish.device.to_string() } else { own.clone() };
            let cuda = self.all.iter().any(|device| is_gpu(&device.name));
            let gpu = match is_gpu(&wish.device) && !cuda {
                true => " The requested device appears to be a GPU, but CUDA is not enabled.",
                false => "",
            };
            format!(
                "{{{{node {name}}}}} was explicitly assigned to {wanted} but available devices are [ {} ]. Make sure the device \
                 specification refers to a valid device.{gpu}",
                self.names()
            )
        } else if own.parse().is_ok_and(|own: DeviceName| own == wish.device) {
            format!(
                "Could not satisfy explicit device specification '{own}' because no supported kernel for GPU devices is available.{}",
                debug_info(graph, members)
            )
        } else {
            format!(
                "Could not satisfy explicit device specification '{own}' because the node {{{{colocation_node {name}}}}} was colocated \
                 with a group of nodes that required incompatible device '{}'. All available devices [{}]. {}",
                wish.device,
                self.names(),
                debug_info(graph, members)
            )
        };
        OpError::invalid(format!(
            "Cannot assign a device for operation {name}: {why}\n\t [[{name}]]"
        ))
    }
}

/// The members of a group, and where their operations have kernels.
fn debug_info(graph: &Graph, members: &[usize]) -> String {
    let types: BTreeMap<&str, &str> = members
        .iter()
        .map(|&node| (&*graph.nodes[node].op, kinds(&Node::new(&graph.nodes[node]))))
        .collect();
    let types: String = types.iter().map(|(op, kinds)| format!("\n{op}: {kinds}")).collect();
    let member = |&node: &usize| {
        let def = &graph.nodes[node];
        format!("\n  {} ({}) {}", def.name, def.op, def.device)
    };
    let members: String = members.iter().map(member).collect();
    format!(
        "\nColocation Debug Info:\nColocation group had the following types and supported devices: {types}\n\n\
         Colocation members, user-requested devices, and framework assigned devices, if any:{members}\n"
    )
}

fn kinds(node: &Node<'_>) -> &'static str {
    match ops::support(node) {
        Support::None => "CPU",
        Support::Host | Support::Device => "GPU CPU",
    }
}

/// What nodes that must be on one device ask for.
#[derive(Clone)]
struct Wish {
    device: DeviceName,
    /// What GPUs are to them; nothing where there are none.
    support: Support,
}

/// Nodes that must be on one device, as a forest.
struct Groups {
    parent: Vec<usize>,
    /// Of the members of a root's group.
    wishes: Vec<Wish>,
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
            let (strong, weak) = (&self.wishes[owner], &self.wishes[node]);
            let support = strong.support.and(weak.support);
            // A device is meant as a whole: its number belongs to its kind.
            let weak = match strong.device.kind {
                Some(_) => DeviceName { kind: None, ordinal: None, ..weak.device.clone() },
                None => weak.device.clone(),
            };
            self.wishes[owner] = Wish { device: weak.merged(&strong.device), support };
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
    let has_gpus = devices.all.iter().any(|device| device.name.kind == Some(DeviceKind::Gpu));
    let mut wishes = Vec::with_capacity(count);
    for def in &graph.nodes {
        let name: Result<DeviceName, _> = def.device.parse();
        let malformed = |_| {
            let (name, device) = (&def.name, &def.device);
            OpError::invalid(format!(
                "Malformed device specification '{device}' in node: {{{{node {name}}}}}"
            ))
        };
        let support = if has_gpus { ops::support(&Node::new(def)) } else { Support::None };
        wishes.push(Wish { device: name.map_err(malformed)?, support });
    }
    let mut groups = Groups { parent: (0..count).collect(), wishes };
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
        let wish = groups.wishes[root].clone();
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
        let near = near.filter(|&device| devices.suits(device, &wish));
        let device = near.or_else(|| devices.first(&wish, soft)).ok_or_else(|| {
            let members: Vec<usize> = (0..count).filter(|&i| groups.root(i) == root).collect();
            devices.refuse(graph, node, &wish, &members)
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
