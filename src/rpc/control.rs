//! The Control service: who is there, do we agree, is it over.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use super::PROTOCOL;
use super::members::{Departure, Failure, Members};
use super::proto::control_server::Control;
use super::proto::{
    Beat, JoinReply, JoinRequest, LeaveReply, LeaveRequest, LendReply, LendRequest, Stop,
};
use crate::cluster::TaskId;

/// What this task is and what it must have in common with others.
#[derive(Clone, Debug)]
pub struct Identity {
    /// This task.
    pub task: TaskId,
    /// Differs between two lives of a task.
    pub incarnation: u64,
    /// Settings that must be equal everywhere, by dotted key.
    pub settings: BTreeMap<String, String>,
}

/// How long a task may be here without a watch; less than [`HANDOVER`].
const UNWATCHED: Duration = Duration::from_millis(1500);

/// How long a new life of a task waits for the end of the one before it; less than a caller's patience.
const HANDOVER: Duration = Duration::from_secs(2);

pub(super) struct ControlService {
    pub(super) identity: Arc<Identity>,
    pub(super) members: Arc<Members>,
}

impl ControlService {
    /// The first difference to a peer, in words.
    fn difference(&self, peer: &JoinRequest) -> Option<String> {
        let (own, task) = (&self.identity, &peer.task);
        if peer.protocol != PROTOCOL {
            return Some(format!(
                "protocol version: {task} speaks {}, {} speaks {PROTOCOL}",
                peer.protocol, own.task
            ));
        }
        if peer.called != own.task.to_string() {
            return Some(format!(
                "the address of {} is that of {}: give each task its own",
                peer.called, own.task
            ));
        }
        let keys = own.settings.keys().chain(peer.settings.keys());
        for key in keys {
            let (ours, theirs) = (own.settings.get(key), peer.settings.get(key));
            if ours != theirs {
                let show = |v: Option<&String>| v.map_or("nothing".to_owned(), Clone::clone);
                return Some(format!(
                    "{key}: {task} has {}, {} has {}",
                    show(theirs),
                    own.task,
                    show(ours)
                ));
            }
        }
        None
    }
}

fn task_of(name: &str) -> Result<TaskId, Status> {
    name.parse().map_err(|_| Status::invalid_argument(format!("{name:?} is no task")))
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn lend(&self, request: Request<LendRequest>) -> Result<Response<LendReply>, Status> {
        // Only who came by the Unix socket is known to be a process of the same user on this host; nobody else names files here.
        if request.remote_addr().is_some() {
            return Err(Status::permission_denied("memory is lent by the Unix socket only"));
        }
        self.members.lent.accept(request.into_inner()).map(Response::new)
    }

    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        let from = request.remote_addr();
        let peer = request.into_inner();
        let task = task_of(&peer.task)?;
        if let Some(difference) = self.difference(&peer) {
            tracing::warn!("refused {task} from {from:?}: {difference}");
            return Err(Status::failed_precondition(difference));
        }
        // A life that has just been killed is not gone before its connection is.
        let mut changes = self.members.subscribe();
        let last = tokio::time::Instant::now() + HANDOVER;
        while !self.members.join(task.clone(), peer.incarnation) {
            if tokio::time::timeout_at(last, changes.changed()).await.is_err() {
                let text = format!("{task} is here already, and {from:?} claims to be it too");
                tracing::warn!("{text}");
                return Err(Status::already_exists(text));
            }
        }
        // It may die before it is watched.
        let (members, incarnation) = (self.members.clone(), peer.incarnation);
        tokio::spawn(async move {
            tokio::time::sleep(UNWATCHED).await;
            if !members.is_watched(&task, incarnation) {
                members.leave(&task, incarnation, Departure::Lost);
            }
        });
        Ok(Response::new(JoinReply { incarnation: self.identity.incarnation }))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<Beat, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<Streaming<Beat>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let mut beats = request.into_inner();
        let first = beats.message().await?;
        let first = first.ok_or_else(|| Status::invalid_argument("no first beat"))?;
        let (task, incarnation) = (task_of(&first.task)?, first.incarnation);
        let members = self.members.clone();
        members.watch(&task, incarnation);
        // The answer echoes beats, and says when the run is over; the caller's silence ends the stream.
        let mut changes = members.subscribe();
        let own = Beat {
            task: self.identity.task.to_string(),
            incarnation: self.identity.incarnation,
            ..Beat::default()
        };
        let (tell, told) = tokio::sync::mpsc::channel(4);
        tokio::spawn(async move {
            let mut stopped = false;
            loop {
                if let Some(failure) = members.failure().filter(|_| !stopped) {
                    stopped = true;
                    let Failure { task, reason, code } = failure;
                    let stop = Some(Stop { task, reason, code: code.into() });
                    if tell.send(Ok(Beat { stop, ..own.clone() })).await.is_err() {
                        break;
                    }
                }
                tokio::select! {
                    beat = beats.next() => match beat {
                        Some(Ok(_)) => if tell.send(Ok(own.clone())).await.is_err() { break },
                        Some(Err(_)) | None => break,
                    },
                    _ = changes.changed() => {}
                }
            }
            members.leave(&task, incarnation, Departure::Lost);
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(told))))
    }

    async fn leave(&self, request: Request<LeaveRequest>) -> Result<Response<LeaveReply>, Status> {
        let LeaveRequest { task, incarnation, failure, code } = request.into_inner();
        let id = task_of(&task)?;
        if failure.is_empty() {
            self.members.leave(&id, incarnation, Departure::Done);
        } else if self.members.is_here(&id, incarnation) {
            let code = u8::try_from(code).unwrap_or(1);
            self.members.fail(Failure { task, reason: failure, code });
        } else {
            // One that was silent for so long that the others went on without it.
            tracing::warn!("{task} is not here any more and failed: {failure}");
        }
        Ok(Response::new(LeaveReply {}))
    }
}
