//! Fusion for GPUs: neighbours in a draft that one launch computes.

use super::task::{Draft, Node, Task};

impl Draft {
    /// Fuses what goes together, and drops what nobody needs any more.
    pub(super) fn fuse(&mut self) {
        // Backwards, so that removing a node moves none of those still to come.
        for i in (0..self.nodes.len()).rev() {
            // A node that was swallowed by one before it is gone; nothing behind it is looked at twice.
            if i < self.nodes.len() {
                self.fuse_at(i);
            }
        }
        for i in (0..self.nodes.len()).rev() {
            let needed = |value| self.is_seen(value) || self.readers(value).next().is_some();
            if !self.nodes[i].outputs.iter().any(|(value, _)| needed(*value)) {
                self.nodes.remove(i);
            }
        }
    }

    fn fuse_at(&mut self, i: usize) {
        match self.nodes[i].task.clone() {
            Task::Scale(factor) => self.scale_sum(i, factor),
            Task::AddScaled(factor) => self.add_to_product(i, factor),
            Task::ReluGrad => self.relu_grad(i),
            Task::BatchNormSums(_) => self.split_batch_norm_sums(i),
            Task::Moments { .. } => self.follow_moments(i),
            Task::CrossEntropy { .. } => self.whole_cross_entropy(i),
            _ => {}
        }
    }

    /// The node that makes operand `input` of node `i`, where nobody else needs it.
    fn only_for(&self, i: usize, input: usize) -> Option<usize> {
        let value = self.nodes[i].inputs[input].0;
        let alone = !self.is_seen(value) && self.readers(value).count() == 1;
        self.maker(value).filter(|_| alone)
    }

    /// `factor * (sum of x)`.
    fn scale_sum(&mut self, i: usize, by: f32) {
        let Some(at) = self.only_for(i, 0) else { return };
        if let Task::Sum { squares, factor } = self.nodes[at].task {
            self.nodes[i].task = Task::Sum { squares, factor: factor * by };
            self.nodes[i].inputs = self.nodes[at].inputs.clone();
            self.nodes.remove(at);
        }
    }

    /// `a b + factor * x`: the gradient of weights and their decay.
    fn add_to_product(&mut self, i: usize, factor: f32) {
        let Some(at) = self.only_for(i, 0) else { return };
        if let Task::Product { transpose_a, transpose_b, bias: false, relu, plus: None } =
            self.nodes[at].task
        {
            let plus = Some(factor);
            self.nodes[i].task =
                Task::Product { transpose_a, transpose_b, bias: false, relu, plus };
            let x = self.nodes[i].inputs[1].clone();
            self.nodes[i].inputs = self.nodes[at].inputs.clone();
            self.nodes[i].inputs.push(x);
            self.nodes.remove(at);
        }
    }

    fn relu_grad(&mut self, i: usize) {
        if !self.stop_at_relu(i) {
            self.sum_with_relu(i);
        }
    }

    /// A relu's gradient right after that of what reads the relu's output.
    fn stop_at_relu(&mut self, i: usize) -> bool {
        let Some(at) = self.only_for(i, 0) else { return false };
        let (before, y) = (&self.nodes[at], self.nodes[i].inputs[1].0);
        let task = match before.task {
            Task::MaxPoolGrad { window, relu: false } => Task::MaxPoolGrad { window, relu: true },
            Task::LrnGrad { params, relu: false } => Task::LrnGrad { params, relu: true },
            _ => return false,
        };
        if before.inputs[0].0 != y {
            return false;
        }
        let inputs = before.inputs.clone();
        (self.nodes[i].task, self.nodes[i].inputs) = (task, inputs);
        self.nodes.remove(at);
        true
    }

    /// A relu's gradient, and its sum over the rows: that of the bias before the relu.
    fn sum_with_relu(&mut self, i: usize) {
        let (dx, shape) = self.nodes[i].outputs[0].clone();
        let sums = self.readers(dx).find(|&r| {
            let node = &self.nodes[r];
            node.task == Task::ColumnSums && node.outputs[0].1.elements() == shape.last_dim()
        });
        if let Some(at) = sums {
            let sums = self.nodes.remove(at).outputs.swap_remove(0);
            self.nodes[i].task = Task::ReluBiasGrad;
            self.nodes[i].outputs.push(sums);
        }
    }

