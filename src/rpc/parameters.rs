//! [`ParameterServer`]: the Variables service over a [`Shard`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tokio_stream::StreamExt;
use tonic::{Request, Response, Status, Streaming};

use super::attend::{Attendance, PEER_LOST, attend};
use super::bulk::{self, Incoming, Nothing};
use super::chunks;
use super::error::{refusal, stopped};
use super::members::{Departure, Failure, Members};
use super::proto::variables_server::Variables;
use super::proto::{Chunk, Header, PullRequest, PushReply, VersionReply, VersionRequest};
use crate::cluster::TaskId;
use crate::device::Slab;
use crate::optim::Schedule;
use crate::ps::{Effect, Pushed, Shard, ShardState, Tally, Version, Why};
use crate::store::StoreSettings;

/// What one release tells a worker.
#[derive(Clone, Copy, Debug, Default)]
struct Released {
    /// Counts releases, so that two of the same step differ.
    number: u64,
    step: u64,
}

/// A shard and who waits for it.
struct Inner {
    shard: Shard,
    /// Losses of the gradients of the round at hand, with their examples; by slot.
    losses: Vec<(f64, u64)>,
    /// Mean loss of the last update.
    loss: f64,
    /// How each worker's departure was last acted upon.
    seen: Vec<Option<Departure>>,
}

/// One ps task. A `std::sync::Mutex` guards the shard, since it is never held across a wait.
pub struct ParameterServer {
    inner: Mutex<Inner>,
    /// Training tasks in global order: a worker's number is its place here.
    workers: Vec<TaskId>,
    releases: Vec<watch::Sender<Released>>,
    version: watch::Sender<Option<Version>>,
    members: Arc<Members>,
    schedule: Schedule,
    /// Whether averages and slots are kept.
    averages: bool,
    slots: bool,
    synchronous: bool,
    /// No update goes beyond: a run ends at exactly this step.
    max_steps: u64,
}

