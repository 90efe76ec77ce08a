//! [`GrpcLink`]: the ranks of a collective over gRPC, one stream from each to each.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::bulk::{self, Bulk};
use super::channel::Peer;
use super::control::Identity;
use super::lent::Loan;
use super::members::{Failure, Members};
use super::proto::collective_client::CollectiveClient;
use super::proto::collective_server::Collective;
use super::proto::{ExchangeReply, Segment};
use super::{RpcError, Runtime};
use crate::cluster::TaskId;
use crate::reduce::{Link, ReduceError};

/// Segments on their way to one peer before a sender waits.
const IN_FLIGHT: usize = 8;

/// Messages that are remembered, for their memory.
const REMEMBERED: usize = 8;

/// Where arriving segments go: one queue per sending rank.
pub struct Inbox {
    ranks: Vec<TaskId>,
    queues: Vec<Sender<Segment>>,
    members: Arc<Members>,
}

impl Inbox {
    /// For the ranks of a collective, and the ends that a [`GrpcLink`] reads.
    pub fn new(ranks: Vec<TaskId>, members: Arc<Members>) -> (Arc<Self>, Vec<Receiver<Segment>>) {
        let (queues, ends) = ranks.iter().map(|_| channel()).unzip();
        (Arc::new(Self { ranks, queues, members }), ends)
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
            let segment = self.members.lent.open(segment?)?;
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

/// The way to another rank.
struct Way {
    peer: Peer,
    queue: mpsc::Sender<Segment>,
    loan: Option<Loan>,
}

impl Way {
    /// Opens a stream, which ends when the peer has read everything that was sent.
    fn open(runtime: &Runtime, peer: Peer, own: &TaskId) -> (Self, JoinHandle<()>) {
        let mut client = CollectiveClient::new(Bulk(peer.channel.clone()));
        let loan = runtime.block_on(Loan::to(&peer, own));
        let (queue, segments) = mpsc::channel(IN_FLIGHT);
        let stream = runtime.spawn(async move {
            // Its end shows where the peer is watched.
            let _ = client.exchange(bulk::request(ReceiverStream::new(segments))).await;
        });
        (Self { peer, queue, loan }, stream)
    }
}

/// This rank's connections to all others.
pub struct GrpcLink {
    rank: usize,
    runtime: Runtime,
    identity: Arc<Identity>,
    members: Arc<Members>,
    /// By rank; none for the own one.
    ways: Vec<Option<Way>>,
    /// End when the peers have read everything that was sent.
    streams: Vec<JoinHandle<()>>,
    inbox: Vec<Receiver<Segment>>,
    /// What came before it was asked for.
    early: HashMap<(usize, u64), Bytes>,
    /// Messages that were sent: their memory is used again when nobody needs it any more.
    sent: VecDeque<Bytes>,
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
        let (mut ways, streams): (Vec<_>, _) = peers
            .into_iter()
            .map(|peer| Way::open(&runtime, peer, &identity.task))
            .map(|(way, stream)| (Some(way), stream))
            .unzip();
        ways.insert(rank.min(ways.len()), None);
        let (early, sent) = (HashMap::new(), VecDeque::with_capacity(REMEMBERED));
        Self { rank, runtime, identity, members, ways, streams, inbox, early, sent }
    }

    /// Memory for a message, if possible that of one which has left.
    fn memory(&mut self, len: usize) -> BytesMut {
        let mut memory = match self.sent.pop_front().map(Bytes::try_into_mut) {
            Some(Ok(left)) => left,
            Some(Err(on_its_way)) => {
                self.sent.push_front(on_its_way);
                BytesMut::new()
            }
            None => BytesMut::new(),
        };
        memory.resize(len, 0);
        memory
    }

    /// That a rank is gone, and why, where the word comes within a moment: it may have said why everybody shall stop.
    fn lost(&self, rank: usize) -> ReduceError {
        let way = self.ways.get(rank).and_then(Option::as_ref);
        let ended = self
            .runtime
            .block_on(async { tokio::time::timeout(PATIENCE, way?.peer.ended()).await.ok() });
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
}

/// How long the reason of a loss is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long the last segments may take.
const FLUSH: Duration = Duration::from_secs(2);

impl Drop for GrpcLink {
    fn drop(&mut self) {
        // The end of the queues ends the streams, once the peers have everything. Nobody waits for one that is gone.
        let peers: Vec<Peer> = self.ways.drain(..).flatten().map(|way| way.peer).collect();
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
        self.ways.len()
    }

    fn send_with(
        &mut self,
        to: usize,
        tag: u64,
        len: usize,
        write: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), ReduceError> {
        let Some(Some(way)) = self.ways.get_mut(to) else { return Err(self.lost(to)) };
        let task = self.identity.task.to_string();
        let place = way.loan.as_mut().and_then(|loan| loan.fill(len, write));
        let data = match place {
            Some(_) => Bytes::new(),
            None => {
                let mut memory = self.memory(len);
                write(&mut memory);
                let data = memory.freeze();
                if self.sent.len() < REMEMBERED {
                    self.sent.push_back(data.clone());
                }
                data
            }
        };
        let segment = Segment { task, tag, data, place };
        let sent = self.ways[to].as_ref().map(|way| way.queue.blocking_send(segment));
        sent.and_then(Result::ok).ok_or_else(|| self.lost(to))
    }

    fn glance(&mut self) -> Result<(), ReduceError> {
        if let Some(stopped) = self.stopped() {
            return Err(stopped);
        }
        let has_ended = |way: &Option<Way>| way.as_ref().is_some_and(|way| way.peer.has_ended());
        match self.ways.iter().position(has_ended) {
            Some(rank) => Err(self.lost(rank)),
            None => Ok(()),
        }
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::rpc::{Security, Server, Timeouts, collective, listen};

    /// Two ranks on this host; `near` says whether they know.
    fn world(runtime: &Runtime, near: bool) -> Vec<(GrpcLink, Server)> {
        let security = Security::default();
        let tasks = [0, 1].map(|rank| TaskId::new("worker", rank));
        let mut doors = Vec::new();
        for task in &tasks {
            let settings = BTreeMap::new();
            let identity = Arc::new(Identity { task: task.clone(), incarnation: 1, settings });
            let listener = listen(&identity, "127.0.0.1:0", &security).unwrap();
            let (address, members) = (listener.address.to_string(), Arc::new(Members::default()));
            let (inbox, ends) = Inbox::new(tasks.to_vec(), members.clone());
            let services = collective(inbox);
            let (id, all) = (identity.clone(), members.clone());
            let server = Server::start(runtime, listener, id, &security, all, services).unwrap();
            doors.push((server, address, identity, members, ends));
        }
        let addresses: Vec<_> = doors.iter().map(|door| door.1.clone()).collect();
        let mut links = Vec::new();
        for (rank, (server, _, identity, members, ends)) in doors.into_iter().enumerate() {
            let other = [(tasks[1 - rank].clone(), addresses[1 - rank].clone())];
            let timeouts = Timeouts::default();
            let met =
                Peer::connect_all(&other, &identity, &security, timeouts, &|_| (), &|| Ok(()));
            let mut peers = runtime.block_on(met).unwrap();
            assert!(cfg!(not(target_os = "linux")) || peers[0].near);
            peers[0].near &= near;
            let link = GrpcLink::open(runtime.clone(), identity, members, rank, peers, ends);
            links.push((link, server));
        }
        links
    }

    #[test]
    fn what_lies_in_lent_memory_is_what_a_message_carries() {
        let runtime = Runtime::start().unwrap();
        // More messages than there are slots, and one that fits into none.
        let floats: Vec<f32> = (0..70_000).map(|i| i as f32).collect();
        let pieces: Vec<_> =
            (0..40).map(|i| &floats[i..i * 1000 + 1]).chain([&floats[..]]).collect();
        for near in [true, false] {
            let mut links = world(&runtime, near);
            let (mut b, _b) = links.pop().unwrap();
            let (mut a, _a) = links.pop().unwrap();
            let lends = |link: &GrpcLink, to: usize| link.ways[to].as_ref().unwrap().loan.is_some();
            assert!(lends(&a, 1) == lends(&b, 0) && (near || !lends(&a, 1)));
            std::thread::scope(|scope| {
                let pieces = &pieces;
                scope.spawn(move || {
                    for (tag, piece) in (0..).zip(pieces) {
                        a.send(1, tag, piece).unwrap();
                    }
                });
                for (tag, piece) in (0..).zip(pieces) {
                    let mut arrived = vec![0.0; piece.len()];
                    b.recv(0, tag, &mut arrived).unwrap();
                    assert_eq!(arrived, **piece);
                }
            });
        }
    }
}