    /// The gradients by scale and by offset, each where it must lie.
    fn split_batch_norm_sums(&mut self, i: usize) {
        let (sums, shape) = self.nodes[i].outputs[0].clone();
        let len = shape.elements() / 2;
        let halves = [0, len].map(|start| self.only(sums, &Task::Slice { start, len }));
        let [Some(by_scale), Some(by_offset)] = halves else { return };
        for at in [by_scale, by_offset] {
            let half = self.nodes[at].outputs[0].clone();
            self.nodes[i].outputs.push(half);
        }
        self.nodes.remove(by_scale.max(by_offset));
        self.nodes.remove(by_scale.min(by_offset));
    }

    /// The moments of a batch, and what the statistics that follow them are too large by.
    fn follow_moments(&mut self, i: usize) {
        let (moments, shape) = self.nodes[i].outputs[0].clone();
        let len = shape.elements() / 2;
        let Some(mean) = self.only(moments, &Task::Slice { start: 0, len }) else { return };
        let Some(variance) = self.only(moments, &Task::Slice { start: len, len }) else { return };
        let reader = |at: usize| {
            let value = self.nodes[at].outputs[0].0;
            let mut readers = self.readers(value).filter(|_| !self.is_seen(value));
            readers.next().filter(|_| readers.next().is_none())
        };
        let Some(scale) = reader(variance) else { return };
        let Task::Scale(unbias) = self.nodes[scale].task else { return };
        let (Some(by_mean), Some(by_variance)) = (reader(mean), reader(scale)) else { return };
        // Of a statistic and what it follows, in this order.
        let follows = |at: usize, value: usize| {
            let node = &self.nodes[at];
            node.task == Task::Sub && node.inputs[1].0 == self.nodes[value].outputs[0].0
        };
        if !follows(by_mean, mean) || !follows(by_variance, scale) {
            return;
        }
        self.nodes[i].task = Task::Moments { unbias: Some(unbias) };
        for at in [by_mean, by_variance] {
            let (own, excess) =
                (self.nodes[at].inputs[0].clone(), self.nodes[at].outputs[0].clone());
            self.nodes[i].inputs.push(own);
            self.nodes[i].outputs.push(excess);
        }
        let mut gone = [mean, variance, scale, by_mean, by_variance];
        gone.sort_unstable();
        gone.iter().rev().for_each(|at| drop(self.nodes.remove(*at)));
    }

    /// The one reader of a value that does this.
    fn only(&self, value: usize, task: &Task) -> Option<usize> {
        let mut doing = self.readers(value).filter(|&r| self.nodes[r].task == *task);
        doing.next().filter(|_| doing.next().is_none())
    }

