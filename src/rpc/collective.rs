//! [`GrpcLink`]: the ranks of a collective over gRPC, one stream from each to each.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::bulk::{self, Bulk};
use super::channel::Peer;
use super::control::Identity;
use super::members::{Failure, Members};
use super::proto::collective_client::CollectiveClient;
use super::proto::collective_server::Collective;
use super::proto::{ExchangeReply, Segment};
use super::{RpcError, Runtime};
use crate::cluster::TaskId;
use crate::reduce::{Link, ReduceError};

/// Segments on their way to one peer before a sender waits.
const IN_FLIGHT: usize = 8;

/// Where arriving segments go: one queue per sending rank.
pub struct Inbox {
    ranks: Vec<TaskId>,
    queues: Vec<Sender<Segment>>,
}

impl Inbox {
    /// For the ranks of a collective, and the ends that a [`GrpcLink`] reads.
    pub fn new(ranks: Vec<TaskId>) -> (Arc<Self>, Vec<Receiver<Segment>>) {
        let (queues, ends) = ranks.iter().map(|_| channel()).unzip();
        (Arc::new(Self { ranks, queues }), ends)
    }
}

#[tonic::async_trait]
impl Collective for Arc<Inbox> {
    async fn exchange(
        &self,
        mut request: Request<Streaming<Segment>>,
    ) -> Result<Response<ExchangeReply>, Status> {
        let mut stream = bulk::received::<Segment>(request.extensions_mut());
        let mut queue = None;
        while let Some(segment) = stream.next().await {
            let segment = segment?;
            if queue.is_none() {
                let rank = self.ranks.iter().position(|task| task.to_string() == segment.task);
                let unknown = || {
                    Status::permission_denied(format!(
                        "{} is no rank of this collective",
                        segment.task
                    ))
                };
                queue = Some(&self.queues[rank.ok_or_else(unknown)?]);
            }
            // The trainer is gone when nobody reads: so is the need to.
            if queue.is_some_and(|queue| queue.send(segment).is_err()) {
                break;
            }
        }
        Ok(Response::new(ExchangeReply {}))
    }
}

/// This rank's connections to all others.
pub struct GrpcLink {
    rank: usize,
    runtime: Runtime,
    identity: Arc<Identity>,
    members: Arc<Members>,
    /// By rank; none for the own one.
    peers: Vec<Option<(Peer, mpsc::Sender<Segment>)>>,
    /// End when the peers have read everything that was sent.
    streams: Vec<JoinHandle<()>>,
    inbox: Vec<Receiver<Segment>>,
    /// What came before it was asked for.
    early: HashMap<(usize, u64), Bytes>,
}

impl GrpcLink {
    /// Opens a stream to each peer; `peers` are all ranks but this one, ascending.
    pub fn open(
        runtime: Runtime,
        identity: Arc<Identity>,
        members: Arc<Members>,
        rank: usize,
        peers: Vec<Peer>,
        inbox: Vec<Receiver<Segment>>,
    ) -> Self {
        let mut links: Vec<Option<(Peer, mpsc::Sender<Segment>)>> = Vec::new();
        let mut streams = Vec::new();
        for peer in peers {
            if links.len() == rank {
                links.push(None);
            }
            let (queue, segments) = mpsc::channel(IN_FLIGHT);
            let mut client = CollectiveClient::new(Bulk(peer.channel.clone()));
            streams.push(runtime.spawn(async move {
                // Its end shows where the peer is watched.
                let _ = client.exchange(bulk::request(ReceiverStream::new(segments))).await;
            }));
            links.push(Some((peer, queue)));
        }
        if links.len() == rank {
            links.push(None);
        }
        Self {
            rank,
            runtime,
            identity,
            members,
            peers: links,
            streams,
            inbox,
            early: HashMap::new(),
        }
    }

    /// That a rank is gone, and why, where the word comes within a moment: it may have said why everybody shall stop.
    fn lost(&self, rank: usize) -> ReduceError {
        let peer = self.peers.get(rank).and_then(Option::as_ref);
        let ended = self.runtime.block_on(async {
            let (peer, _) = peer?;
            tokio::time::timeout(PATIENCE, peer.ended()).await.ok()
        });
        if let Some(stopped) = self.stopped() {
            return stopped;
        }
        // It may have heard before this rank that the run is over.
        if let Some(stopped @ RpcError::Stopped { .. }) = ended {
            return ReduceError::Stopped(Box::new(stopped));
        }
        let reason = ended.map_or_else(|| "no word of it".to_owned(), |error| error.to_string());
        ReduceError::PeerLost { rank, reason }
    }

    /// Whether another rank has said that the run is over.
    fn stopped(&self) -> Option<ReduceError> {
        let Failure { task, reason, code } = self.members.failure()?;
        Some(ReduceError::Stopped(Box::new(RpcError::Stopped { task, reason, code })))
    }

    /// Ends with an error when anybody is gone.
    fn glance(&self) -> Result<(), ReduceError> {
        if let Some(stopped) = self.stopped() {
            return Err(stopped);
        }
        let has_ended = |peer: &Option<(Peer, mpsc::Sender<Segment>)>| {
            peer.as_ref().is_some_and(|(peer, _)| peer.has_ended())
        };
        match self.peers.iter().position(has_ended) {
            Some(rank) => Err(self.lost(rank)),
            None => Ok(()),
        }
    }
}

/// How long the reason of a loss is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long the last segments may take.
const FLUSH: Duration = Duration::from_secs(2);

impl Drop for GrpcLink {
    fn drop(&mut self) {
        // The end of the queues ends the streams, once the peers have everything. Nobody waits for one that is gone.
        let peers: Vec<Peer> = self.peers.drain(..).flatten().map(|(peer, _)| peer).collect();
        let streams = std::mem::take(&mut self.streams);
        self.runtime.block_on(async {
            for (stream, peer) in streams.into_iter().zip(peers) {
                tokio::select! {
                    _ = tokio::time::timeout(FLUSH, stream) => {}
                    _ = peer.ended() => {}
                }
            }
        });
    }
}

/// How often a waiting rank looks whether anybody is gone.
const GLANCE: Duration = Duration::from_millis(100);

impl Link for GrpcLink {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.peers.len()
    }

    fn send_bytes(&mut self, to: usize, tag: u64, data: Bytes) -> Result<(), ReduceError> {
        let Some(Some((_, queue))) = self.peers.get(to) else {
            return Err(self.lost(to));
        };
        let task = self.identity.task.to_string();
        queue.blocking_send(Segment { task, tag, data }).map_err(|_| self.lost(to))
    }

    fn recv_bytes(&mut self, from: usize, tag: u64) -> Result<Bytes, ReduceError> {
        loop {
            if let Some(data) = self.early.remove(&(from, tag)) {
                return Ok(data);
            }
            match self.inbox[from].recv_timeout(GLANCE) {
                Ok(segment) if segment.tag == tag => return Ok(segment.data),
                Ok(segment) => _ = self.early.insert((from, segment.tag), segment.data),
                Err(RecvTimeoutError::Timeout) => self.glance()?,
                Err(RecvTimeoutError::Disconnected) => return Err(self.lost(from)),
            }
        }
    }
}
