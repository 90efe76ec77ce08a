//! The CIFAR-10 tutorial network: two convolutions, two normalisations, two dense layers, a linear one.

use super::blocks::{Layer, affine, conv_relu, cross_entropy, weight_decay};
use super::{Heads, Model};
use crate::graph::{Builder, GraphError, LrnParams, NodeId, Op, Padding};
use crate::tensor::Shape;

/// The tutorial network for 24x24 colour pictures.
#[derive(Clone, Copy, Debug)]
pub struct Cifar {
    /// Width of the last layer: 10, or 100.
    pub classes: usize,
    /// Whether responses are normalised, as in the tutorial; else what normalised them is left out.
    pub lrn: bool,
}

const LRN: LrnParams = LrnParams { radius: 4, bias: 1.0, alpha: 0.001 / 9.0, beta: 0.75 };

impl Model for Cifar {
    fn name(&self) -> &'static str {
        "cifar10"
    }

    fn features(&self) -> Shape {
        [24, 24, 3].into()
    }

    fn classes(&self) -> Option<usize> {
        Some(self.classes)
    }

    fn build(
        &self,
        b: &mut Builder<'_>,
        features: NodeId,
        labels: NodeId,
    ) -> Result<Heads, GraphError> {
        let conv = |bias| Layer { stddev: 0.05, bias, decay: 0.0 };
        let local = Layer { stddev: 0.04, bias: 0.1, decay: 0.004 };
        let pool = |b: &mut Builder<'_>, x| b.max_pool(x, [3, 3], [2, 2], Padding::Same);

        let norm = |b: &mut Builder<'_>, name, x| match self.lrn {
            true => b.scope(name, |b| b.lrn(x, LRN)),
            false => Ok(x),
        };

        // Pool, then normalise after the first convolution; the other way round after the second.
        let conv1 = b.scope("conv1", |b| conv_relu(b, features, [5, 5], 64, conv(0.0)))?;
        let pool1 = b.scope("pool1", |b| pool(b, conv1))?;
        let norm1 = norm(b, "norm1", pool1)?;
        let conv2 = b.scope("conv2", |b| conv_relu(b, norm1, [5, 5], 64, conv(0.1)))?;
        let norm2 = norm(b, "norm2", conv2)?;
        let pool2 = b.scope("pool2", |b| pool(b, norm2))?;

        let flat = b.flatten(pool2)?;
        let mut x = flat;
        let (mut activations, mut decays) =
            (vec![("conv1".to_owned(), conv1), ("conv2".to_owned(), conv2)], Vec::new());
        for (name, units) in [("local3", 384), ("local4", 192)] {
            x = b.scope(name, |b| {
                let (sum, weights) = affine(b, x, units, local)?;
                let decay = weight_decay(b, &[weights], local.decay)?;
                decays.push((format!("{name}/weight_loss"), decay));
                b.relu(sum)
            })?;
            activations.push((name.to_owned(), x));
        }
        let last = Layer { stddev: 1.0 / 192.0, bias: 0.0, decay: 0.0 };
        let (logits, _) = b.scope("softmax_linear", |b| affine(b, x, self.classes, last))?;
        activations.push(("softmax_linear".to_owned(), logits));

        let cross_entropy = b.scope("cross_entropy", |b| cross_entropy(b, logits, labels))?;
        let mut loss = cross_entropy;
        for (_, decay) in &decays {
            loss = b.scope("total_loss", |b| b.op(Op::Add, &[loss, *decay]))?;
        }
        let mut losses = vec![("cross_entropy".to_owned(), cross_entropy)];
        losses.append(&mut decays);
        Ok(Heads { loss, losses, predictions: logits, activations })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Fusions;
    use crate::model::compile;

    #[test]
    fn has_the_tutorials_parameters() {
        let compiled = compile(&Cifar { classes: 10, lrn: true }, 2).unwrap();
        let table = compiled.table();
        assert_eq!(table.parameters(), 1_068_298);
        let names: Vec<&str> = table.rows().iter().map(|row| row.name.as_str()).collect();
        let layers = ["conv1", "conv2", "local3", "local4", "softmax_linear"];
        let expected: Vec<String> =
            layers.iter().flat_map(|l| [format!("{l}/weights"), format!("{l}/biases")]).collect();
        assert_eq!(names, expected);
        assert_eq!(table.find("local3/weights").unwrap().shape[..], [2304, 384]);
    }

    #[test]
    fn normalisations_can_be_left_out() {
        let compiled = compile(&Cifar { classes: 10, lrn: false }, 2).unwrap();
        assert_eq!(compiled.table().parameters(), 1_068_298);
        let train = compiled.train(Fusions::Backward);
        let names: Vec<&str> = train.steps.iter().map(|step| step.op.name()).collect();
        assert!(names.contains(&"FusedMaxPoolGrad"), "{names:?}");
        assert!(!names.iter().any(|name| name.contains("LRN")), "{names:?}");
    }

    #[test]
    fn convolution_bias_and_relu_become_one_step() {
        let train = compile(&Cifar { classes: 10, lrn: true }, 2).unwrap().train(Fusions::Backward);
        let names: Vec<&str> = train.steps.iter().map(|step| step.op.name()).collect();
        assert_eq!(names.iter().filter(|n| **n == "FusedConv2D").count(), 1);
        assert_eq!(names.iter().filter(|n| **n == "FusedConv2DMaxPool").count(), 1);
        assert_eq!(names.iter().filter(|n| **n == "FusedMatMul").count(), 3);
        assert!(!names.contains(&"Relu") && !names.contains(&"BiasAdd"), "{names:?}");
        assert_eq!(names.iter().filter(|n| **n == "AddScaled").count(), 2);
        let hidden = names.iter().filter(|n| **n == "ReluGrad").count();
        assert_eq!(hidden, 2, "those of the convolutions are in their neighbours: {names:?}");
    }
}
