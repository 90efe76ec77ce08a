//! The residual networks for CIFAR pictures: 6n + 2 layers, of either version.

use super::blocks::{Layer, affine, batch_norm, cross_entropy, weight_decay};
use super::{Heads, Model};
use crate::graph::{Builder, GraphError, Init, NodeId, Op, Padding};
use crate::tensor::Shape;

/// A residual network for 32x32 colour pictures: a convolution, three stages of `(depth - 2) / 6` blocks of two, and a dense layer.
///
/// Where a stage begins, the shortcut takes every second pixel and pads channels with zeros on both sides ("option A"), so that no
/// shortcut has weights.
#[derive(Clone, Copy, Debug)]
pub struct Resnet {
    /// Layers with weights: 6n + 2.
    pub depth: usize,
    /// Where normalisation and relu stand.
    pub version: ResnetVersion,
    /// Width of the last layer: 10, or 100.
    pub classes: usize,
}

/// Where normalisation and relu stand in a residual network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResnetVersion {
    /// Behind each convolution, as first published.
    V1,
    /// Before each convolution ("pre-activation"): the way of the shortcuts is free of them.
    V2,
}

/// Factor of the L2 loss of all weights but those of the normalisations.
const DECAY: f32 = 2e-4;

impl Model for Resnet {
    fn name(&self) -> &'static str {
        "resnet"
    }

    fn features(&self) -> Shape {
        [32, 32, 3].into()
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
        let mut network = Network { version: self.version, weights: Vec::new() };
        let mut x = b.scope("conv0", |b| network.stem(b, features))?;
        let mut activations = vec![("conv0".to_owned(), x)];
        for (stage, channels) in [16, 32, 64].into_iter().enumerate() {
            for block in 0..self.depth.saturating_sub(2) / 6 {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                let name = format!("stage{}/block{block}", stage + 1);
                x = b.scope(&name, |b| network.block(b, x, channels, stride))?;
            }
            activations.push((format!("stage{}", stage + 1), x));
        }
        if self.version == ResnetVersion::V2 {
            x = b.scope("last", |b| normalised(b, x, true))?;
        }
        let side = [b.shape(x)[1], b.shape(x)[2]];
        let mean = b.scope("mean", |b| b.avg_pool(x, side, [1, 1], Padding::Valid))?;
        let flat = b.flatten(mean)?;
        let stddev = (1.0 / b.shape(flat).last_dim() as f32).sqrt();
        let (logits, weights) =
            b.scope("dense", |b| affine(b, flat, self.classes, Layer::new(stddev)))?;
        network.weights.push(weights);
        activations.push(("logits".to_owned(), logits));

        let cross_entropy = b.scope("cross_entropy", |b| cross_entropy(b, logits, labels))?;
        let decay = b.scope("weight_loss", |b| weight_decay(b, &network.weights, DECAY))?;
        let loss = b.scope("total_loss", |b| b.op(Op::Add, &[cross_entropy, decay]))?;
        let losses =
            vec![("cross_entropy".to_owned(), cross_entropy), ("weight_loss".to_owned(), decay)];
        Ok(Heads { loss, losses, predictions: logits, activations })
    }
}

/// A network being built.
struct Network {
    version: ResnetVersion,
    /// What decays.
    weights: Vec<NodeId>,
}

impl Network {
    /// The first convolution. Version 1 cuts nothing behind it, as TensorFlow's benchmarks have it.
    fn stem(&mut self, b: &mut Builder<'_>, features: NodeId) -> Result<NodeId, GraphError> {
        let y = self.conv(b, features, 16, 1)?;
        normalised(b, y, self.version == ResnetVersion::V2)
    }

    /// Two convolutions beside a shortcut.
    fn block(
        &mut self,
        b: &mut Builder<'_>,
        x: NodeId,
        channels: usize,
        stride: usize,
    ) -> Result<NodeId, GraphError> {
        let short = b.scope("shortcut", |b| shortcut(b, x, channels, stride))?;
        match self.version {
            ResnetVersion::V1 => {
                let y = b.scope("conv1", |b| {
                    let y = self.conv(b, x, channels, stride)?;
                    normalised(b, y, true)
                })?;
                let y = b.scope("conv2", |b| {
                    let y = self.conv(b, y, channels, 1)?;
                    normalised(b, y, false)
                })?;
                let sum = b.op(Op::Add, &[short, y])?;
                b.relu(sum)
            }
            ResnetVersion::V2 => {
                let y = b.scope("conv1", |b| {
                    let y = normalised(b, x, true)?;
                    self.conv(b, y, channels, stride)
                })?;
                let y = b.scope("conv2", |b| {
                    let y = normalised(b, y, true)?;
                    self.conv(b, y, channels, 1)
                })?;
                b.op(Op::Add, &[short, y])
            }
        }
    }

