//! [`Talk`] and [`TaskApi`]: both ends of what tasks of tftrain say to each other in steps.
//!
//! TensorFlow's tasks make a call for every tensor, and a call costs more than most tensors: a stream of its own, headers both ways and a
//! task at either end. Tasks that both are tftrain say the same requests and answers as messages of one stream; those of one moment
//! leave together. Large tensors have calls of their own, so that small ones need not wait for them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::tensorflow::run_graph;
use super::tensorflow_proto::task_service_server::TaskService;
use crate::session::proto::task_message::Said;
use crate::session::proto::*;
use crate::session::{Arrival, Done, Guard, OpError, Worker, codec};

/// Bytes of a tensor from which on it has a call of its own.
pub(super) const LARGE: usize = 1 << 20;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks by a call of its own for what is too large for a message.
type ByCall = Box<dyn Fn(RecvTensorRequest, Done<RecvTensorResponse>) + Send + Sync>;

/// Who waits for an answer.
enum Waiting {
    Graph(Done<RunGraphResponse>),
    Tensor(Done<RecvTensorResponse>, RecvTensorRequest),
}

impl Waiting {
    fn fail(self, error: OpError) {
        match self {
            Self::Graph(done) => done(Err(error)),
            Self::Tensor(done, _) => done(Err(error)),
        }
    }
}

#[derive(Default)]
struct Calls {
    last: u64,
    waiting: HashMap<u64, Waiting>,
    ended: Option<OpError>,
}

/// The caller's end.
pub(super) struct Talk {
    say: mpsc::UnboundedSender<TaskMessage>,
    by_call: ByCall,
    calls: Mutex<Calls>,
}

/// A call that is made; its end is told where it is not answered.
struct Open {
    talk: Arc<Talk>,
    call: u64,
}

impl Drop for Open {
    fn drop(&mut self) {
        let waiting = lock(&self.talk.calls).waiting.remove(&self.call);
        if waiting.is_some() {
            self.talk.say(self.call, Said::Gone(true));
        }
    }
}

impl Talk {
    /// What it says comes out of the stream.
    pub(super) fn new(by_call: ByCall) -> (Arc<Self>, UnboundedReceiverStream<TaskMessage>) {
        let (say, said) = mpsc::unbounded_channel();
        let talk = Self { say, by_call, calls: Mutex::default() };
        (Arc::new(talk), UnboundedReceiverStream::new(said))
    }

    fn say(&self, call: u64, said: Said) {
        // Who has gone hears nothing; the end of its answers is noticed.
        let _ = self.say.send(TaskMessage { call, said: Some(said) });
    }

    /// Has a task's part of a step run.
    pub(super) fn run_graph(
        self: &Arc<Self>,
        request: RunGraphRequest,
        done: Done<RunGraphResponse>,
    ) -> Guard {
        self.ask(Said::RunGraph(request), Waiting::Graph(done))
    }

    /// Waits for a tensor.
    pub(super) fn recv_tensor(
        self: &Arc<Self>,
        request: RecvTensorRequest,
        done: Done<RecvTensorResponse>,
    ) -> Guard {
        self.ask(Said::RecvTensor(request.clone()), Waiting::Tensor(done, request))
    }

    fn ask(self: &Arc<Self>, request: Said, waiting: Waiting) -> Guard {
        let call = {
            let mut calls = lock(&self.calls);
            if let Some(error) = calls.ended.clone() {
                drop(calls);
                waiting.fail(error);
                return Box::new(());
            }
            calls.last += 1;
            let call = calls.last;
            calls.waiting.insert(call, waiting);
            call
        };
        self.say(call, request);
        Box::new(Open { talk: self.clone(), call })
    }

