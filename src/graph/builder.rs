//! [`Builder`]: appends operations under a scope of names.

use super::{Graph, GraphError, Init, LrnParams, NodeId, Op, Padding, Role, Window};
use crate::tensor::Shape;

/// Appends nodes to a graph; names get the current scope in front.
#[derive(Debug)]
pub struct Builder<'g> {
    graph: &'g mut Graph,
    scope: String,
    training: bool,
}

impl<'g> Builder<'g> {
    /// At the outermost scope, of a graph to train with.
    pub fn new(graph: &'g mut Graph) -> Self {
        Self { graph, scope: String::new(), training: true }
    }

    /// At the outermost scope, of a graph to judge or predict with.
    pub fn evaluating(graph: &'g mut Graph) -> Self {
        Self { training: false, ..Self::new(graph) }
    }

    /// The shape of a node.
    pub fn shape(&self, node: NodeId) -> &Shape {
        &self.graph.node(node).shape
    }

    /// Runs `body` with `name/` in front of every name.
    pub fn scope<T>(&mut self, name: &str, body: impl FnOnce(&mut Self) -> T) -> T {
        let outer = self.scope.len();
        self.scope += name;
        self.scope += "/";
        let result = body(self);
        self.scope.truncate(outer);
        result
    }

    /// Appends any operation, named after itself.
    pub fn op(&mut self, op: Op, inputs: &[NodeId]) -> Result<NodeId, GraphError> {
        let name = format!("{}{}", self.scope, op.name());
        self.graph.add(&name, op, inputs)
    }

    /// A value fed at each step; feeds keep the order of their creation.
    pub fn placeholder(&mut self, name: &str, shape: Shape) -> Result<NodeId, GraphError> {
        self.graph.add(&format!("{}{name}", self.scope), Op::Placeholder(shape), &[])
    }

    /// A trained variable.
    pub fn variable(
        &mut self,
        name: &str,
        shape: impl Into<Shape>,
        init: Init,
    ) -> Result<NodeId, GraphError> {
        let name = format!("{}{name}", self.scope);
        self.graph.add_variable(&name, shape.into(), init, Role::Trained)
    }

    /// A variable that follows a statistic of the batches: `statistic`, of the same shape, which is asked for in training only.
    pub fn statistic(
        &mut self,
        name: &str,
        shape: impl Into<Shape>,
        init: Init,
        statistic: impl FnOnce(&mut Self) -> Result<NodeId, GraphError>,
    ) -> Result<NodeId, GraphError> {
        let name = format!("{}{name}", self.scope);
        let row = self.graph.table().rows().len();
        let variable = self.graph.add_variable(&name, shape.into(), init, Role::Statistic)?;
        if self.training {
            let value = statistic(self)?;
            self.graph.followed.push((row, value));
        }
        Ok(variable)
    }

    /// Whether the graph is one to train with.
    pub fn is_training(&self) -> bool {
        self.training
    }

    /// Convolution, SAME or VALID.
    pub fn conv2d(
        &mut self,
        x: NodeId,
        filter: NodeId,
        stride: [usize; 2],
        padding: Padding,
    ) -> Result<NodeId, GraphError> {
        let kernel = self.extents(filter, 0, "Conv2D")?;
        let window = self.window(x, kernel, stride, padding, "Conv2D")?;
        self.op(Op::Conv2d(window), &[x, filter])
    }

    /// The largest value of each window.
    pub fn max_pool(
        &mut self,
        x: NodeId,
        kernel: [usize; 2],
        stride: [usize; 2],
        padding: Padding,
    ) -> Result<NodeId, GraphError> {
        let window = self.window(x, kernel, stride, padding, "MaxPool")?;
        self.op(Op::MaxPool(window), &[x])
    }

    /// The mean value of each window; padding does not count.
    pub fn avg_pool(
        &mut self,
        x: NodeId,
        kernel: [usize; 2],
        stride: [usize; 2],
        padding: Padding,
    ) -> Result<NodeId, GraphError> {
        let window = self.window(x, kernel, stride, padding, "AvgPool")?;
        self.op(Op::AvgPool(window), &[x])
    }

    /// Local response normalisation.
    pub fn lrn(&mut self, x: NodeId, params: LrnParams) -> Result<NodeId, GraphError> {
        self.op(Op::Lrn(params), &[x])
    }

    /// `relu(x)`.
    pub fn relu(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        self.op(Op::Relu, &[x])
    }

    /// `x + bias`.
    pub fn bias_add(&mut self, x: NodeId, bias: NodeId) -> Result<NodeId, GraphError> {
        self.op(Op::BiasAdd, &[x, bias])
    }

    /// `a b`.
    pub fn matmul(&mut self, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.op(Op::MatMul { transpose_a: false, transpose_b: false }, &[a, b])
    }

    /// One row per example, everything else flattened in row-major order.
    pub fn flatten(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let shape = self.shape(x);
        let batch = shape.first().copied().unwrap_or(1);
        let flat = [batch, shape.elements() / batch.max(1)].into();
        self.op(Op::Reshape(flat), &[x])
    }

    fn window(
        &self,
        x: NodeId,
        kernel: [usize; 2],
        stride: [usize; 2],
        padding: Padding,
        op: &'static str,
    ) -> Result<Window, GraphError> {
        let input = self.extents(x, 1, op)?;
        Window::new(input, kernel, stride, padding).ok_or_else(|| {
            let reason =
                format!("a {kernel:?} window with stride {stride:?} does not fit into {input:?}");
            GraphError::Node { node: self.scope.clone() + op, op, reason }
        })
    }

    /// Two extents of a four-dimensional tensor, from `at`.
    fn extents(&self, x: NodeId, at: usize, op: &'static str) -> Result<[usize; 2], GraphError> {
        match self.shape(x)[..] {
            [a, b, _, _] if at == 0 => Ok([a, b]),
            [_, a, b, _] => Ok([a, b]),
            _ => Err(GraphError::Node {
                node: self.scope.clone() + op,
                op,
                reason: format!("needs four dimensions, got {}", self.shape(x)),
            }),
        }
    }
}