    /// A 3x3 convolution without bias, which a normalisation would take out again.
    fn conv(
        &mut self,
        b: &mut Builder<'_>,
        x: NodeId,
        channels: usize,
        stride: usize,
    ) -> Result<NodeId, GraphError> {
        let inputs = b.shape(x).last_dim();
        let stddev = (2.0 / (9 * inputs) as f32).sqrt();
        let weights =
            b.variable("weights", [3, 3, inputs, channels], Init::TruncatedNormal(stddev))?;
        self.weights.push(weights);
        b.conv2d(x, weights, [stride, stride], Padding::Same)
    }
}

fn normalised(b: &mut Builder<'_>, x: NodeId, relu: bool) -> Result<NodeId, GraphError> {
    let y = b.scope("batch_norm", |b| batch_norm(b, x))?;
    if relu { b.relu(y) } else { Ok(y) }
}

/// The input itself, or every `stride`-th pixel with zeros for the channels it lacks, half of them in front.
fn shortcut(
    b: &mut Builder<'_>,
    x: NodeId,
    channels: usize,
    stride: usize,
) -> Result<NodeId, GraphError> {
    let mut y = x;
    if stride > 1 {
        y = b.avg_pool(x, [1, 1], [stride, stride], Padding::Same)?;
    }
    let lacking = channels - b.shape(x).last_dim();
    for (lacking, before) in [(lacking / 2, true), (lacking - lacking / 2, false)] {
        if lacking > 0 {
            let mut dims = b.shape(y).to_vec();
            dims[3] = lacking;
            let zeros = b.op(Op::Fill(0.0, dims.into()), &[])?;
            y = b.op(Op::Concat, &if before { [zeros, y] } else { [y, zeros] })?;
        }
    }
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Fusions, Role};
    use crate::model::compile;

    fn resnet(depth: usize, version: ResnetVersion) -> Resnet {
        Resnet { depth, version, classes: 10 }
    }

    #[test]
    fn has_the_published_parameters() {
        // Weights, normalisations and the dense layer; the statistics are no parameters.
        for (depth, parameters) in [(20, 269_722), (32, 464_154), (56, 853_018), (110, 1_727_962)] {
            let compiled = compile(&resnet(depth, ResnetVersion::V1), 1).unwrap();
            assert_eq!(compiled.table().parameters(), parameters, "{depth}");
        }
        let compiled = compile(&resnet(20, ResnetVersion::V2), 1).unwrap();
        let table = compiled.table();
        let statistics = table.rows().iter().filter(|row| row.role == Role::Statistic);
        assert_eq!(statistics.count(), 2 * 20);
        assert!(table.find("stage3/block0/conv1/batch_norm/moving_variance").is_some());
        let names: Vec<&str> = table.rows().iter().map(|row| row.name.as_str()).collect();
        assert_eq!(
            names[..3],
            ["conv0/weights", "conv0/batch_norm/gamma", "conv0/batch_norm/beta"]
        );
    }

    #[test]
    fn statistics_lie_behind_what_is_trained() {
        let compiled = compile(&resnet(8, ResnetVersion::V1), 1).unwrap();
        let table = compiled.table();
        for row in table.rows() {
            let behind = row.offset >= table.trained_len();
            assert_eq!(behind, row.role == Role::Statistic, "{}", row.name);
        }
        let ends: Vec<_> = table.placed().map(|row| row.range()).collect();
        assert!(ends.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert_eq!(ends.last().unwrap().end.next_multiple_of(16), table.slab_len());
    }

    /// Variables are the same for both graphs, and only the one for evaluation reads the statistics to normalise.
    #[test]
    fn evaluation_normalises_by_the_statistics() {
        for (version, layers) in [(ResnetVersion::V1, 7), (ResnetVersion::V2, 8)] {
            let compiled = compile(&resnet(8, version), 2).unwrap();
            let (train, predict) = (compiled.train(Fusions::Forward), compiled.predict());
            assert_eq!(train.table.fingerprint(), predict.table.fingerprint());
            let count = |steps: &[crate::graph::Step], name| {
                steps.iter().filter(|step| step.op.name() == name).count()
            };
            for name in
                ["Moments", "FusedBatchNorm", "FusedBatchNormSums", "FusedBatchNormInputGrad"]
            {
                assert_eq!(count(&train.steps, name), layers, "{name}");
            }
            assert_eq!(
                (count(&predict.steps, "Moments"), count(&predict.steps, "FusedBatchNorm")),
                (0, layers)
            );
        }
    }
}
