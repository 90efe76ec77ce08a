//! [`Plan`]: what a step of certain feeds, fetches and targets runs where.

use std::collections::{BTreeMap, HashMap};

use super::graph::Graph;
use super::partition::{Part, partition};
use super::place::Devices;
use super::proto::TensorShapeProto;
use super::{DType, Node, OpError, Tensor, codec};

/// What distinguishes steps: names as the client gives them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Signature {
    pub(super) feeds: Vec<String>,
    pub(super) fetches: Vec<String>,
    pub(super) targets: Vec<String>,
}

/// An output of a node.
pub(super) type Output = (usize, usize);

/// Where a fetch comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// It is fed: by place among the feeds.
    Feed(usize),
    /// A part of the plan, and the place among its fetches.
    Part(usize, usize),
}

/// What is known of a tensor that is fed.
#[derive(Clone, Debug, Default)]
pub(super) struct Expected {
    dtype: Option<DType>,
    shape: Option<TensorShapeProto>,
}

/// A step's parts, and how feeds reach them and fetches come back.
pub(super) struct Plan {
    pub(super) parts: Vec<Part>,
    pub(super) expected: Vec<Expected>,
    pub(super) sources: Vec<Source>,
}

impl Expected {
    fn of(node: &Node<'_>) -> Self {
        let dtype = match node.op() {
            "Placeholder" | "PlaceholderV2" | "PlaceholderWithDefault" | "Const" => {
                node.dtype("dtype").ok()
            }
            _ => None,
        };
        let shape = match node.op() {
            "Placeholder" | "PlaceholderV2" => node.shape("shape").ok().flatten(),
            _ => None,
        };
        Self { dtype, shape: shape.cloned() }
    }

    /// The client does not check what it feeds beyond what it knows.
    pub(super) fn check(&self, name: &str, tensor: &Tensor) -> Result<(), OpError> {
        let own = tensor.dtype();
        if let Some(dtype) = self.dtype.filter(|dtype| *dtype != own) {
            return Err(OpError::invalid(format!(
                "The {name} tensor is fed with type {own}, but it is of type {dtype}"
            )));
        }
        let Some(shape) = self.shape.as_ref().filter(|shape| !shape.unknown_rank) else {
            return Ok(());
        };
        // TensorFlow 1 wrote "anything" as a scalar's shape, and its programs rely on it.
        if shape.dim.is_empty() {
            return Ok(());
        }
        let fits = shape.dim.len() == tensor.shape().len()
            && shape
                .dim
                .iter()
                .zip(tensor.shape().iter())
                .all(|(dim, &n)| dim.size < 0 || dim.size == n as i64);
        match fits {
            true => Ok(()),
            false => Err(OpError::invalid(format!(
                "Cannot feed value of shape {} for tensor {name}, which has shape {}",
                tensor.shape(),
                codec::shape_text(shape)
            ))),
        }
    }
}

/// What of a graph a step needs.
pub(super) struct Needed {
    /// Nodes, in graph order.
    pub(super) nodes: Vec<usize>,
    /// Tensors that are fed, by place.
    pub(super) feeds: HashMap<Output, usize>,
}

/// Keeps the nodes that targets and fetches need, where tensors are fed.
fn prune(
    graph: &Graph,
    feeds: HashMap<Output, usize>,
    roots: impl IntoIterator<Item = usize>,
) -> Needed {
    let mut needed = vec![false; graph.nodes.len()];
    let mut open: Vec<usize> = roots.into_iter().collect();
    while let Some(node) = open.pop() {
        if std::mem::replace(&mut needed[node], true) {
            continue;
        }
        for &(from, output) in &graph.inputs[node] {
            if !is_fed(graph, &feeds, from, output) {
                open.push(from);
            }
        }
    }
    let nodes = (0..needed.len()).filter(|&node| needed[node]).collect();
    Needed { nodes, feeds }
}

/// Whether an edge ends at a feed; so do control edges from a placeholder.
pub(super) fn is_fed(
    graph: &Graph,
    feeds: &HashMap<Output, usize>,
    node: usize,
    output: Option<usize>,
) -> bool {
    match output {
        Some(output) => feeds.contains_key(&(node, output)),
        None => feeds.contains_key(&(node, 0)) && graph.nodes[node].op.starts_with("Placeholder"),
    }
}

impl Plan {
    /// Prunes and partitions.
    ///
    /// # Errors
    /// A name that the graph does not have, a tensor that is fed twice.
    pub(super) fn new(
        graph: &Graph,
        devices: &Devices,
        chosen: &[usize],
        signature: &Signature,
    ) -> Result<Self, OpError> {
        let mut feeds = HashMap::new();
        let mut expected = Vec::new();
        for (place, name) in signature.feeds.iter().enumerate() {
            let output = graph.tensor(name)?;
            if feeds.insert(output, place).is_some() {
                return Err(OpError::invalid(format!("{name} is fed more than once")));
            }
            expected.push(Expected::of(&Node::new(&graph.nodes[output.0])));
        }
        let fetched: Result<Vec<Output>, _> =
            signature.fetches.iter().map(|name| graph.tensor(name)).collect();
        let fetched = fetched?;
        let mut roots = Vec::new();
        for name in &signature.targets {
            let missing = || {
                OpError::not_found(format!("PruneForTargets: Some target nodes not found: {name} "))
            };
            roots.push(graph.find(name.strip_suffix(":0").unwrap_or(name)).ok_or_else(missing)?);
        }
        let computed: Vec<Output> =
            fetched.iter().copied().filter(|output| !feeds.contains_key(output)).collect();
        roots.extend(computed.iter().map(|output| output.0));
        let needed = prune(graph, feeds, roots);
        let (parts, places) = partition(graph, devices, chosen, &needed, &computed);
        let places: BTreeMap<Output, (usize, usize)> = places;
        let source = |output: &Output| match needed.feeds.get(output) {
            Some(&place) => Source::Feed(place),
            None => {
                let (part, place) = places.get(output).copied().unwrap_or_default();
                Source::Part(part, place)
            }
        };
        let sources = fetched.iter().map(source).collect();
        Ok(Self { parts, expected, sources })
    }
}