    /// Hands answers on until there are no more; the error says why, and all who wait have it.
    pub(super) async fn listen(
        &self,
        mut answers: Streaming<TaskMessage>,
        failed: impl Fn(Status) -> OpError,
    ) {
        let end = loop {
            match answers.message().await {
                Ok(Some(TaskMessage { call, said: Some(said) })) => self.answered(call, said),
                Ok(Some(_)) => {}
                Ok(None) => break failed(Status::from_error("it ended the connection".into())),
                Err(status) => break failed(status),
            }
        };
        let waiting = {
            let mut calls = lock(&self.calls);
            calls.ended = Some(end.clone());
            std::mem::take(&mut calls.waiting)
        };
        waiting.into_values().for_each(|waiting| waiting.fail(end.clone()));
    }

    fn answered(&self, call: u64, said: Said) {
        let waiting = lock(&self.calls).waiting.remove(&call);
        match (waiting, said) {
            (Some(Waiting::Graph(done)), Said::Ran(answer)) => done(Ok(answer)),
            (Some(Waiting::Tensor(done, _)), Said::Tensor(answer)) => done(Ok(answer)),
            (Some(Waiting::Tensor(done, request)), Said::Large(_)) => (self.by_call)(request, done),
            (Some(waiting), Said::Failed(CallError { code, message })) => {
                waiting.fail(OpError::from_wire(code, message));
            }
            (Some(waiting), _) => waiting.fail(OpError::internal("an answer to something else")),
            // Nobody waits any more.
            (None, _) => {}
        }
    }
}

/// The called task's end.
pub(super) struct TaskApi(pub(super) Arc<Worker>);

/// What a caller still waits for.
enum Pending {
    Graph(AbortHandle),
    Tensor(RecvTensorRequest),
}

/// One caller.
struct Caller {
    worker: Arc<Worker>,
    answers: mpsc::UnboundedSender<Result<TaskMessage, Status>>,
    pending: Mutex<HashMap<u64, Pending>>,
}

#[tonic::async_trait]
impl TaskService for TaskApi {
    type TalkStream = UnboundedReceiverStream<Result<TaskMessage, Status>>;

    async fn talk(
        &self,
        request: Request<Streaming<TaskMessage>>,
    ) -> Result<Response<Self::TalkStream>, Status> {
        let (answers, answered) = mpsc::unbounded_channel();
        let caller = Caller { worker: self.0.clone(), answers, pending: Mutex::default() };
        let mut requests = request.into_inner();
        tokio::spawn(async move {
            let caller = Arc::new(caller);
            while let Ok(Some(TaskMessage { call, said })) = requests.message().await {
                caller.asked(call, said);
            }
            // What it asked for ends with it.
            let pending = std::mem::take(&mut *lock(&caller.pending));
            pending.into_values().for_each(|pending| caller.forget(pending));
        });
        Ok(Response::new(UnboundedReceiverStream::new(answered)))
    }
}

impl Caller {
    fn asked(self: &Arc<Self>, call: u64, said: Option<Said>) {
        match said {
            Some(Said::RunGraph(request)) => self.run(call, request),
            Some(Said::RecvTensor(request)) => self.receive(call, request),
            Some(Said::Gone(_)) => {
                let pending = lock(&self.pending).remove(&call);
                pending.into_iter().for_each(|pending| self.forget(pending));
            }
            _ => self.answer(call, Err(OpError::invalid("no request that is known here"))),
        }
    }

    fn forget(&self, pending: Pending) {
        match pending {
            Pending::Graph(task) => task.abort(),
            Pending::Tensor(request) => {
                self.worker.forget(request.step_id, &request.rendezvous_key);
            }
        }
    }

    fn answer(&self, call: u64, answer: Result<Said, OpError>) {
        lock(&self.pending).remove(&call);
        let failed = |OpError { code, message }| CallError { code: code as i32, message };
        let said = Some(answer.unwrap_or_else(|error| Said::Failed(failed(error))));
        let _ = self.answers.send(Ok(TaskMessage { call, said }));
    }

    fn run(self: &Arc<Self>, call: u64, request: RunGraphRequest) {
        let caller = self.clone();
        // Entered before it can be done.
        let mut pending = lock(&self.pending);
        let task = tokio::spawn(async move {
            let ran = run_graph(&caller.worker, request).await;
            caller.answer(call, ran.map(Said::Ran));
        });
        pending.insert(call, Pending::Graph(task.abort_handle()));
    }

