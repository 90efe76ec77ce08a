//! [`Report`]: whoever wants to know what happens in a run; those that write files are here.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use serde::Serialize;

use super::eval::{Evaluation, Weights};
use super::meter::Line;
use super::supervisor::Outcome;
use super::trainer::StepReport;
use crate::io::{EventWriter, MetricsWriter};
use crate::tensor::{HostTensor, Shape};
use crate::util::clock::Clock;

/// Something worth telling.
#[derive(Debug)]
pub enum Happening<'a> {
    /// A step is done; for progress bars.
    Step(&'a StepReport),
    /// A log line is due.
    Line(&'a Line),
    /// A summary is due.
    Summary(&'a Summary),
    /// The model was evaluated.
    Evaluation(&'a Evaluation),
    /// A checkpoint was written.
    Checkpoint {
        /// Where.
        path: &'a Path,
        /// Its global step.
        step: u64,
    },
    /// The run is over.
    End {
        /// The global step.
        step: u64,
        /// How.
        outcome: Outcome,
    },
}

/// The tensors of one step.
#[derive(Debug)]
pub struct Summary {
    /// The global step before the update.
    pub step: u64,
    /// By name, means over all towers.
    pub losses: Vec<(String, f64)>,
    /// By layer, of tower 0.
    pub activations: Vec<(String, Vec<f32>)>,
    /// Averaged, by variable.
    pub gradients: Vec<(String, Vec<f32>)>,
    /// After the update; averages and slots too.
    pub variables: Vec<(String, HostTensor)>,
    /// The features of tower 0.
    pub features: Vec<f32>,
}

/// Listens to a run.
pub trait Report {
    /// Called in the order of events.
    fn report(&mut self, happening: &Happening<'_>) -> Result<()>;
}

/// Writes `metrics.jsonl`.
pub struct MetricsReport {
    writer: MetricsWriter,
    clock: Arc<dyn Clock>,
}

impl MetricsReport {
    /// Appends to `writer`, without the rows that a run from step `start` on writes again.
    pub fn new(mut writer: MetricsWriter, start: u64, clock: Arc<dyn Clock>) -> Result<Self> {
        writer.cut(|row| match row["step"].as_u64() {
            // The row of a step has the number of updates before it, that of an evaluation after it.
            Some(step) if row["kind"] == "evaluation" => step > start,
            Some(step) => step >= start,
            None => false,
        })?;
        Ok(Self { writer, clock })
    }
}

/// One line of `metrics.jsonl`.
#[derive(Serialize)]
struct Record<'a, T> {
    kind: &'static str,
    /// Seconds since the Unix epoch.
    time: f64,
    #[serde(flatten)]
    values: &'a T,
}

impl Report for MetricsReport {
    fn report(&mut self, happening: &Happening<'_>) -> Result<()> {
        let time = self.clock.wall().as_secs_f64();
        match happening {
            Happening::Line(values) => {
                self.writer.write(&Record { kind: "step", time, values: *values })?;
            }
            Happening::Evaluation(values) => {
                self.writer.write(&Record { kind: "evaluation", time, values: *values })?;
            }
            _ => {}
        }
        Ok(())
    }
}

/// Pictures of a batch that a summary shows.
const PICTURES: usize = 3;

/// Writes TensorBoard events.
pub struct EventsReport {
    writer: EventWriter,
    features: Shape,
}

impl EventsReport {
    /// Appends to `writer`; `features` are the extents of one example.
    pub fn new(writer: EventWriter, features: Shape) -> Self {
        Self { writer, features }
    }

    fn summary(&mut self, summary: &Summary) -> Result<()> {
        let step = summary.step;
        // The total is in every line already.
        for (name, value) in summary.losses.iter().skip(1) {
            self.writer.scalar(step, &format!("{name} (raw)"), *value)?;
        }
        for (name, values) in &summary.activations {
            let zeros = values.iter().filter(|v| **v == 0.0).count();
            self.writer.histogram(step, &format!("{name}/activations"), values)?;
            let share = zeros as f64 / values.len().max(1) as f64;
            self.writer.scalar(step, &format!("{name}/sparsity"), share)?;
        }
        for (name, values) in &summary.gradients {
            self.writer.histogram(step, &format!("{name}/gradients"), values)?;
        }
        for (name, tensor) in &summary.variables {
            if let Some(values) = tensor.as_f32() {
                self.writer.histogram(step, name, values)?;
            }
        }
        if let [height, width, 3] = self.features[..] {
            let pictures = summary.features.chunks(height * width * 3).take(PICTURES);
            for (i, picture) in pictures.enumerate() {
                let rgb = stretched(picture);
                self.writer.image(
                    step,
                    &format!("images/image/{i}"),
                    height as u32,
                    width as u32,
                    &rgb,
                )?;
            }
        }
        Ok(())
    }
}

/// Floats of any range as bytes: 0 becomes 127.5 and the value farthest from it 0 or 255, as TensorFlow shows pictures.
fn stretched(values: &[f32]) -> Vec<u8> {
    let largest = values.iter().fold(f32::MIN_POSITIVE, |m, v| m.max(v.abs()));
    values.iter().map(|v| (v / largest * 127.5 + 127.5) as u8).collect()
}

impl Report for EventsReport {
    fn report(&mut self, happening: &Happening<'_>) -> Result<()> {
        match happening {
            Happening::Line(line) => {
                self.writer.scalar(line.step, "total_loss (raw)", line.loss)?;
                self.writer.scalar(line.step, "total_loss", line.average_loss)?;
                self.writer.scalar(line.step, "learning_rate", line.learning_rate)?;
                self.writer.scalar(line.step, "examples_per_sec", line.examples_per_sec)?;
                self.writer.flush()?;
            }
            Happening::Summary(summary) => self.summary(summary)?,
            Happening::Evaluation(evaluation) => {
                let suffix = match evaluation.weights {
                    Weights::Raw => " (raw weights)",
                    Weights::Averaged => "",
                };
                let step = evaluation.step;
                self.writer.scalar(
                    step,
                    &format!("Precision @ 1{suffix}"),
                    evaluation.precision,
                )?;
                self.writer.scalar(step, &format!("Precision @ 5{suffix}"), evaluation.top5)?;
                self.writer.flush()?;
            }
            Happening::Checkpoint { path, step } => self.writer.checkpoint(*step, path)?,
            Happening::End { step, .. } => {
                self.writer.session_stop(*step)?;
                self.writer.flush()?;
            }
            Happening::Step(_) => {}
        }
        Ok(())
    }
}
