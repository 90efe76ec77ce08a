//! [`RemoteStore`]: a `VariableStore` whose variables are on parameter servers.

use std::future::poll_fn;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tonic::Response;

use super::bulk::{self, Bulk};
use super::channel::Peer;
use super::chunks::{self, Shared};
use super::control::Identity;
use super::proto::variables_client::VariablesClient;
use super::proto::{Header, PullRequest, PushReply, VersionReply, VersionRequest};
use super::security::Line;
use super::{RpcError, Runtime};
use crate::cluster::TaskId;
use crate::device::Slab;
use crate::store::{Applied, Contribution, Pulled, State, StateLayout, StoreError, VariableStore};

/// What the ps tasks of a cluster hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing yet.
    Empty,
    /// Values of the same incarnation, the oldest of this step.
    Living(u64),
    /// Some have values, but this one has none or older ones: it restarted, or others were restored without it.
    Torn(TaskId),
}

/// One ps task as a worker sees it.
struct Shard {
    peer: Peer,
    client: VariablesClient<Bulk<Line>>,
    /// Its floats of the whole slab.
    ranges: Vec<Range<usize>>,
    /// How many these are.
    floats: usize,
    /// These packed: what was pulled, then what is pushed.
    packed: Shared,
    /// Of the values that were pulled last.
    incarnation: u64,
    step: u64,
}

/// Variables on ps tasks, pulled before each step and pushed after it; all shards at once.
pub struct RemoteStore {
    runtime: Runtime,
    identity: Arc<Identity>,
    shards: Vec<Shard>,
    slab: Slab,
    layout: StateLayout,
    global_step: u64,
    /// Whether gradients are applied in rounds.
    synchronous: bool,
}

impl RemoteStore {
    /// Over connected ps tasks with the ranges of the slab that each holds.
    pub fn new(
        runtime: Runtime,
        identity: Arc<Identity>,
        peers: Vec<(Peer, Vec<Range<usize>>)>,
        slab: Slab,
        layout: StateLayout,
        synchronous: bool,
    ) -> Self {
        let shard = |(peer, ranges): (Peer, Vec<Range<usize>>)| Shard {
            client: VariablesClient::new(Bulk(peer.channel.clone())),
            floats: ranges.iter().map(Range::len).sum(),
            packed: Shared::default(),
            peer,
            ranges,
            incarnation: 0,
            step: 0,
        };
        let shards = peers.into_iter().map(shard).collect();
        Self { runtime, identity, shards, slab, layout, global_step: 0, synchronous }
    }

    /// What the ps tasks hold now.
    pub fn standing(&mut self) -> Result<Standing, RpcError> {
        let replies = self.each(move |mut shard| async move {
            let asked = shard.client.version(VersionRequest { wait: false });
            let reply = shard.peer.within(asked).await.map(|reply| reply.into_inner());
            (shard, reply)
        })?;
        let standing = self.compare(&replies);
        self.global_step = if let Standing::Living(step) = standing { step } else { 0 };
        Ok(standing)
    }

    /// Whether all replies are of the same values.
    fn compare(&self, replies: &[VersionReply]) -> Standing {
        let newest = replies.iter().filter(|r| r.ready).map(|r| r.incarnation).max();
        let Some(newest) = newest else { return Standing::Empty };
        let is_old = |reply: &VersionReply| !reply.ready || reply.incarnation != newest;
        match replies.iter().position(is_old) {
            Some(i) => Standing::Torn(self.shards[i].peer.task.clone()),
            None => Standing::Living(replies.iter().map(|r| r.step).min().unwrap_or(0)),
        }
    }

    /// The step of living variables, waited for up to `patience`; `None` when the chief has not given all values yet.
    pub fn version_within(&mut self, patience: Duration) -> Result<Option<u64>, RpcError> {
        let replies = self.each(move |mut shard| async move {
            let asked = shard.client.version(VersionRequest { wait: true });
            let reply = match tokio::time::timeout(patience, shard.peer.within(asked)).await {
                Ok(reply) => reply.map(|reply| Some(reply.into_inner())),
                Err(_) => Ok(None),
            };
            (shard, reply)
        })?;
        let replies: Option<Vec<VersionReply>> = replies.into_iter().collect();
        let Some(replies) = replies else { return Ok(None) };
        let Standing::Living(step) = self.compare(&replies) else {
            // Some hold what the chief is about to replace.
            self.runtime.block_on(async { tokio::time::sleep(patience).await });
            return Ok(None);
        };
        self.global_step = step;
        Ok(Some(step))
    }

    /// The lowest step of the ps tasks as they were last pulled.
    fn lowest_step(&self) -> u64 {
        self.shards.iter().map(|shard| shard.step).min().unwrap_or(0)
    }

    /// Runs one call per ps task, all at once and on this thread, which leaves the network's to the network; the first error
    /// counts.
    fn each<T, F, R>(&mut self, call: F) -> Result<Vec<T>, RpcError>
    where
        F: Fn(Shard) -> R,
        R: Future<Output = (Shard, Result<T, RpcError>)>,
    {
        let mut calls: Vec<Pin<Box<R>>> = std::mem::take(&mut self.shards)
            .into_iter()
            .map(|shard| Box::pin(call(shard)))
            .collect();
        let mut ended: Vec<Option<R::Output>> = calls.iter().map(|_| None).collect();
        self.runtime.block_on(poll_fn(|context| {
            for (call, end) in calls.iter_mut().zip(&mut ended).filter(|(_, end)| end.is_none()) {
                if let Poll::Ready(outcome) = call.as_mut().poll(context) {
                    *end = Some(outcome);
                }
            }
            if ended.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
        }));
        let (shards, results): (_, Vec<_>) = ended.into_iter().flatten().unzip();
        self.shards = shards;
        results.into_iter().collect()
    }

