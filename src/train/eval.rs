//! [`Evaluator`]: how often a model is right, over exactly the examples asked for.

use anyhow::{Result, bail};
use serde::Serialize;

use crate::data::Source;
use crate::device::{Device, Executable, Feeds, Slab};
use crate::model::{Model, compile};
use crate::store::State;

/// Which values of the variables are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Weights {
    /// As trained.
    Raw,
    /// Their moving averages.
    Averaged,
}

/// Hits among the examples of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClassScore {
    /// Whose largest logit is the label's.
    pub correct: usize,
    /// Of this class.
    pub total: usize,
}

/// The outcome over a data set.
#[derive(Clone, Debug, Serialize)]
pub struct Evaluation {
    /// The global step of the variables.
    pub step: u64,
    /// Which values of them.
    pub weights: Weights,
    /// Counted examples.
    pub examples: usize,
    /// Share with the label's logit on top; ties count, as in TensorFlow's `in_top_k`.
    pub precision: f64,
    /// Share with the label among the five largest.
    pub top5: f64,
    /// Mean cross-entropy.
    pub cross_entropy: f64,
    /// By class.
    pub classes: Vec<ClassScore>,
}

/// Runs a model forward over a data set.
pub struct Evaluator {
    program: Box<dyn Executable>,
    variables: Slab,
    classes: usize,
    features: Vec<f32>,
    logits: Vec<f32>,
    batch: usize,
}

impl Evaluator {
    /// Of `model` on `device`, `batch` examples at a time.
    pub fn new(model: &dyn Model, device: &dyn Device, batch: usize) -> Result<Self> {
        let Some(classes) = model.classes() else {
            bail!("model {} is a regression: it has no classes to evaluate", model.name())
        };
        let compiled = compile(model, batch)?;
        let program = device.load(compiled.predict())?;
        let variables = device.alloc(compiled.table().slab_len())?;
        let features = vec![0.0; batch * model.features().elements()];
        let logits = vec![0.0; batch * classes];
        Ok(Self { program, variables, classes, features, logits, batch })
    }

    /// Over the first `limit` examples of `source`, each exactly once.
    pub fn evaluate(
        &mut self,
        state: &State,
        weights: Weights,
        source: &dyn Source,
        limit: usize,
    ) -> Result<Evaluation> {
        self.set(state, weights)?;
        let examples = limit.min(source.len());
        let mut classes = vec![ClassScore::default(); self.classes];
        let (mut correct, mut top5, mut cross_entropy) = (0, 0, 0.0);
        for start in (0..examples).step_by(self.batch) {
            let count = self.batch.min(examples - start);
            let labels = self.predict(source, start, count)?;
            for (logits, label) in self.logits.chunks(self.classes).zip(labels) {
                let own = f64::from(logits[label]);
                let rank = logits.iter().filter(|&&logit| f64::from(logit) > own).count();
                let hit = own.is_finite() && rank == 0;
                correct += usize::from(hit);
                top5 += usize::from(own.is_finite() && rank < 5);
                classes[label].correct += usize::from(hit);
                classes[label].total += 1;
                cross_entropy += log_sum_exp(logits) - own;
            }
        }
        let share = |n: usize| n as f64 / examples.max(1) as f64;
        Ok(Evaluation {
            step: state.global_step,
            weights,
            examples,
            precision: share(correct),
            top5: share(top5),
            cross_entropy: cross_entropy / examples.max(1) as f64,
            classes,
        })
    }

    /// Class probabilities of one example's features, by the variables of the last [`Evaluator::set`].
    pub fn probabilities(&mut self, features: &[f32]) -> Result<Vec<f64>> {
        self.features[..features.len()].copy_from_slice(features);
        self.run()?;
        let logits = &self.logits[..self.classes];
        let sum = log_sum_exp(logits);
        Ok(logits.iter().map(|&logit| (f64::from(logit) - sum).exp()).collect())
    }

    /// Takes the variables from a checkpoint.
    pub fn set(&mut self, state: &State, weights: Weights) -> Result<()> {
        let table = self.program.program().table.clone();
        let values = state.variables(&table, weights == Weights::Averaged)?;
        Ok(self.variables.write(0..values.len(), &values)?)
    }

    /// Logits of `count` examples from `start`; returns their labels. A short batch keeps old features at its end,
    /// whose logits nobody reads.
    fn predict(&mut self, source: &dyn Source, start: usize, count: usize) -> Result<Vec<usize>> {
        let each = self.features.len() / self.batch;
        let mut labels = Vec::with_capacity(count);
        for (i, features) in self.features.chunks_mut(each).take(count).enumerate() {
            let label = source.write(0, start + i, features) as usize;
            if label >= self.classes {
                bail!(
                    "{}: label {label} of example {} is beyond the model's {} classes",
                    source.name(),
                    start + i,
                    self.classes
                );
            }
            labels.push(label);
        }
        self.run()?;
        Ok(labels)
    }

    fn run(&mut self) -> Result<()> {
        // A forward program has no use for labels, but the feed has its place.
        let labels = &self.logits[..self.batch];
        let feeds = [&self.features[..], labels];
        self.program.run(&self.variables, Feeds::only(&feeds), None, &mut |_, _| ())?;
        Ok(self.program.fetch(0, &mut self.logits)?)
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(f64::from(x)));
    largest + logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum::<f64>().ln()
}
