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
    /// Finished batches, or packs of small ones, that wait at most, rounded up to a multiple of `threads`.
    pub depth: usize,
}

/// Floats that a thread hands over at least, or this many batches: waking who waits takes longer than making a small batch.
const PACK: usize = 1 << 12;
const MOST_IN_PACK: usize = 64;

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
/// Batch `k` of group `g = k / group` is the `g * stride + k % group`-th from `position` on. Batches go in packs, of one where they
/// are not small. Thread `w` of `W` makes the packs `w`, `w + W`, ... and each has a queue of its own, from which they are
/// taken in turn: the order is that of one thread. Dropping the pipeline ends its threads.
pub struct InputPipeline {
    spec: PipelineSpec,
    source_name: String,
    source: Arc<dyn Source>,
    queues: Vec<Receiver<Result<Vec<Batch>, DataError>>>,
    threads: Vec<JoinHandle<()>>,
    spares: Arc<Spares<Batch>>,
    packs: Arc<Spares<Vec<Batch>>>,
    /// Batches of a pack.
    pack: usize,
    /// What is left of the pack at hand, the next batch last.
    open: Vec<Batch>,
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
        let floats = spec.batch * (source.feature_shape().elements() + 1);
        let pack = PACK.div_ceil(floats).clamp(1, MOST_IN_PACK);
        // Each thread has one pack in hand, and so has the consumer.
        let around = spec.threads * (waiting + 1) + 1;
        let (spares, packs) = (Arc::new(Spares::new(around * pack)), Arc::new(Spares::new(around)));
        let mut pipeline = Self {
            spec,
            source_name: source.name().to_owned(),
            source: source.clone(),
            queues: Vec::with_capacity(spec.threads),
            threads: Vec::with_capacity(spec.threads),
            spares: spares.clone(),
            packs: packs.clone(),
            pack,
            open: Vec::new(),
            taken: 0,
        };
        for first in 0..spec.threads as u64 {
            let (queue, batches) = sync_channel(waiting);
            let worker = Worker {
                source: source.clone(),
                spec,
                sampler: Sampler::new(spec.seed, examples, spec.shuffle),
                spares: spares.clone(),
                packs: packs.clone(),
                pack: pack as u64,
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
        loop {
            if let Some(batch) = self.open.pop() {
                self.taken += 1;
                return Ok(batch);
            }
            let turn = self.taken / self.pack as u64 % self.queues.len() as u64;
            let pack = self.queues[turn as usize].recv().unwrap_or_else(|_| {
                Err(DataError::Worker {
                    source_name: self.source_name.clone(),
                    batch: self.taken,
                    message: "it had failed before".to_owned(),
                })
            })?;
            self.packs.put(std::mem::replace(&mut self.open, pack));
        }
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
    spares: Arc<Spares<Batch>>,
    packs: Arc<Spares<Vec<Batch>>>,
    pack: u64,
    queue: SyncSender<Result<Vec<Batch>, DataError>>,
}

impl Worker {
    /// Makes every `threads`-th pack from `first` until nobody takes them or a batch fails.
    fn run(mut self, first: u64) {
        for n in (first..).step_by(self.spec.threads) {
            let (mut pack, mut failed) = (self.packs.get(), None);
            for k in n * self.pack..(n + 1) * self.pack {
                match self.make(k) {
                    Ok(batch) => pack.push(batch),
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
            pack.reverse();
            if self.queue.send(Ok(pack)).is_err() {
                return;
            }
            if let Some(error) = failed {
                // Where nobody takes it, nobody needs it.
                let _ = self.queue.send(Err(error));
                return;
            }
        }
    }

    fn make(&mut self, k: u64) -> Result<Batch, DataError> {
        let (mut batch, values) = (self.spares.get(), self.source.feature_shape().elements());
        batch.features.resize(self.spec.batch * values, 0.0);
        batch.labels.resize(self.spec.batch, 0.0);
        let filled = catch_unwind(AssertUnwindSafe(|| self.fill(k, values, &mut batch)));
        filled.map(|()| batch).map_err(|panic| DataError::Worker {
            source_name: self.source.name().to_owned(),
            batch: k,
            message: panic_message(&*panic),
        })
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

/// What can be used again, for its memory.
struct Spares<T> {
    all: Mutex<Vec<T>>,
    most: usize,
}

impl<T: Default> Spares<T> {
    fn new(most: usize) -> Self {
        Self { all: Mutex::new(Vec::with_capacity(most)), most }
    }

    fn get(&self) -> T {
        self.lock().pop().unwrap_or_default()
    }

    fn put(&self, one: T) {
        let mut all = self.lock();
        if all.len() < self.most {
            all.push(one);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<T>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