    /// The losses, their mean, and the gradient, where its upstream is the same number for all.
    fn whole_cross_entropy(&mut self, i: usize) {
        let operands = [self.nodes[i].inputs[0].0, self.nodes[i].inputs[1].0];
        let (losses, shape) = self.nodes[i].outputs[0].clone();
        let exactly = 1.0 / shape.elements() as f32;
        let mean = self
            .readers(losses)
            .find(|&r| self.nodes[r].task == Task::Sum { squares: false, factor: exactly });
        let mean = mean.map(|at| self.nodes.remove(at).outputs.swap_remove(0));
        let upstream = |node: &Node| match self.maker(node.inputs[0].0) {
            Some(at) => match self.nodes[at].task {
                Task::Fill(value) => Some(value),
                _ => None,
            },
            None => None,
        };
        let gradient = self.nodes.iter().enumerate().find_map(|(at, node)| {
            let same = node.task == Task::CrossEntropyGrad
                && [node.inputs[1].0, node.inputs[2].0] == operands;
            same.then(|| upstream(node)).flatten().map(|value| (at, value))
        });
        let value = gradient.map(|(_, value)| value);
        let gradient = gradient.map(|(at, _)| self.nodes.remove(at).outputs.swap_remove(0));
        self.nodes[i].task = Task::CrossEntropy { mean: mean.is_some(), gradient: value };
        self.nodes[i].outputs.extend(mean.into_iter().chain(gradient));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Fusions;
    use crate::model::{Cifar, Resnet, ResnetVersion, compile};

    #[test]
    fn the_tutorial_networks_step_is_a_few_launches() {
        let program =
            compile(&Cifar { classes: 10, lrn: true }, 2).unwrap().train(Fusions::Forward);
        let mut draft = Draft::of(&program);
        assert!(draft.nodes.len() > 40);
        draft.fuse();
        let count = |wanted: fn(&Task) -> bool| {
            draft.nodes.iter().filter(|node| wanted(&node.task)).count()
        };
        assert_eq!(draft.nodes.len(), 32);
        assert_eq!(
            count(|task| matches!(task, Task::CrossEntropy { mean: true, gradient: Some(_) })),
            1
        );
        assert_eq!(count(|task| matches!(task, Task::Product { plus: Some(_), .. })), 2);
        assert_eq!(count(|task| *task == Task::ReluBiasGrad), 2);
        assert_eq!(count(|task| matches!(task, Task::MaxPoolGrad { relu: true, .. })), 1);
        assert_eq!(count(|task| matches!(task, Task::LrnGrad { relu: true, .. })), 1);
        assert_eq!(
            count(|task| matches!(task, Task::ReluGrad | Task::Scale(_) | Task::Fill(_))),
            0
        );
    }

    /// Moments with what statistics are too large by, the normalisation, the sums of its gradient, the gradient by the input.
    #[test]
    fn a_batch_normalisation_is_four_launches() {
        for (version, layers) in [(ResnetVersion::V1, 7), (ResnetVersion::V2, 8)] {
            let model = Resnet { depth: 8, version, classes: 10 };
            let mut draft = Draft::of(&compile(&model, 2).unwrap().train(Fusions::Forward));
            draft.fuse();
            let count =
                |wanted: &dyn Fn(&Node) -> bool| draft.nodes.iter().filter(|n| wanted(n)).count();
            let whole = |node: &Node| {
                let both = matches!(node.task, Task::Moments { unbias: Some(_) });
                (both || matches!(node.task, Task::BatchNormSums(_))) && node.outputs.len() == 3
            };
            assert_eq!(count(&whole), 2 * layers);
            assert_eq!(count(&|node| matches!(node.task, Task::BatchNorm(_))), layers);
            assert_eq!(count(&|node| matches!(node.task, Task::BatchNormInputGrad(_))), layers);
            assert_eq!(count(&|node| node.task == Task::Sub), 0);
            // Those of the padded shortcuts.
            assert_eq!(count(&|node| matches!(node.task, Task::Slice { .. })), 4);
        }
    }

    /// Each value is made once, before anybody reads it, and every gradient is made.
    #[test]
    fn fusing_keeps_values_whole() {
        let program =
            compile(&Cifar { classes: 10, lrn: true }, 2).unwrap().observe(Fusions::Forward);
        let mut draft = Draft::of(&program);
        draft.fuse();
        let mut made = vec![false; draft.values.len()];
        for node in &draft.nodes {
            for (input, _) in &node.inputs {
                assert!(made[*input] || draft.maker(*input).is_none(), "{}", node.name);
            }
            for (output, _) in &node.outputs {
                assert!(!std::mem::replace(&mut made[*output], true), "{}", node.name);
            }
        }
        for step in
            program.steps.iter().filter(|s| s.output.place == crate::graph::Place::Gradients)
        {
            let home = |value: &usize| draft.values[*value].home == Some(step.output);
            assert!((0..made.len()).any(|value| made[value] && home(&value)), "{}", step.name);
        }
        assert!(draft.fetches.iter().all(|value| value.is_some_and(|value| made[value])));
    }
}
