//! The other recipe of the seeds: one weight and one bias, fitted to y = 5x + 8.

use super::{Heads, Model};
use crate::graph::{Builder, GraphError, Init, NodeId, Op};
use crate::tensor::Shape;

/// `weight * x + bias` under the mean squared error.
#[derive(Clone, Copy, Debug)]
pub struct Line;

impl Model for Line {
    fn name(&self) -> &'static str {
        "line"
    }

    fn features(&self) -> Shape {
        [1].into()
    }

    fn classes(&self) -> Option<usize> {
        None
    }

    fn build(
        &self,
        b: &mut Builder<'_>,
        features: NodeId,
        labels: NodeId,
    ) -> Result<Heads, GraphError> {
        let weight = b.variable("weight", [1, 1], Init::TruncatedNormal(1.0))?;
        let bias = b.variable("bias", [1], Init::Constant(0.0))?;
        let product = b.matmul(features, weight)?;
        let predictions = b.bias_add(product, bias)?;
        let values = b.op(Op::Reshape(b.shape(labels).clone()), &[predictions])?;
        let errors = b.op(Op::Sub, &[values, labels])?;
        let squares = b.op(Op::Square, &[errors])?;
        let loss = b.op(Op::Mean, &[squares])?;
        Ok(Heads { loss, losses: Vec::new(), predictions, activations: Vec::new() })
    }
}