    fn receive(self: &Arc<Self>, call: u64, request: RecvTensorRequest) {
        let RecvTensorRequest { step_id, rendezvous_key: key, .. } = request.clone();
        lock(&self.pending).insert(call, Pending::Tensor(request));
        let (caller, again) = (self.clone(), key.clone());
        self.worker.receive(step_id, &key, move |arrival: Result<Arrival, OpError>| {
            let said = arrival.and_then(|tensor| match tensor {
                // It is asked for once more.
                Some(tensor) if tensor.bytes() >= LARGE => {
                    let step = caller.worker.step(step_id);
                    step.rendezvous.send(&again.into(), Some(tensor))?;
                    Ok(Said::Large(true))
                }
                tensor => Ok(Said::Tensor(RecvTensorResponse {
                    is_dead: tensor.is_none(),
                    tensor: tensor.as_ref().map(codec::encode),
                    send_start_micros: 0,
                })),
            });
            caller.answer(call, said);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::super::{GrpcPeers, Identity, Runtime, Security, Server, listen, sessions};
    use super::*;
    use crate::cluster::{ClusterSpec, TaskId};
    use crate::session::{Master, Peers, Tensor, Voice};

    struct Silent;

    impl Voice for Silent {
        fn placement(&self, _: &str) {}
        fn note(&self, _: &str) {}
    }

    #[test]
    fn tensors_come_by_messages_and_large_ones_by_calls() {
        let (runtime, security) = (Runtime::in_order().unwrap(), Security::default());
        let ps = TaskId::new("ps", 0);
        let identity = Identity { task: ps.clone(), incarnation: 1, settings: BTreeMap::new() };
        let listener = listen(&identity, "127.0.0.1:0", &security).unwrap();
        let spec = ClusterSpec::from_lists([("ps", [listener.address.to_string()])]).unwrap();
        let peers = Arc::new(GrpcPeers::new(runtime.clone(), spec.clone()));
        let worker = Arc::new(Worker::new(ps.clone(), peers.clone()));
        let master = Master::new(worker.clone(), spec, Box::new(Silent), Duration::ZERO);
        let services = sessions(Arc::new(master), worker.clone());
        let (identity, members) = (Arc::new(identity), Arc::default());
        let _server =
            Server::start(&runtime, listener, identity, &security, members, services).unwrap();
        let ask = |step_id: i64| {
            let (tell, told) = mpsc::channel();
            let request = RecvTensorRequest { step_id, rendezvous_key: "k".into(), request_id: 1 };
            let done = Box::new(move |answer: Result<RecvTensorResponse, OpError>| {
                tell.send(answer.map(|answer| answer.tensor.unwrap())).unwrap();
            });
            (peers.recv_tensor(&ps, request, done), told)
        };
        let send = |step: i64, tensor: &Tensor| {
            worker.step(step).rendezvous.send(&"k".into(), Some(tensor.clone())).unwrap();
        };
        let patience = Duration::from_secs(20);
        // Which also asks whether the task talks.
        let (_call, told) = ask(1);
        send(1, &Tensor::scalar(1f32));
        assert_eq!(told.recv_timeout(patience).unwrap().unwrap().dtype, 1);
        while peers.talk(&ps).is_none() {
            std::thread::yield_now();
        }
        let (given_up, _) = ask(2);
        drop(given_up);
        for len in [1, LARGE] {
            let (_call, told) = ask(3);
            let tensor = Tensor::full([len], 2f32).unwrap();
            send(3, &tensor);
            let answer = told.recv_timeout(patience).unwrap().unwrap();
            assert!(codec::decode(&answer).unwrap() == tensor);
        }
        assert!(worker.settle(3), "nothing is left of a step whose tensors have been received");
        assert!(worker.step(2).rendezvous.is_empty(), "nobody waits any more");
        let (_call, told) = ask(4);
        worker.step(4).cancel(OpError::aborted("over"));
        // Also where it has been asked for only then.
        assert_eq!(told.recv_timeout(patience).unwrap().unwrap_err(), OpError::aborted("over"));
    }
}
