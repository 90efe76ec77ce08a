//! [`Plan`]: a program as launches with algorithms and memory.

use std::sync::Arc;

use super::conv::{Channels, Convolution, Dnn, Kind};
use super::gemm::{Blas, Product, Sizes};
use super::scratch::scratch;
use super::task::{Draft, Node, Task};
use crate::device::DeviceError;
use crate::graph::{Buffer, Place, Program, View, Window, plan};
use crate::tensor::Shape;

/// Floats between the starts of what lies in an arena are multiples of this.
const ALIGN: usize = 64;
/// Kernels count in 32 bits, and go on a little beyond the end.
const MOST: usize = 1 << 30;

/// The libraries that a plan may use.
pub(super) struct Libraries {
    pub(super) blas: Arc<Blas>,
    /// None where there is no cuDNN.
    pub(super) dnn: Option<Arc<Dnn>>,
    /// Whether factors of convolutions are rounded to bf16.
    pub(super) bf16: bool,
}

/// Who computes a launch.
pub(super) enum Means {
    /// One of the program's own kernels.
    Kernel,
    /// One of those whose factors are in bf16.
    Bf16Kernel,
    /// cuBLASLt.
    Product(Product),
    /// cuDNN.
    Convolution(Convolution),
}

/// A task with memory.
pub(super) struct Launch {
    pub(super) name: String,
    pub(super) task: Task,
    pub(super) means: Means,
    pub(super) inputs: Vec<(View, Shape)>,
    pub(super) outputs: Vec<(View, Shape)>,
}

/// A program ready for memory to be given.
pub(super) struct Plan {
    pub(super) launches: Vec<Launch>,
    /// Floats of the arena, in which what is fetched comes first.
    pub(super) arena: usize,
    /// Floats of fetched values of one number each, one after the other from the arena's start.
    pub(super) scalars: usize,
    /// Where each fetched value lies in the arena; `None` for what no launch makes.
    pub(super) fetches: Vec<Option<View>>,
    /// Floats of scratch memory that launches share.
    pub(super) workspace: usize,
    /// Counters that launches share, 0 between them.
    pub(super) counters: usize,
}

impl Plan {
    /// Fuses, chooses algorithms and places values.
    pub(super) fn new(program: &Program, libraries: &Libraries) -> Result<Self, DeviceError> {
        let mut draft = Draft::of(program);
        draft.fuse();
        let (draft, means) = with_means(draft, libraries)?;
        Ok(Self::placed(draft, means))
    }

    fn placed(mut draft: Draft, means: Vec<Means>) -> Self {
        // What is fetched, the scalars first.
        let mut fetched: Vec<usize> = draft.fetches.iter().flatten().copied().collect();
        fetched.sort_by_key(|&value| draft.values[value].len > 1);
        let (mut arena, mut scalars) = (0usize, 0);
        for value in fetched {
            let Some(len) =
                Some(draft.values[value].len).filter(|_| draft.values[value].home.is_none())
            else {
                continue;
            };
            if len > 1 {
                arena = arena.next_multiple_of(ALIGN);
            }
            draft.values[value].home = Some(View { place: Place::Arena, offset: arena, len });
            arena += len;
            scalars += usize::from(len == 1);
        }
        let first = arena.next_multiple_of(ALIGN);
        // The rest, where those that are never alive together share memory.
        let mut alive: Vec<(usize, Buffer)> = Vec::new();
        for (position, node) in draft.nodes.iter().enumerate() {
            for (value, _) in node.outputs.iter().filter(|(v, _)| draft.values[*v].home.is_none()) {
                let last = draft.readers(*value).last().unwrap_or(position);
                let len = draft.values[*value].len.next_multiple_of(ALIGN);
                alive.push((*value, Buffer { len, first: position, last }));
            }
        }
        let (offsets, rest) = plan(&alive.iter().map(|(_, buffer)| *buffer).collect::<Vec<_>>());
        for ((value, _), offset) in alive.iter().zip(offsets) {
            let len = draft.values[*value].len;
            let home = View { place: Place::Arena, offset: first + offset, len };
            draft.values[*value].home = Some(home);
        }

        let nowhere = View { place: Place::Arena, offset: 0, len: 0 };
        let view = |value: usize| draft.values[value].home.unwrap_or(nowhere);
        let place = |all: &[(usize, Shape)]| -> Vec<(View, Shape)> {
            all.iter().map(|(value, shape)| (view(*value), shape.clone())).collect()
        };
        let launches: Vec<Launch> = draft
            .nodes
            .iter()
            .zip(means)
            .map(|(node, means)| Launch {
                name: node.name.clone(),
                task: node.task.clone(),
                means,
                inputs: place(&node.inputs),
                outputs: place(&node.outputs),
            })
            .collect();
        let needs = launches.iter().map(|launch| match &launch.means {
            Means::Kernel | Means::Bf16Kernel => scratch(launch),
            Means::Product(product) => (product.workspace().div_ceil(4), 0),
            Means::Convolution(convolution) => (convolution.workspace().div_ceil(4), 0),
        });
        let (workspace, counters) =
            needs.fold((0, 0), |(a, b), (floats, counters)| (a.max(floats), b.max(counters)));
        let fetches = draft.fetches.iter().map(|value| value.map(view)).collect();
        Self { launches, arena: first + rest, scalars, fetches, workspace, counters }
    }
}