    fn pull_all(&mut self, everything: bool) -> Result<Vec<Vec<f32>>, RpcError> {
        let parts = if everything { self.layout.parts() } else { 1 };
        self.each(move |mut shard| async move {
            let mut all = vec![0.0; if everything { shard.floats * parts } else { 0 }];
            let packed = if everything { &mut [][..] } else { shard.packed.memory(shard.floats) };
            let target = if everything { &mut all[..] } else { packed };
            let pulled = async {
                let mut answer = shard.client.pull(PullRequest { everything }).await?;
                let mut chunks = bulk::received(answer.extensions_mut());
                chunks::join(&mut chunks, |_| Ok(vec![target])).await
            };
            // A checkpoint may still be pulled when the run is over for everybody.
            let result = match everything {
                true => shard.peer.at_last(pulled).await,
                false => shard.peer.within(pulled).await,
            };
            let result = result.map(|header: Header| {
                (shard.incarnation, shard.step) = (header.incarnation, header.step);
                all
            });
            (shard, result)
        })
    }

    fn push_all(&mut self, share: Contribution) -> Result<Vec<PushReply>, RpcError> {
        let task = self.identity.task.to_string();
        // A ps task that is ahead, since this worker came back or was late between its rounds, has had this round.
        let round = self.synchronous.then(|| self.lowest_step());
        self.each(move |mut shard| {
            let is_due = round.is_none_or(|step| shard.step == step);
            let ahead = PushReply { step: shard.step, rate: 0.0, loss: share.loss, dropped: true };
            let header = Header {
                task: task.clone(),
                incarnation: shard.incarnation,
                step: shard.step,
                examples: share.examples as u64,
                loss: share.loss,
                ..Header::default()
            };
            let stream = is_due.then(|| chunks::split(header, vec![shard.packed.bytes()]));
            async move {
                let reply = match stream {
                    Some(stream) => {
                        shard.peer.within(shard.client.push(bulk::request(stream))).await
                    }
                    None => Ok(Response::new(ahead)),
                };
                (shard, reply.map(Response::into_inner))
            }
        })
    }
}

/// A store's error that keeps its cause.
fn remote(error: RpcError) -> StoreError {
    StoreError::Remote(Box::new(error))
}

impl VariableStore for RemoteStore {
    fn pull(&mut self) -> Result<Pulled<'_>, StoreError> {
        self.pull_all(false).map_err(remote)?;
        for shard in &self.shards {
            let mut at = 0;
            for range in &shard.ranges {
                self.slab.write(range.clone(), &shard.packed.floats()[at..at + range.len()])?;
                at += range.len();
            }
        }
        self.global_step = self.lowest_step();
        Ok(Pulled::of(std::slice::from_ref(&self.slab)))
    }

    fn apply(&mut self, mean: &[Slab], share: Contribution) -> Result<Applied, StoreError> {
        for shard in &mut self.shards {
            let packed = shard.packed.memory(shard.floats);
            let mut at = 0;
            for range in &shard.ranges {
                mean[0].read(range.clone(), &mut packed[at..at + range.len()])?;
                at += range.len();
            }
        }
        let replies = self.push_all(share).map_err(remote)?;
        // The run is where its slowest ps task is.
        let behind = |reply: &PushReply| (reply.step, reply.dropped);
        let last = replies.into_iter().min_by_key(behind).unwrap_or_default();
        self.global_step = last.step;
        Ok(Applied { global_step: last.step, rate: last.rate, loss: Some(last.loss) })
    }

    fn global_step(&self) -> u64 {
        self.global_step
    }

    fn snapshot(&mut self) -> Result<State, StoreError> {
        let pieces = self.pull_all(true).map_err(remote)?;
        let parts = self.layout.parts();
        let mut slabs = vec![vec![0.0; self.slab.len()]; parts];
        for (shard, floats) in self.shards.iter().zip(pieces) {
            let len = shard.floats;
            for (part, slab) in slabs.iter_mut().enumerate() {
                let mut at = part * len;
                for range in &shard.ranges {
                    slab[range.clone()].copy_from_slice(&floats[at..at + range.len()]);
                    at += range.len();
                }
            }
        }
        Ok(self.layout.state(self.lowest_step(), &slabs))
    }

    fn restore(&mut self, from: &State) -> Result<(), StoreError> {
        let slabs = self.layout.slabs(from)?;
        let (incarnation, step) = (self.identity.incarnation, from.global_step);
        let result = self.each(move |mut shard| {
            let mut floats = Vec::with_capacity(shard.floats * slabs.len());
            for slab in &slabs {
                shard.ranges.iter().for_each(|r| floats.extend_from_slice(&slab[r.clone()]));
            }
            let header = Header { incarnation, step, ..Header::default() };
            let stream = chunks::split(header, vec![Shared::from(floats).bytes()]);
            async move {
                let restored = shard.client.restore(bulk::request(stream));
                let reply = shard.peer.within(restored).await;
                (shard, reply.map(|_| ()))
            }
        });
        result.map_err(remote)?;
        self.global_step = from.global_step;
        Ok(())
    }
}
