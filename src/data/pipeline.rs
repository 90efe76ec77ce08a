//! [`InputPipeline`]: threads that make batches ahead of the trainer, in an order that no timing changes.

use std::any::Any;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::{Batch, DataError, Sampler, Source};

/// What an [`InputPipeline`] hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineSpec {
    /// Seed of the examples' order.
    pub seed: u64,
    /// Whether every epoch has a random order of its own.
    pub shuffle: bool,
    /// Examples per batch.
    pub batch: usize,
    /// Examples before the first batch, counted since the start of training.
    pub position: u64,
    /// Batches that follow each other: those of one step of this process; at least 1.
    pub group: u64,
    /// Batches from the start of one group to that of the next: as many as `group`, or those of a step
    /// of everybody where others have pipelines of their own.
    pub stride: u64,
    /// Threads that make batches.
    pub threads: usize,
    /// Finished batches that wait at most, rounded up to a multiple of `threads`.
    pub depth: usize,
}

/// Positions and steps stay below, so that no sum of them overflows in centuries of training.
const POSITION_LIMIT: u64 = 1 << 62;
const STEP_LIMIT: u64 = 1 << 32;

impl PipelineSpec {
    /// The position of batch `k`, counted since the pipeline started.
    fn position_of(&self, k: u64) -> u64 {
        self.position + (k / self.group * self.stride + k % self.group) * self.batch as u64
    }

    /// Whether the pipeline can work; the number of examples for the sampler.
    fn check(&self, source: &dyn Source) -> Result<NonZeroU32, DataError> {
        let need = |ok, setting, value, need| {
            if ok { Ok(()) } else { Err(DataError::Spec { setting, value, need }) }
        };
        for (setting, value) in
            [("batch", self.batch as u64), ("group", self.group), ("stride", self.stride)]
        {
            need(value > 0, setting, value, "at least 1")?;
        }
        for (setting, value) in [("threads", self.threads), ("depth", self.depth)] {
            need((1..=1024).contains(&value), setting, value as u64, "1 to 1024")?;
        }
        let step = self.stride.saturating_mul(self.batch as u64);
        need(step < STEP_LIMIT, "stride x batch", step, "below 2^32")?;
        need(self.position < POSITION_LIMIT, "position", self.position, "below 2^62")?;

        let examples = source.len();
        need(examples as u64 <= u64::from(u32::MAX), "examples", examples as u64, "below 2^32")?;
        match NonZeroU32::new(examples as u32) {
            Some(n) if examples >= self.batch => Ok(n),
            _ => Err(DataError::TooFew {
                source_name: source.name().to_owned(),
                examples,
                batch: self.batch,
            }),
        }
    }
}

/// Makes batches in threads of its own.
///
/// Batch `k` of group `g = k / group` is the `g * stride + k % group`-th from `position` on. Thread `w` of
/// `W` makes the batches `w`, `w + W`, ... and each has a queue of its own, from which they are
/// taken in turn: the order is that of one thread. Dropping the pipeline ends its threads.
pub struct InputPipeline {
    spec: PipelineSpec,
    source_name: String,
    source: Arc<dyn Source>,
    queues: Vec<Receiver<Result<Batch, DataError>>>,
    threads: Vec<JoinHandle<()>>,
    spares: Arc<Spares>,
    /// Batches handed out.
    taken: u64,
}

impl InputPipeline {
    /// Starts the threads.
    ///
    /// # Errors
    /// When a number of `spec` is out of range, the source has fewer examples than a batch, or a
    /// thread cannot be started.
    pub fn start(source: Arc<dyn Source>, spec: PipelineSpec) -> Result<Self, DataError> {
        let examples = spec.check(&*source)?;
        let waiting = spec.depth.div_ceil(spec.threads);
        // Each thread has one batch in hand, and so has the consumer.
        let spares = Arc::new(Spares::new(spec.threads * (waiting + 1) + 1));
        let mut pipeline = Self {
            spec,
            source_name: source.name().to_owned(),
            source: source.clone(),
            queues: Vec::with_capacity(spec.threads),
            threads: Vec::with_capacity(spec.threads),
            spares: spares.clone(),
            taken: 0,
        };
        for first in 0..spec.threads as u64 {
            let (queue, batches) = sync_channel(waiting);
            let worker = Worker {
                source: source.clone(),
                spec,
                sampler: Sampler::new(spec.seed, examples, spec.shuffle),
                spares: spares.clone(),
                queue,
            };
            let thread = thread::Builder::new()
                .name(format!("input {first}"))
                .spawn(move || worker.run(first))
                .map_err(DataError::Spawn)?;
            pipeline.queues.push(batches);
            pipeline.threads.push(thread);
        }
        Ok(pipeline)
    }