impl ParameterServer {
    /// Serves `shard` to `workers`.
    pub fn new(
        shard: Shard,
        synchronous: bool,
        settings: &StoreSettings,
        max_steps: u64,
        workers: Vec<TaskId>,
        members: Arc<Members>,
    ) -> Arc<Self> {
        let seen = vec![None; workers.len()];
        let inner = Inner { shard, losses: Vec::new(), loss: 0.0, seen };
        Arc::new(Self {
            inner: Mutex::new(inner),
            releases: workers.iter().map(|_| watch::Sender::default()).collect(),
            workers,
            version: watch::Sender::new(None),
            members,
            schedule: settings.schedule.clone(),
            averages: settings.moving_average.is_some(),
            slots: settings.rule.momentum.is_some(),
            synchronous,
            max_steps,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What each worker's gradients came to.
    pub fn tallies(&self) -> Vec<(TaskId, Tally)> {
        self.workers.iter().cloned().zip(self.lock().shard.tallies()).collect()
    }

    /// A number that changes with every gradient, and where the variables stand, in words.
    pub fn standing(&self) -> (u64, String) {
        let inner = self.lock();
        let tallies = inner.shard.tallies();
        let gradients: u64 = tallies.iter().map(|tally| tally.applied + tally.stale).sum();
        let Some(version) = inner.shard.version() else {
            return (0, "waiting for the chief's values".to_owned());
        };
        let awaited: Vec<String> =
            inner.shard.owing().into_iter().map(|w| self.workers[w].to_string()).collect();
        let awaited = match awaited.is_empty() {
            true => String::new(),
            false => format!(", waiting for gradients of {}", awaited.join(", ")),
        };
        (1 + gradients + version.step, format!("at step {}{awaited}", version.step))
    }

    /// Serves until all workers are done or the run has failed.
    pub async fn run(self: Arc<Self>, attendance: Attendance<'_>) -> Option<Failure> {
        attend(&self.members, attendance, || self.follow(&mut self.lock())).await
    }

    /// Tells the rounds which workers have left or come back.
    fn follow(&self, inner: &mut Inner) {
        for worker in 0..self.workers.len() {
            let departure = self.members.departure(&self.workers[worker]);
            if inner.seen[worker] == departure {
                continue;
            }
            inner.seen[worker] = departure.clone();
            if !self.synchronous {
                continue;
            }
            let effects = match departure {
                Some(Departure::Lost) => inner.shard.leave(worker),
                Some(Departure::Done) => inner.shard.finish(worker),
                None => inner.shard.join(worker),
            };
            if let Ok(effects) = effects {
                self.carry_out(inner, &effects);
            }
        }
    }

    /// Wakes whom the effects release, and sums up the losses of an update.
    fn carry_out(&self, inner: &mut Inner, effects: &[Effect]) {
        for effect in effects {
            match effect {
                Effect::Apply { .. } => {
                    let examples: u64 = inner.losses.iter().map(|(_, n)| n).sum();
                    let sum: f64 = inner.losses.iter().map(|(loss, n)| loss * *n as f64).sum();
                    inner.loss = sum / examples.max(1) as f64;
                    inner.losses.clear();
                }
                Effect::Release { to, step } => {
                    for worker in to {
                        self.releases[*worker].send_modify(|released| {
                            *released = Released { number: released.number + 1, step: *step };
                        });
                    }
                }
                Effect::TooFew { left, min } => self.members.fail(Failure {
                    task: "ps".to_owned(),
                    reason: format!("{left} workers are left, {min} are needed"),
                    code: PEER_LOST,
                }),
                Effect::Drop { worker, why } => {
                    tracing::info!("dropped a gradient of {}: {why}", self.workers[*worker]);
                }
                Effect::Keep { .. } | Effect::End => {}
            }
        }
        self.version.send_replace(inner.shard.version());
    }

    fn worker(&self, task: &str) -> Result<usize, Status> {
        let place = self.workers.iter().position(|worker| worker.to_string() == task);
        place.ok_or_else(|| {
            Status::permission_denied(format!("{task} is no worker of this cluster"))
        })
    }

    /// Ends with the run's failure, when there is one.
    async fn failed(&self) -> Status {
        let mut changes = self.members.subscribe();
        loop {
            if let Some(Failure { task, reason, code }) = self.members.failure() {
                return stopped(&task, code, &reason);
            }
            // The sender lives as long as `self`.
            let _ = changes.changed().await;
        }
    }

    async fn push_gradient(&self, stream: Incoming<Chunk>) -> Result<PushReply, Status> {
        let mut stream = stream.map(|chunk| self.members.lent.open(chunk?));
        let mut slab = self.lock().shard.lend().map_err(refusal)?;
        let header = {
            let floats = slab.as_host_mut();
            let floats =
                floats.ok_or_else(|| Status::internal("a ps holds its slabs on the host"))?;
            chunks::join(&mut stream, |_| Ok(vec![floats])).await?
        };
        let worker = self.worker(&header.task)?;
        let seen = Version { incarnation: header.incarnation, step: header.step };
        if self.synchronous {
            self.push_to_round(worker, seen, &header, slab).await
        } else {
            self.push_at_once(worker, seen, &header, slab)
        }
    }

    /// The answer to a gradient for which there is no step left.
    fn at_the_end(&self, inner: &Inner, header: &Header) -> Option<PushReply> {
        let version = inner.shard.version().filter(|version| version.step >= self.max_steps)?;
        Some(PushReply { step: version.step, rate: 0.0, loss: header.loss, dropped: true })
    }

    fn push_at_once(
        &self,
        worker: usize,
        seen: Version,
        header: &Header,
        slab: Slab,
    ) -> Result<PushReply, Status> {
        let mut inner = self.lock();
        if let Some(reply) = self.at_the_end(&inner, header) {
            return Ok(reply);
        }
        let pushed = inner.shard.push(worker, seen, slab).map_err(refusal)?;
        self.version.send_replace(inner.shard.version());
        Ok(match pushed {
            Pushed::Applied(applied) => PushReply {
                step: applied.global_step,
                rate: applied.rate,
                loss: header.loss,
                dropped: false,
            },
            Pushed::Rejected { step, .. } => {
                PushReply { step, rate: 0.0, loss: header.loss, dropped: true }
            }
        })
    }

    async fn push_to_round(
        &self,
        worker: usize,
        seen: Version,
        header: &Header,
        slab: Slab,
    ) -> Result<PushReply, Status> {
        let mut release = self.releases[worker].subscribe();
        let dropped = {
            let mut inner = self.lock();
            // A worker that has just come back counts from its first gradient on.
            self.follow(&mut inner);
            if let Some(reply) = self.at_the_end(&inner, header) {
                return Ok(reply);
            }
            // An earlier release is no answer to this gradient.
            release.mark_unchanged();
            let effects =
                inner.shard.offer(worker, seen, header.examples, slab).map_err(refusal)?;
            if effects.contains(&Effect::Drop { worker, why: Why::Stranger }) {
                return Err(Status::unavailable(format!("{} is not here any more", header.task)));
            }
            let dropped = effects.iter().any(|e| matches!(e, Effect::Drop { .. }));
            if !dropped {
                inner.losses.push((header.loss, header.examples));
            }
            self.carry_out(&mut inner, &effects);
            dropped
        };
        tokio::select! {
            changed = release.changed() => changed.map_err(|_| Status::unavailable("the ps ended"))?,
            failure = self.failed() => return Err(failure),
        }
        let step = release.borrow().step;
        let rate = self.schedule.rate(step.saturating_sub(1));
        Ok(PushReply { step, rate, loss: self.lock().loss, dropped })
    }
}

fn reply(version: Option<Version>) -> VersionReply {
    let ready = version.is_some();
    let Version { incarnation, step } = version.unwrap_or(Version { incarnation: 0, step: 0 });
    VersionReply { ready, incarnation, step }
}

#[tonic::async_trait]
impl Variables for Arc<ParameterServer> {
    async fn version(
        &self,
        request: Request<VersionRequest>,
    ) -> Result<Response<VersionReply>, Status> {
        let mut version = self.version.subscribe();
        if request.into_inner().wait {
            tokio::select! {
                ready = version.wait_for(Option::is_some) => {
                    drop(ready.map_err(|_| Status::unavailable("the ps ended"))?);
                }
                failure = self.failed() => return Err(failure),
            }
        }
        let now = *version.borrow();
        Ok(Response::new(reply(now)))
    }

    async fn restore(
        &self,
        mut request: Request<Streaming<Chunk>>,
    ) -> Result<Response<VersionReply>, Status> {
        let mut stream = bulk::received(request.extensions_mut());
        let len = self.lock().shard.floats();
        let part = |wanted: bool| wanted.then(|| vec![0.0; len]);
        let (mut params, mut averages, mut slots) =
            (vec![0.0; len], part(self.averages), part(self.slots));
        let header = chunks::join(&mut stream, |_| {
            let others = averages.iter_mut().chain(&mut slots);
            Ok(std::iter::once(&mut params).chain(others).map(|part| &mut part[..]).collect())
        })
        .await?;
        let state = ShardState { step: header.step, params, averages, slots };
        let mut inner = self.lock();
        let effects = inner.shard.restore(header.incarnation, &state).map_err(refusal)?;
        inner.losses.clear();
        self.carry_out(&mut inner, &effects);
        Ok(Response::new(reply(inner.shard.version())))
    }

    type PullStream = Nothing<Result<Chunk, Status>>;

    async fn pull(
        &self,
        request: Request<PullRequest>,
    ) -> Result<Response<Self::PullStream>, Status> {
        let everything = request.into_inner().everything;
        // The chief may still save when the run is over.
        if let Some(Failure { task, reason, code }) = self.members.failure().filter(|_| !everything)
        {
            return Err(stopped(&task, code, &reason));
        }
        let (version, views) = self.lock().shard.views(everything).map_err(refusal)?;
        let Version { incarnation, step } = version;
        let header = Header { incarnation, step, ..Header::default() };
        let stream = chunks::split(header, views.into_iter().map(chunks::bytes).collect());
        Ok(bulk::reply(stream))
    }

    async fn push(
        &self,
        mut request: Request<Streaming<Chunk>>,
    ) -> Result<Response<PushReply>, Status> {
        self.push_gradient(bulk::received(request.extensions_mut())).await.map(Response::new)
    }
}