/// Chooses who computes each node. cuDNN wants its filters `[out][height][width][in]`; nodes that bring them there and back
/// are added, one for all convolutions with a filter.
fn with_means(draft: Draft, libraries: &Libraries) -> Result<(Draft, Vec<Means>), DeviceError> {
    let Draft { nodes, values, fetches } = draft;
    let mut out = Draft { nodes: Vec::new(), values, fetches };
    let mut means = Vec::new();
    let mut transposed: Vec<(usize, usize)> = Vec::new();
    for mut node in nodes {
        check_sizes(&node)?;
        match choose(&node, libraries)? {
            Means::Convolution(convolution) => {
                let is_gradient = matches!(node.task, Task::ConvFilterGrad(_));
                let filter = if is_gradient { &node.outputs[0] } else { &node.inputs[1] };
                let (filter, shape) = filter.clone();
                let (rows, columns) = (shape.elements() / shape.last_dim(), shape.last_dim());
                let name = format!("{}/transpose", node.name);
                let known = transposed.iter().find(|(from, _)| *from == filter && !is_gradient);
                let there = match known {
                    Some((_, there)) => *there,
                    None => out.value(shape.elements(), None),
                };
                if is_gradient {
                    node.outputs[0].0 = there;
                    out.nodes.push(node);
                    means.push(Means::Convolution(convolution));
                    let task = Task::Transpose { rows: columns, columns: rows };
                    let inputs = vec![(there, shape.clone())];
                    out.nodes.push(Node { name, task, inputs, outputs: vec![(filter, shape)] });
                    means.push(Means::Kernel);
                    continue;
                }
                if known.is_none() {
                    transposed.push((filter, there));
                    let task = Task::Transpose { rows, columns };
                    let inputs = vec![(filter, shape.clone())];
                    out.nodes.push(Node { name, task, inputs, outputs: vec![(there, shape)] });
                    means.push(Means::Kernel);
                }
                node.inputs[1].0 = there;
                out.nodes.push(node);
                means.push(Means::Convolution(convolution));
            }
            chosen => {
                out.nodes.push(node);
                means.push(chosen);
            }
        }
    }
    Ok((out, means))
}

fn choose(node: &Node, libraries: &Libraries) -> Result<Means, DeviceError> {
    let (inputs, out) = (&node.inputs, &node.outputs[0].1);
    let conv = |kind: Kind, window: &Window, x: &Shape, y: &Shape| {
        // cuDNN would write results in bf16, too.
        if libraries.bf16 {
            return Ok(Means::Bf16Kernel);
        }
        let Some(dnn) = &libraries.dnn else { return Ok(Means::Kernel) };
        let channels = Channels { pictures: x[0], input: x[3], output: y[3] };
        let made = Convolution::new(dnn.clone(), kind, window, channels)?;
        Ok(made.map_or(Means::Kernel, Means::Convolution))
    };
    match &node.task {
        &Task::Product { transpose_a, transpose_b, bias, relu, .. } => {
            let a = &inputs[0].1;
            let k = if transpose_a { a[0] } else { a[1] };
            let sizes = Sizes { m: out[0], k, n: out[1], transpose_a, transpose_b, bias, relu };
            Ok(Means::Product(Product::new(libraries.blas.clone(), sizes)?))
        }
        &Task::Conv { window, bias, relu } => {
            conv(Kind::Forward { bias, relu }, &window, &inputs[0].1, out)
        }
        Task::ConvInputGrad(window) => conv(Kind::InputGrad, window, out, &inputs[0].1),
        Task::ConvFilterGrad(window) => conv(Kind::FilterGrad, window, &inputs[0].1, &inputs[1].1),
        _ => Ok(Means::Kernel),
    }
}

fn check_sizes(node: &Node) -> Result<(), DeviceError> {
    let largest = node.inputs.iter().chain(&node.outputs).map(|(_, shape)| shape.elements()).max();
    let reason = match &node.task {
        Task::Lrn(p) | Task::LrnGrad { params: p, .. }
            if p.radius.min(node.outputs[0].1.last_dim()) > super::scratch::LRN_RADIUS =>
        {
            format!("it reaches further than {} channels", super::scratch::LRN_RADIUS)
        }
        _ if largest.unwrap_or(0) > MOST => {
            format!("a tensor has more than {MOST} floats; use a smaller --batch-size")
        }
        _ => return Ok(()),
    };
    Err(DeviceError::Mismatch {
        device: "a GPU".to_owned(),
        reason: format!("{}: {reason}", node.name),
    })
}