    /// The next batch; waits for it where it is not ready.
    ///
    /// # Errors
    /// When the thread that makes it has panicked; so does every later call.
    #[allow(
        clippy::should_implement_trait,
        reason = "batches never end, and a loop would hide errors"
    )]
    pub fn next(&mut self) -> Result<Batch, DataError> {
        let turn = (self.taken % self.queues.len() as u64) as usize;
        let batch = self.queues[turn].recv().unwrap_or_else(|_| {
            Err(DataError::Worker {
                source_name: self.source_name.clone(),
                batch: self.taken,
                message: "it had failed before".to_owned(),
            })
        })?;
        self.taken += 1;
        Ok(batch)
    }

    /// Takes back a batch that is done with, for its memory.
    pub fn recycle(&mut self, batch: Batch) {
        self.spares.put(batch);
    }

    /// The features of a batch as a model reads them.
    pub fn features(&self, batch: &Batch) -> Vec<f32> {
        self.source.unfolded(&batch.features)
    }

    /// The position of the next batch: what a checkpoint stores to continue from here.
    pub fn position(&self) -> u64 {
        self.spec.position_of(self.taken)
    }
}

impl Drop for InputPipeline {
    fn drop(&mut self) {
        // Without its receiver, a thread's next or waiting send fails, which ends it.
        self.queues.clear();
        for thread in self.threads.drain(..) {
            // A worker catches its panics, and nobody is left to tell.
            let _ = thread.join();
        }
    }
}

/// What one thread works with.
struct Worker {
    source: Arc<dyn Source>,
    spec: PipelineSpec,
    sampler: Sampler,
    spares: Arc<Spares>,
    queue: SyncSender<Result<Batch, DataError>>,
}

impl Worker {
    /// Makes every `threads`-th batch from `first` until nobody takes them or one fails.
    fn run(mut self, first: u64) {
        let values = self.source.feature_shape().elements();
        for k in (first..).step_by(self.spec.threads) {
            let mut batch = self.spares.get();
            batch.features.resize(self.spec.batch * values, 0.0);
            batch.labels.resize(self.spec.batch, 0.0);
            let made = catch_unwind(AssertUnwindSafe(|| self.fill(k, values, &mut batch)))
                .map(|()| batch)
                .map_err(|panic| DataError::Worker {
                    source_name: self.source.name().to_owned(),
                    batch: k,
                    message: panic_message(&*panic),
                });
            let failed = made.is_err();
            if self.queue.send(made).is_err() || failed {
                return;
            }
        }
    }

    fn fill(&mut self, k: u64, values: usize, batch: &mut Batch) {
        let examples = batch.features.chunks_exact_mut(values.max(1)).zip(&mut batch.labels);
        for (position, (features, label)) in (self.spec.position_of(k)..).zip(examples) {
            let pick = self.sampler.at(position);
            *label = self.source.write(pick.epoch, pick.index, features);
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(message), _) => (*message).to_owned(),
        (_, Some(message)) => message.clone(),
        _ => "it panicked".to_owned(),
    }
}

/// Batches whose memory can be used again.
struct Spares {
    batches: Mutex<Vec<Batch>>,
    most: usize,
}

impl Spares {
    fn new(most: usize) -> Self {
        Self { batches: Mutex::new(Vec::with_capacity(most)), most }
    }

    fn get(&self) -> Batch {
        self.lock().pop().unwrap_or_default()
    }

    fn put(&self, batch: Batch) {
        let mut batches = self.lock();
        if batches.len() < self.most {
            batches.push(batch);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Batch>> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
