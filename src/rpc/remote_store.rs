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
use super::lent::Loan;
use super::proto::variables_client::VariablesClient;
use super::proto::{Chunk, Header, PullRequest, PushReply, VersionReply, VersionRequest};
use super::security::Line;
use super::{RpcError, Runtime};
use crate::cluster::TaskId;
use crate::device::{DeviceError, Slab};
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
    /// These packed, to be pushed where nothing was lent.
    packed: Shared,
    /// Memory that the task reads them from.
    loan: Option<Loan>,
    /// Of the values that were pulled last.
    incarnation: u64,
    step: u64,
}

impl Shard {
    /// What goes to its task of a whole slab.
    fn pack(&mut self, header: Header, slab: &Slab) -> Result<Vec<Chunk>, DeviceError> {
        if let Some(loan) = &mut self.loan {
            return chunks::lend(header, slab, &self.ranges, loan);
        }
        let mut packed = self.packed.memory(self.floats);
        for range in &self.ranges {
            let (own, rest) = packed.split_at_mut(range.len());
            slab.read(range.clone(), own)?;
            packed = rest;
        }
        Ok(chunks::cut(header, vec![self.packed.bytes()]).collect())
    }
}

/// The parts of a slab that each shard holds, in its order; no two shards hold the same.
fn parts<'a>(shards: &[Shard], slab: &'a mut [f32]) -> Vec<Vec<&'a mut [f32]>> {
    let mut ranges: Vec<(usize, usize, Range<usize>)> = Vec::new();
    for (i, shard) in shards.iter().enumerate() {
        ranges.extend(
            shard.ranges.iter().cloned().enumerate().map(|(place, range)| (i, place, range)),
        );
    }
    ranges.sort_by_key(|(.., range)| range.start);
    let mut parts: Vec<Vec<&mut [f32]>> =
        shards.iter().map(|shard| shard.ranges.iter().map(|_| &mut [][..]).collect()).collect();
    let (mut rest, mut at) = (slab, 0);
    for (shard, place, range) in ranges {
        let (part, behind) = rest.split_at_mut(range.start - at).1.split_at_mut(range.len());
        (parts[shard][place], rest, at) = (part, behind, range.end);
    }
    parts
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
            loan: runtime.block_on(Loan::to(&peer, &identity.task)),
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
        let replies = each(&self.runtime, &mut self.shards, move |mut shard| async move {
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
        let replies = each(&self.runtime, &mut self.shards, move |mut shard| async move {
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

    fn push_all(&mut self, mean: &Slab, share: Contribution) -> Result<Vec<PushReply>, StoreError> {
        let task = self.identity.task.to_string();
        // A ps task that is ahead, since this worker came back or was late between its rounds, has had this round.
        let round = self.synchronous.then(|| self.lowest_step());
        let mut failed = Ok(());
        let replies = each(&self.runtime, &mut self.shards, |mut shard| {
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
            let chunks = match is_due.then(|| shard.pack(header, mean)).transpose() {
                Ok(chunks) => chunks,
                Err(error) => {
                    failed = Err(error);
                    None
                }
            };
            async move {
                let reply = match chunks {
                    Some(chunks) => {
                        let chunks = bulk::request(tokio_stream::iter(chunks));
                        shard.peer.within(shard.client.push(chunks)).await
                    }
                    None => Ok(Response::new(ahead)),
                };
                (shard, reply.map(Response::into_inner))
            }
        });
        failed?;
        replies.map_err(remote)
    }
}

/// Runs one call per ps task, all at once and on this thread, which leaves the network's to the network; the first error
/// counts.
fn each<T, F, R>(
    runtime: &Runtime,
    shards: &mut Vec<Shard>,
    mut call: F,
) -> Result<Vec<T>, RpcError>
where
    F: FnMut(Shard) -> R,
    R: Future<Output = (Shard, Result<T, RpcError>)>,
{
    let mut calls: Vec<Pin<Box<R>>> =
        std::mem::take(shards).into_iter().map(|shard| Box::pin(call(shard))).collect();
    let mut ended: Vec<Option<R::Output>> = calls.iter().map(|_| None).collect();
    runtime.block_on(poll_fn(|context| {
        for (call, end) in calls.iter_mut().zip(&mut ended).filter(|(_, end)| end.is_none()) {
            if let Poll::Ready(outcome) = call.as_mut().poll(context) {
                *end = Some(outcome);
            }
        }
        if ended.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    }));
    let results: Vec<_>;
    (*shards, results) = ended.into_iter().flatten().unzip();
    results.into_iter().collect()
}

/// Reads the variables, or with `everything` all that a checkpoint needs, into the memory of each shard.
fn pull_all(
    runtime: &Runtime,
    shards: &mut Vec<Shard>,
    everything: bool,
    into: Vec<Vec<&mut [f32]>>,
) -> Result<(), RpcError> {
    let mut into = into.into_iter();
    let pulled = each(runtime, shards, move |mut shard| {
        let parts = into.next().unwrap_or_default();
        async move {
            let pulled = async {
                let mut answer = shard.client.pull(PullRequest { everything }).await?;
                let mut chunks = bulk::received(answer.extensions_mut());
                chunks::join(&mut chunks, |_| Ok(parts)).await
            };
            // A checkpoint may still be pulled when the run is over for everybody.
            let result = match everything {
                true => shard.peer.at_last(pulled).await,
                false => shard.peer.within(pulled).await,
            };
            let result = result.map(|header: Header| {
                (shard.incarnation, shard.step) = (header.incarnation, header.step);
            });
            (shard, result)
        }
    });
    pulled.map(drop)
}

/// A store's error that keeps its cause.
fn remote(error: RpcError) -> StoreError {
    StoreError::Remote(Box::new(error))
}

impl VariableStore for RemoteStore {
    fn pull(&mut self) -> Result<Pulled<'_>, StoreError> {
        let into = parts(&self.shards, self.slab.as_host_mut().unwrap_or_default());
        pull_all(&self.runtime, &mut self.shards, false, into).map_err(remote)?;
        self.global_step = self.lowest_step();
        Ok(Pulled::of(std::slice::from_ref(&self.slab)))
    }

    fn apply(&mut self, mean: &[Slab], share: Contribution) -> Result<Applied, StoreError> {
        let replies = self.push_all(&mean[0], share)?;
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
        let mut slabs = vec![vec![0.0; self.slab.len()]; self.layout.parts()];
        let mut into: Vec<Vec<&mut [f32]>> = self.shards.iter().map(|_| Vec::new()).collect();
        for slab in &mut slabs {
            for (into, parts) in into.iter_mut().zip(parts(&self.shards, slab)) {
                into.extend(parts);
            }
        }
        pull_all(&self.runtime, &mut self.shards, true, into).map_err(remote)?;
        Ok(self.layout.state(self.lowest_step(), &slabs))
    }

    fn restore(&mut self, from: &State) -> Result<(), StoreError> {
        let slabs = self.layout.slabs(from)?;
        let (incarnation, step) = (self.identity.incarnation, from.global_step);
        let result = each(&self.runtime, &mut self.shards, move |mut shard| {
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
