//! The networks, by name: each appends its nodes to a graph, and [`compile`] turns one into programs.

mod blocks;
mod cifar;
mod line;
mod resnet;

pub use cifar::Cifar;
pub use line::Line;
pub use resnet::{Resnet, ResnetVersion};

use crate::graph::{Builder, Fusions, Graph, GraphError, NodeId, Op, Program, VarTable, gradients};
use crate::tensor::Shape;

/// What a model hands back after it has appended its nodes.
#[derive(Clone, Debug)]
pub struct Heads {
    /// The scalar that is minimised, weight decay included.
    pub loss: NodeId,
    /// The parts of the loss, by the names summaries use.
    pub losses: Vec<(String, NodeId)>,
    /// One row per example: logits of a classifier, values of a regression.
    pub predictions: NodeId,
    /// Activations worth watching, by layer.
    pub activations: Vec<(String, NodeId)>,
}

/// A network as a function that appends nodes.
pub trait Model: Send + Sync {
    /// The name in the configuration.
    fn name(&self) -> &'static str;
    /// Extents of one example's features.
    fn features(&self) -> Shape;
    /// How many classes its predictions tell apart; `None` for a regression.
    fn classes(&self) -> Option<usize>;
    /// Appends forward pass and loss, with the same variables whether the builder's graph is one to train with or not. `labels` holds
    /// one number per example.
    fn build(
        &self,
        b: &mut Builder<'_>,
        features: NodeId,
        labels: NodeId,
    ) -> Result<Heads, GraphError>;
}

/// A model's whole graph at one batch size, ready to be lowered.
#[derive(Debug)]
pub struct Compiled {
    graph: Graph,
    heads: Heads,
    gradients: Vec<NodeId>,
    /// The forward pass as it is judged by, and its predictions.
    evaluation: (Graph, NodeId),
}

/// Builds the graph of `model` for batches of `batch` examples, backward pass included.
pub fn compile(model: &dyn Model, batch: usize) -> Result<Compiled, GraphError> {
    let mut graph = Graph::default();
    let heads = append(model, batch, Builder::new(&mut graph))?;
    let variables = graph.variables().to_vec();
    let mut gradients = gradients(&mut graph, heads.loss, &variables)?;
    for (row, value) in graph.followed().to_vec() {
        let name = format!("gradients/{}", graph.table().rows()[row].name);
        gradients[row] = graph.add(&name, Op::Sub, &[variables[row], value])?;
    }
    let mut evaluation = Graph::default();
    let predictions = append(model, batch, Builder::evaluating(&mut evaluation))?.predictions;
    Ok(Compiled { graph, heads, gradients, evaluation: (evaluation, predictions) })
}

fn append(model: &dyn Model, batch: usize, mut b: Builder<'_>) -> Result<Heads, GraphError> {
    let mut dims = vec![batch];
    dims.extend_from_slice(&model.features());
    let features = b.placeholder("features", dims.into())?;
    let labels = b.placeholder("labels", [batch].into())?;
    model.build(&mut b, features, labels)
}

impl Compiled {
    /// The graph, for listings.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The layout of the variables.
    pub fn table(&self) -> &VarTable {
        self.graph.table()
    }

    /// The names of the losses that [`Compiled::train`] fetches: `total_loss`, then the parts.
    pub fn loss_names(&self) -> Vec<String> {
        let parts = self.heads.losses.iter().map(|(name, _)| name.clone());
        std::iter::once("total_loss".to_owned()).chain(parts).collect()
    }

    /// The names of the activations that [`Compiled::observe`] fetches after the losses.
    pub fn activation_names(&self) -> Vec<String> {
        self.heads.activations.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Forward and backward; fetches the losses. `fusions` are the device's.
    pub fn train(&self, fusions: Fusions) -> Program {
        Program::lower(&self.graph, &self.losses(), &self.gradients, fusions)
    }

    /// As [`Compiled::train`], and also keeps the activations to be fetched. Computes the same bits.
    pub fn observe(&self, fusions: Fusions) -> Program {
        let mut fetches = self.losses();
        fetches.extend(self.heads.activations.iter().map(|(_, node)| node));
        Program::lower(&self.graph, &fetches, &self.gradients, fusions)
    }

    /// Forward only; fetches the predictions.
    pub fn predict(&self) -> Program {
        let (graph, predictions) = &self.evaluation;
        Program::lower(graph, &[*predictions], &[], Fusions::Forward)
    }

    fn losses(&self) -> Vec<NodeId> {
        let parts = self.heads.losses.iter().map(|(_, node)| *node);
        std::iter::once(self.heads.loss).chain(parts).collect()
    }
}
