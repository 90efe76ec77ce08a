//! Cuts a pruned graph into the parts of its tasks. An edge from one to another becomes a `_Send` and a `_Recv`, once for each
//! tensor and task; what the client feeds and fetches becomes a `_Recv` and a `_Send` that end at the client.

use std::collections::BTreeMap;

use super::graph::Graph;
use super::place::{Device, Devices};
use super::plan::{Needed, Output, is_fed};
use super::program::key;
use super::proto::attr_value::Value as Attr;
use super::proto::{AttrValue, GraphDef, NodeDef, VersionDef};
use super::{DType, Node, Tensor, codec};
use crate::cluster::TaskId;

/// The version of graphs that TensorFlow's servers are told; any that knows these operations.
const PRODUCER: i32 = 1395;

/// What one task runs in a step.
pub(super) struct Part {
    pub(super) task: TaskId,
    pub(super) graph: GraphDef,
    /// The feeds it takes: their places among the step's, and their keys.
    pub(super) feeds: Vec<(usize, String)>,
    /// The keys of what it gives to the client, by place.
    pub(super) fetches: Vec<String>,
}

/// A device by index among the session's.
type DeviceId = usize;

/// The kind of an edge between tasks; all control edges out of a node are one.
type Crossing = (usize, Option<usize>);

struct Cut<'a> {
    graph: &'a Graph,
    devices: &'a Devices,
    tasks: Vec<TaskId>,
    parts: Vec<Part>,
    /// The node that brings a crossing to a part.
    brought: BTreeMap<(Crossing, usize), String>,
    /// The node that brings a feed to a part.
    fed: BTreeMap<(Output, usize), String>,
    edges: usize,
}

/// The parts of a step, and where the outputs `fetched` are: the part, and the place among its fetches.
pub(super) fn partition(
    graph: &Graph,
    devices: &Devices,
    chosen: &[DeviceId],
    needed: &Needed,
    fetched: &[Output],
) -> (Vec<Part>, BTreeMap<Output, (usize, usize)>) {
    let mut cut = Cut {
        graph,
        devices,
        tasks: Vec::new(),
        parts: Vec::new(),
        brought: BTreeMap::new(),
        fed: BTreeMap::new(),
        edges: 0,
    };
    for &node in &needed.nodes {
        let here = chosen[node];
        let part = cut.part(here);
        let mut def = graph.nodes[node].clone();
        def.device.clone_from(&devices.all[here].text);
        let texts = std::mem::take(&mut def.input);
        for (text, &(from, output)) in texts.into_iter().zip(&graph.inputs[node]) {
            if is_fed(graph, &needed.feeds, from, output) {
                // Control edges from what is fed wait for nothing.
                if let Some(output) = output {
                    let place = needed.feeds[&(from, output)];
                    def.input.push(cut.feed((from, output), place, here, part));
                }
                continue;
            }
            let there = chosen[from];
            if cut.part(there) == part {
                def.input.push(text);
                continue;
            }
            let name = cut.bring((from, output), there, here, part);
            let text = if output.is_some() { name } else { format!("^{name}") };
            // The same control edge twice says nothing new.
            if output.is_some() || !def.input.contains(&text) {
                def.input.push(text);
            }
        }
        cut.parts[part].graph.node.push(def);
    }
    let mut places = BTreeMap::new();
    for &output in fetched {
        let device = chosen[output.0];
        let part = cut.part(device);
        places.entry(output).or_insert_with(|| (part, cut.fetch(output, device, part)));
    }
    (cut.parts, places)
}

fn attr(value: Attr) -> AttrValue {
    AttrValue { value: Some(value) }
}

fn text(value: &str) -> AttrValue {
    attr(Attr::S(value.to_owned().into()))
}

