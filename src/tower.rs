//! [`Tower`]: a replica of the model on one device, here or on another task.

use std::sync::Arc;

use crate::cluster::DeviceName;
use crate::data::Batch;
use crate::device::{Device, DeviceError, Done, Executable, Feeds, Slab};
use crate::model::Compiled;
use crate::util::trace::Trace;

/// The batch of a step.
#[derive(Clone, Copy, Debug)]
pub struct Batches<'a> {
    /// Its own.
    pub now: &'a Batch,
    /// That of the tower's next call, where it is known.
    pub next: Option<&'a Batch>,
    /// Whether gradients that stay on the device are told of while the rest is computed.
    pub early: bool,
}

impl<'a> Batches<'a> {
    /// After which nothing is known.
    pub fn only(now: &'a Batch) -> Self {
        Self { now, next: None, early: false }
    }
}

/// Forward, loss and backward of one batch.
pub trait Tower: Send {
    /// The full name of its device.
    fn device(&self) -> &DeviceName;

    /// What its device is, in words: `2 threads, AVX-512`.
    fn describe(&self) -> String;

    /// Writes the gradient into `into`, perhaps later in the order of its device's work; `done` hears of each part of it when it is
    /// final. With `observe` the activations of this batch can be asked for afterwards; the bits are the same.
    fn gradients(
        &mut self,
        variables: &Slab,
        batches: Batches<'_>,
        observe: bool,
        into: &mut Slab,
        done: Done<'_>,
    ) -> Result<(), TowerError>;

    /// Waits, and appends the losses of each call of [`Tower::gradients`] since they were last asked for, the total first.
    fn losses(&mut self, into: &mut Vec<f32>) -> Result<(), TowerError>;

    /// Whether it makes use of [`Batches::next`].
    fn fetches_ahead(&self) -> bool {
        false
    }

    /// The activations of the last observed batch, by layer.
    fn activations(&mut self) -> Result<Vec<(String, Vec<f32>)>, TowerError>;

    /// Draws its operations in a lane from now on, where they are in this process.
    fn trace(&mut self, _trace: Arc<Trace>, _lane: &str) {}
}

/// As a program takes them.
fn feeds(batch: &Batch) -> [&[f32]; 2] {
    [&batch.features, &batch.labels]
}

/// What can go wrong in a tower.
#[derive(Debug, thiserror::Error)]
pub enum TowerError {
    /// Its device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// It is on another task and cannot be reached, or that task failed.
    #[error("{0}")]
    Remote(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// A tower on a device of this process.
pub struct LocalTower {
    train: Box<dyn Executable>,
    /// The same program with its activations kept, loaded when first asked for.
    observe: Option<Box<dyn Executable>>,
    /// Whether the training program knows the batch of the next call already.
    known: bool,
    /// Losses of a call.
    n_losses: usize,
    /// Losses that were taken over from a program and not asked for yet.
    losses: Vec<f32>,
    /// Whether the last call was observed, and how many of its kind have losses that only the program knows.
    observed: bool,
    unread: usize,
    device: Arc<dyn Device>,
    compiled: Arc<Compiled>,
}

impl LocalTower {
    /// Loads the model's training program.
    pub fn new(device: Arc<dyn Device>, compiled: Arc<Compiled>) -> Result<Self, DeviceError> {
        let train = device.load(compiled.train(device.fusions()))?;
        let (n_losses, losses) = (compiled.loss_names().len(), Vec::new());
        let (observe, known, observed, unread) = (None, false, false, 0);
        Ok(Self { train, observe, known, n_losses, losses, observed, unread, device, compiled })
    }

    /// Takes over the losses that the program which ran last knows.
    fn remember(&mut self) -> Result<(), DeviceError> {
        if self.unread == 0 {
            return Ok(());
        }
        self.unread = 0;
        let program = self.observe.as_mut().filter(|_| self.observed).unwrap_or(&mut self.train);
        program.scalars(self.n_losses, &mut self.losses)
    }
}

impl Tower for LocalTower {
    fn device(&self) -> &DeviceName {
        self.device.name()
    }

    fn describe(&self) -> String {
        self.device.describe()
    }

    fn gradients(
        &mut self,
        variables: &Slab,
        batches: Batches<'_>,
        observe: bool,
        into: &mut Slab,
        done: Done<'_>,
    ) -> Result<(), TowerError> {
        if observe && self.observe.is_none() {
            self.observe = Some(self.device.load(self.compiled.observe(self.device.fusions()))?);
        }
        let ahead = self.device.fetches_ahead();
        let (now, next) = (feeds(batches.now), batches.next.filter(|_| ahead).map(feeds));
        if observe != self.observed || self.unread == self.train.remembers() {
            self.remember()?;
            self.observed = observe;
        }
        self.unread += 1;
        match &mut self.observe {
            Some(program) if observe => {
                self.known = false;
                let feeds = Feeds { early: batches.early, ..Feeds::only(&now) };
                Ok(program.run(variables, feeds, Some(into), done)?)
            }
            _ => {
                let known = std::mem::replace(&mut self.known, next.is_some());
                let next = next.as_ref().map(|next| &next[..]);
                let feeds = Feeds { now: &now, next, known, early: batches.early };
                Ok(self.train.run(variables, feeds, Some(into), done)?)
            }
        }
    }

    fn losses(&mut self, into: &mut Vec<f32>) -> Result<(), TowerError> {
        self.remember()?;
        into.append(&mut self.losses);
        Ok(())
    }

    fn fetches_ahead(&self) -> bool {
        self.device.fetches_ahead()
    }

    fn trace(&mut self, trace: Arc<Trace>, lane: &str) {
        self.train.trace(trace, lane);
    }

    fn activations(&mut self) -> Result<Vec<(String, Vec<f32>)>, TowerError> {
        let Some(program) = &self.observe else { return Ok(Vec::new()) };
        let fetches = program.program().fetches.iter().enumerate().skip(self.n_losses);
        let names = self.compiled.activation_names();
        names
            .into_iter()
            .zip(fetches)
            .map(|(name, (i, fetch))| {
                let mut values = vec![0.0; fetch.view.len];
                program.fetch(i, &mut values)?;
                Ok((name, values))
            })
            .collect()
    }
}
