//! [`Execution`]: a step that runs on its tasks, as a future.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::client::{Asked, Running};
use super::inbox::Inbox;
use super::peers::{Guard, Peers};
use super::plan::Source;
use super::proto::*;
use super::ready::{Home, Local, Ready, Remote, from};
use super::rendezvous::Step;
use super::run::Run;
use super::{OpError, Tensor, codec, unique};
use crate::cluster::TaskId;

/// What a step hears from the other tasks.
enum Event {
    Answer(usize, RunGraphResponse),
    Derived(OpError),
    Cancelled,
}

/// A step on its way; the values are its fetches. Dropping it ends it on the other tasks.
pub struct Execution {
    asked: Asked,
    ready: Arc<Ready>,
    id: i64,
    step: Arc<Step>,
    own: TaskId,
    peers: Arc<dyn Peers>,
    inbox: Arc<Inbox<Event>>,
    /// This task's part, until it is done.
    local: Option<Run>,
    /// What it gave.
    here: Vec<Tensor>,
    /// Other tasks that have not answered.
    left: usize,
    /// Their answers.
    there: Vec<Option<RunGraphResponse>>,
    /// Calls to them.
    guards: Vec<Guard>,
    /// The word of a part that failed as another had.
    derived: Option<OpError>,
}

impl Execution {
    pub(super) fn start(
        running: &Running,
        ready: Arc<Ready>,
        asked: Asked,
    ) -> Result<Self, OpError> {
        if asked.fed.len() != ready.expected.len() {
            let (wanted, given) = (ready.expected.len(), asked.fed.len());
            return Err(OpError::invalid(format!("{wanted} tensors are to be fed, not {given}")));
        }
        let fed = asked.signature.feeds.iter().zip(&asked.fed);
        for ((name, tensor), expected) in fed.zip(&ready.expected) {
            expected.check(name, tensor)?;
        }
        let worker = running.session().worker();
        let inbox = Arc::<Inbox<Event>>::default();
        let cancelled = inbox.clone();
        running.step().cancellation.on_cancel(move |_| cancelled.put(Event::Cancelled));
        let mut execution = Self {
            id: running.id(),
            step: running.step().clone(),
            own: worker.task().clone(),
            peers: worker.peers().clone(),
            inbox,
            local: None,
            here: Vec::new(),
            left: ready.remotes.len(),
            there: vec![None; ready.remotes.len()],
            guards: Vec::with_capacity(ready.remotes.len()),
            derived: None,
            asked,
            ready,
        };
        for (place, remote) in execution.ready.remotes.iter().enumerate() {
            let guard = execution.call(place, remote, running.session().handle());
            execution.guards.push(guard);
        }
        if let Some(Local { program, feeds, .. }) = &execution.ready.local {
            let fed = &execution.asked.fed;
            let feeds =
                feeds.iter().map(|(place, key)| (key.as_str(), fed[*place].clone())).collect();
            execution.local = Some(worker.run(program, execution.id, &execution.step, feeds)?);
        }
        Ok(execution)
    }

    /// Starts another task's part.
    fn call(&self, place: usize, remote: &Remote, session: &str) -> Guard {
        let send = remote.feeds.iter().map(|(place, key)| NamedTensorProto {
            name: key.clone(),
            tensor: Some(codec::encode(&self.asked.fed[*place])),
        });
        let request = RunGraphRequest {
            graph_handle: remote.graph.clone(),
            step_id: self.id,
            send: send.collect(),
            recv_key: remote.fetches.clone(),
            session_handle: session.to_owned(),
            store_errors_in_response_body: true,
            create_worker_session_called: true,
            request_id: (unique() >> 1) as i64,
        };
        let (step, task, inbox) = (self.step.clone(), remote.task.clone(), self.inbox.clone());
        let done = move |answer: Result<RunGraphResponse, OpError>| {
            let answer = answer.and_then(|answer| match answer.status_code {
                0 => Ok(answer),
                code => Err(OpError::from_wire(code, answer.status_error_message)),
            });
            match answer {
                Ok(answer) => inbox.put(Event::Answer(place, answer)),
                Err(error) if error.is_derived() => {
                    inbox.put(Event::Derived(from(&task, error.root())));
                }
                Err(error) => step.cancel(from(&task, error)),
            }
        };
        self.peers.run_graph(&remote.task, request, Box::new(done))
    }

    /// Whether all parts are done.
    fn go(&mut self, context: &mut Context<'_>) -> Result<bool, OpError> {
        for event in self.inbox.take(context) {
            match event {
                Event::Answer(place, answer) => {
                    self.there[place] = Some(answer);
                    self.left -= 1;
                }
                Event::Derived(error) => {
                    self.derived.get_or_insert(error);
                    self.left -= 1;
                }
                Event::Cancelled => {}
            }
        }
        if let Some(run) = &mut self.local
            && let Poll::Ready(ran) = Pin::new(run).poll(context)
        {
            self.local = None;
            let fetched = ran.and_then(|fetched| match &self.ready.local {
                Some(Local { program, fetches, .. }) => program.pick(fetched, fetches),
                None => Ok(fetched),
            });
            match fetched {
                Ok(fetched) => self.here = fetched,
                Err(error) if error.is_derived() => self.derived = Some(error),
                // The first reason counts: where the step was cancelled this changes nothing.
                Err(error) => self.step.cancel(from(&self.own, error)),
            }
        }
        self.step.cancellation.check()?;
        if self.local.is_some() || self.left > 0 {
            return Ok(false);
        }
        self.derived.take().map_or(Ok(true), |error| Err(error.root()))
    }

    /// What the client fetches.
    fn results(&self) -> Result<Vec<NamedTensorProto>, OpError> {
        let sources = self.ready.sources.iter();
        let fetched: Result<Vec<Tensor>, OpError> = sources.map(|s| self.collect(*s)).collect();
        Ok(codec::named(self.asked.signature.fetches.iter().cloned(), fetched?))
    }

    /// One fetch from where it is.
    fn collect(&self, source: Source) -> Result<Tensor, OpError> {
        let missing = || OpError::internal("a task did not give back what was fetched");
        let ready = &self.ready;
        let (part, place) = match source {
            Source::Feed(place) => return self.asked.fed.get(place).cloned().ok_or_else(missing),
            Source::Part(part, place) => (part, place),
        };
        match ready.homes.get(part).ok_or_else(missing)? {
            Home::Local => self.here.get(place).cloned().ok_or_else(missing),
            Home::Remote(remote) => {
                let key = ready.remotes[*remote].fetches.get(place).ok_or_else(missing)?;
                let answer = self.there.get(*remote).and_then(Option::as_ref);
                let answer = answer.ok_or_else(missing)?;
                // Usually in the order of the request.
                let at = answer.recv.get(place).filter(|named| named.name == *key);
                let named = at.or_else(|| answer.recv.iter().find(|named| named.name == *key));
                codec::decode(named.and_then(|named| named.tensor.as_ref()).ok_or_else(missing)?)
            }
        }
    }
}

impl Future for Execution {
    type Output = Result<Vec<NamedTensorProto>, OpError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.go(context) {
            Ok(false) => Poll::Pending,
            Ok(true) => Poll::Ready(self.results()),
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        self.inbox.close();
        self.guards.clear();
        for (remote, answer) in self.ready.remotes.iter().zip(&self.there) {
            if !answer.as_ref().is_some_and(|answer| answer.clean) {
                let request = CleanupGraphRequest { step_id: self.id };
                self.peers.cleanup_graph(&remote.task, request);
            }
        }
    }
}