impl Cut<'_> {
    /// The part of a device's task.
    fn part(&mut self, device: DeviceId) -> usize {
        let name = &self.devices.all[device].name;
        let (job, index) = (name.job.as_deref().unwrap_or_default(), name.task.unwrap_or_default());
        let is = |task: &TaskId| task.job == job && task.index == index;
        if let Some(part) = self.tasks.iter().position(is) {
            return part;
        }
        let task = TaskId::new(job, index);
        self.tasks.push(task.clone());
        let versions = Some(VersionDef { producer: PRODUCER, min_consumer: 0 });
        let graph = GraphDef { node: Vec::new(), versions };
        self.parts.push(Part { task, graph, feeds: Vec::new(), fetches: Vec::new() });
        self.parts.len() - 1
    }

    /// One end of an edge.
    #[allow(clippy::too_many_arguments, reason = "an edge has this many sides")]
    fn end(
        &self,
        op: &str,
        name: String,
        dtype: i32,
        tensor: &str,
        (from, to): (&Device, &Device),
        client: bool,
        input: Option<String>,
    ) -> NodeDef {
        let sends = op == "_Send";
        let mut attrs = BTreeMap::from([
            ("tensor_name", text(tensor)),
            ("send_device", text(&from.text)),
            ("send_device_incarnation", attr(Attr::I(from.incarnation as i64))),
            ("recv_device", text(&to.text)),
            ("client_terminated", attr(Attr::B(client))),
        ]);
        attrs.insert(if sends { "T" } else { "tensor_type" }, attr(Attr::Type(dtype)));
        NodeDef {
            name,
            op: op.to_owned(),
            input: input.into_iter().collect(),
            device: if sends { from.text.clone() } else { to.text.clone() },
            attr: attrs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        }
    }

    /// The name of the node that brings what a node on another task makes.
    fn bring(
        &mut self,
        crossing: Crossing,
        there: DeviceId,
        here: DeviceId,
        part: usize,
    ) -> String {
        if let Some(name) = self.brought.get(&(crossing, part)) {
            return name.clone();
        }
        let (node, output) = crossing;
        let source = self.graph.nodes[node].name.clone();
        self.edges += 1;
        let tensor = format!("edge_{}_{source}", self.edges);
        let (from, to) = (&self.devices.all[there], &self.devices.all[here]);
        let (dtype, input, signal) = match output {
            Some(output) => (self.dtype(node, output), format!("{source}:{output}"), None),
            None => {
                // An empty tensor that comes when the node is done.
                let name = format!("_{tensor}_done");
                let value = Tensor::zeros(DType::F32, [0]).map(|tensor| codec::encode(&tensor));
                let attrs = [
                    ("dtype".to_owned(), attr(Attr::Type(DType::F32.wire()))),
                    ("value".to_owned(), attr(Attr::Tensor(value.unwrap_or_default()))),
                ];
                let signal = NodeDef {
                    name: name.clone(),
                    op: "Const".to_owned(),
                    input: vec![format!("^{source}")],
                    device: from.text.clone(),
                    attr: attrs.into(),
                };
                (DType::F32.wire(), name, Some(signal))
            }
        };
        let (send, name) = (format!("_{tensor}_send"), format!("_{tensor}_recv"));
        let send = self.end("_Send", send, dtype, &tensor, (from, to), false, Some(input));
        let receive = self.end("_Recv", name.clone(), dtype, &tensor, (from, to), false, None);
        let source_part = self.part(there);
        self.parts[source_part].graph.node.extend(signal.into_iter().chain([send]));
        self.parts[part].graph.node.push(receive);
        self.brought.insert((crossing, part), name.clone());
        name
    }

    /// The name of the node that brings a feed.
    fn feed(&mut self, output: Output, place: usize, here: DeviceId, part: usize) -> String {
        if let Some(name) = self.fed.get(&(output, part)) {
            return name.clone();
        }
        let source = format!("{}:{}", self.graph.nodes[output.0].name, output.1);
        let name = format!("_feed_{place}");
        let device = &self.devices.all[here];
        let dtype = self.dtype(output.0, output.1);
        let def = self.end("_Recv", name.clone(), dtype, &source, (device, device), true, None);
        self.parts[part].graph.node.push(def);
        let key = key(&device.text, device.incarnation as i64, &device.text, &source);
        self.parts[part].feeds.push((place, key));
        self.fed.insert((output, part), name.clone());
        name
    }

    /// The place of a new fetch of a part.
    fn fetch(&mut self, output: Output, here: DeviceId, part: usize) -> usize {
        let tensor = format!("{}:{}", self.graph.nodes[output.0].name, output.1);
        let place = self.parts[part].fetches.len();
        let device = &self.devices.all[here];
        let dtype = self.dtype(output.0, output.1);
        let (name, input) = (format!("_fetch_{place}"), Some(tensor.clone()));
        let def = self.end("_Send", name, dtype, &tensor, (device, device), true, input);
        self.parts[part].graph.node.push(def);
        let key = key(&device.text, device.incarnation as i64, &device.text, &tensor);
        self.parts[part].fetches.push(key);
        place
    }

    /// The type of an output. Tasks of this program do not ask for it; TensorFlow's do.
    fn dtype(&self, node: usize, output: usize) -> i32 {
        let node = Node::new(&self.graph.nodes[node]);
        let fixed = match (node.op(), output) {
            ("Merge" | "RefMerge", 1) | ("BroadcastGradientArgs", _) => Some(DType::I32),
            ("Equal" | "NotEqual" | "Less" | "LessEqual" | "Greater" | "GreaterEqual", _)
            | ("LogicalAnd" | "LogicalOr" | "LogicalNot" | "InTopK" | "InTopKV2", _)
            | ("IsVariableInitialized" | "VarIsInitializedOp", _) => Some(DType::Bool),
            ("Where", _) => Some(DType::I64),
            ("ScalarSummary" | "HistogramSummary" | "MergeSummary", _) => Some(DType::Str),
            _ => None,
        };
        let names = ["dtype", "out_type", "DstT", "output_type", "T", "Tparams", "Tidx"];
        let named = names.iter().find_map(|name| match node.attr(name) {
            Some(Attr::Type(number)) => Some(*number),
            _ => None,
        });
        let listed =
            ["dtypes", "component_types", "T"].iter().find_map(|name| match node.attr(name) {
                Some(Attr::List(list)) => list.r#type.get(output).copied(),
                _ => None,
            });
        let shape = matches!(node.op(), "Shape" | "Size" | "Rank" | "ShapeN");
        let default = if shape { DType::I32 } else { DType::F32 };
        fixed
            .map(DType::wire)
            .or(listed)
            .or(named.filter(|_| !shape || node.attr("out_type").is_some()))
            .unwrap_or(default.wire())
    }
}
