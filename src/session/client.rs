//! [`Session`]: a client's graph on the devices of a cluster, and its steps.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, RwLock, mpsc};

use super::cancel::lock;
use super::graph::Graph;
use super::partition::Part;
use super::peers::Guard;
use super::place::{self, Devices};
use super::plan::{Expected, Plan, Signature, Source};
use super::program::Program;
use super::proto::*;
use super::rendezvous::Step;
use super::{OpError, Tensor, Worker, codec, unique};
use crate::cluster::TaskId;

/// A graph and where its nodes are.
#[derive(Default)]
struct Placed {
    graph: Graph,
    /// A device for each node.
    chosen: Vec<usize>,
    version: i64,
}

/// What this task runs of a step.
struct Local {
    program: Arc<Program>,
    feeds: Vec<(usize, String)>,
    fetches: Vec<String>,
}

/// What another task runs.
struct Remote {
    task: TaskId,
    graph: String,
    feeds: Vec<(usize, String)>,
    fetches: Vec<String>,
}

/// The place of a part among the local and remote ones.
#[derive(Clone, Copy)]
enum Home {
    Local,
    Remote(usize),
}

/// A plan whose parts are where they run.
struct Ready {
    local: Option<Local>,
    remotes: Vec<Remote>,
    homes: Vec<Home>,
    expected: Vec<Expected>,
    sources: Vec<Source>,
}

/// A session. All its methods may be called at once.
pub struct Session {
    handle: String,
    worker: Arc<Worker>,
    devices: Devices,
    attributes: Vec<DeviceAttributes>,
    /// The other tasks that know of it.
    others: Vec<TaskId>,
    soft: bool,
    log: bool,
    placed: RwLock<Placed>,
    plans: Mutex<HashMap<Signature, Arc<Ready>>>,
    callables: Mutex<HashMap<i64, Arc<Signature>>>,
    steps: Mutex<HashMap<i64, Arc<Step>>>,
    closed: Mutex<Option<OpError>>,
}

/// What a session is made of.
pub(super) struct Parts {
    pub(super) worker: Arc<Worker>,
    pub(super) handle: String,
    pub(super) devices: Devices,
    pub(super) attributes: Vec<DeviceAttributes>,
    pub(super) others: Vec<TaskId>,
    pub(super) soft: bool,
    pub(super) log: bool,
}

/// How TensorFlow names a task in errors.
pub(super) fn task_name(task: &TaskId) -> String {
    format!("/job:{}/replica:0/task:{}", task.job, task.index)
}

fn from(task: &TaskId, mut error: OpError) -> OpError {
    error.message = format!("From {}:\n{}", task_name(task), error.message);
    error
}

impl Session {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { worker, handle, devices, attributes, others, soft, log } = parts;
        Self {
            handle,
            worker,
            devices,
            attributes,
            others,
            soft,
            log,
            placed: RwLock::default(),
            plans: Mutex::default(),
            callables: Mutex::default(),
            steps: Mutex::default(),
            closed: Mutex::default(),
        }
    }

    /// Its name.
    pub fn handle(&self) -> &str {
        &self.handle
    }

    /// The devices that it may use, this task's first.
    pub fn devices(&self) -> &[DeviceAttributes] {
        &self.attributes
    }

    /// Adds nodes and places them; the values are the graph's new version and the placement log, where it is wanted.
    pub(super) fn extend(
        &self,
        graph: GraphDef,
        version: i64,
    ) -> Result<(i64, Option<String>), OpError> {
        let mut placed = self.placed.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if version != placed.version {
            return Err(OpError::aborted(format!(
                "Session {} is at version {} of its graph, not {version}",
                self.handle, placed.version
            )));
        }
        let mut grown = placed.graph.clone();
        grown.extend(graph)?;
        let (chosen, order) = place::place(&grown, &self.devices, self.soft, &placed.chosen)?;
        let log = self.log.then(|| place::log(&grown, &self.devices, &chosen, &order));
        *placed = Placed { graph: grown, chosen, version: version + 1 };
        Ok((placed.version, log))
    }

    /// The version of the graph.
    pub(super) fn first(&self, graph: GraphDef) -> Result<Option<String>, OpError> {
        self.extend(graph, 0).map(|(_, log)| log)
    }

    fn ready(&self, signature: &Signature) -> Result<Arc<Ready>, OpError> {
        if let Some(ready) = lock(&self.plans).get(signature) {
            return Ok(ready.clone());
        }
        let plan = {
            let placed = self.placed.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            Plan::new(&placed.graph, &self.devices, &placed.chosen, signature)?
        };
        let ready = Arc::new(self.hand_out(plan)?);
        lock(&self.plans).insert(signature.clone(), ready.clone());
        Ok(ready)
    }

    /// Gives the parts of a plan to their tasks.
    fn hand_out(&self, plan: Plan) -> Result<Ready, OpError> {
        let Plan { parts, expected, sources } = plan;
        let (mut local, mut remotes, mut homes) = (None, Vec::new(), Vec::new());
        for Part { task, graph, feeds, fetches } in parts {
            if task == *self.worker.task() {
                let program = self.worker.build(&graph).map_err(|error| from(&task, error))?;
                local = Some(Local { program, feeds, fetches });
                homes.push(Home::Local);
                continue;
            }
            let request = RegisterGraphRequest {
                session_handle: self.handle.clone(),
                graph_def: Some(graph),
                create_worker_session_called: true,
                config_proto: None,
            };
            let answer = self.worker.peers().register_graph(&task, request);
            let graph = answer.map_err(|error| from(&task, error))?.graph_handle;
            homes.push(Home::Remote(remotes.len()));
            remotes.push(Remote { task, graph, feeds, fetches });
        }
        Ok(Ready { local, remotes, homes, expected, sources })
    }

    /// Begins a step.
    ///
    /// # Errors
    /// The session is closed.
    pub fn begin(self: &Arc<Self>) -> Result<Running, OpError> {
        // Positive, and never zero.
        let id = (unique() >> 2) as i64 + 1;
        let step = self.worker.step(id);
        lock(&self.steps).insert(id, step.clone());
        let running = Running { session: self.clone(), id, step };
        lock(&self.closed).clone().map_or(Ok(running), Err)
    }

    /// Ends all steps and lets the other tasks forget the session.
    pub(super) fn close(&self, why: OpError) {
        lock(&self.closed).get_or_insert_with(|| why.clone());
        let steps: Vec<Arc<Step>> = lock(&self.steps).values().cloned().collect();
        for step in steps {
            step.cancel(why.clone());
        }
        for task in &self.others {
            let request = DeleteWorkerSessionRequest { session_handle: self.handle.clone() };
            self.worker.peers().delete_worker_session(task, request);
        }
    }

    /// Keeps a signature for [`Running::run_callable`].
    pub fn make_callable(&self, options: CallableOptions) -> Result<i64, OpError> {
        let CallableOptions { feed: feeds, fetch: fetches, target: targets, .. } = options;
        let (handle, signature) = ((unique() >> 1) as i64, Signature { feeds, fetches, targets });
        self.ready(&signature)?;
        lock(&self.callables).insert(handle, Arc::new(signature));
        Ok(handle)
    }

    /// Forgets it.
    pub fn release_callable(&self, handle: i64) {
        lock(&self.callables).remove(&handle);
    }
}

/// A step that runs; dropping it ends the step everywhere.
pub struct Running {
    session: Arc<Session>,
    id: i64,
    step: Arc<Step>,
}

impl Drop for Running {
    fn drop(&mut self) {
        lock(&self.session.steps).remove(&self.id);
        self.session.worker.cleanup(self.id);
    }
}

/// What a step hears from the other tasks.
enum Event {
    Answer(usize, RunGraphResponse),
    Derived(OpError),
    Ended,
}

impl Running {
    /// The step, by which others can end it.
    pub fn step(&self) -> &Arc<Step> {
        &self.step
    }

    /// Runs the step that a client asks for.
    pub fn run(&self, request: RunStepRequest) -> Result<Vec<NamedTensorProto>, OpError> {
        if !request.partial_run_handle.is_empty() {
            return Err(partial_runs());
        }
        let mut fed = Vec::with_capacity(request.feed.len());
        let mut feeds = Vec::with_capacity(request.feed.len());
        for NamedTensorProto { name, tensor } in request.feed {
            fed.push(codec::decode(&tensor.unwrap_or_default())?);
            feeds.push(name);
        }
        let signature = Signature { feeds, fetches: request.fetch, targets: request.target };
        let fetched = self.execute(&signature, fed)?;
        let named = |(name, tensor): (String, Tensor)| NamedTensorProto {
            name,
            tensor: Some(codec::encode(&tensor)),
        };
        Ok(signature.fetches.into_iter().zip(fetched).map(named).collect())
    }

    /// Runs the step of a callable.
    pub fn run_callable(&self, request: &RunCallableRequest) -> Result<Vec<TensorProto>, OpError> {
        let signature = lock(&self.session.callables).get(&request.handle).cloned();
        let missing = || OpError::invalid(format!("No such callable handle: {}", request.handle));
        let signature = signature.ok_or_else(missing)?;
        let fed: Result<Vec<Tensor>, OpError> = request.feed.iter().map(codec::decode).collect();
        let fetched = self.execute(&signature, fed?)?;
        Ok(fetched.iter().map(codec::encode).collect())
    }

    fn execute(&self, signature: &Signature, fed: Vec<Tensor>) -> Result<Vec<Tensor>, OpError> {
        let Self { session, id, step } = self;
        let ready = session.ready(signature)?;
        if fed.len() != ready.expected.len() {
            let (wanted, given) = (ready.expected.len(), fed.len());
            return Err(OpError::invalid(format!("{wanted} tensors are to be fed, not {given}")));
        }
        for ((name, expected), tensor) in signature.feeds.iter().zip(&ready.expected).zip(&fed) {
            expected.check(name, tensor)?;
        }
        let (tell, told) = mpsc::channel();
        let guards: Vec<Guard> = ready
            .remotes
            .iter()
            .enumerate()
            .map(|(place, remote)| self.start(place, remote, &fed, tell.clone()))
            .collect();
        let mut derived = None;
        let mut here = Vec::new();
        if let Some(Local { program, feeds, fetches }) = &ready.local {
            let feeds =
                feeds.iter().map(|(place, key)| (key.as_str(), fed[*place].clone())).collect();
            match session.worker.run(program, *id, step, feeds, fetches) {
                Ok(fetched) => here = fetched,
                Err(error) if error.is_derived() => derived = Some(error),
                // The first reason counts: where the step was cancelled this changes nothing.
                Err(error) => step.cancel(from(session.worker.task(), error)),
            }
        }
        let mut there: Vec<Option<RunGraphResponse>> = vec![None; guards.len()];
        let mut left = guards.len();
        if left > 0 {
            step.cancellation.on_cancel(move |_| _ = tell.send(Event::Ended));
        }
        while left > 0 && step.cancellation.check().is_ok() {
            match told.recv() {
                Ok(Event::Answer(place, answer)) => there[place] = Some(answer),
                Ok(Event::Derived(error)) => _ = derived.get_or_insert(error),
                Ok(Event::Ended) | Err(_) => break,
            }
            left -= 1;
        }
        drop(guards);
        for remote in &ready.remotes {
            let request = CleanupGraphRequest { step_id: *id };
            session.worker.peers().cleanup_graph(&remote.task, request);
        }
        step.cancellation.check()?;
        if let Some(error) = derived {
            return Err(error.root());
        }
        ready.sources.iter().map(|source| collect(&ready, *source, &fed, &here, &there)).collect()
    }

    /// Starts another task's part.
    fn start(
        &self,
        place: usize,
        remote: &Remote,
        fed: &[Tensor],
        tell: mpsc::Sender<Event>,
    ) -> Guard {
        let send = remote.feeds.iter().map(|(place, key)| NamedTensorProto {
            name: key.clone(),
            tensor: Some(codec::encode(&fed[*place])),
        });
        let request = RunGraphRequest {
            graph_handle: remote.graph.clone(),
            step_id: self.id,
            send: send.collect(),
            recv_key: remote.fetches.clone(),
            session_handle: self.session.handle.clone(),
            store_errors_in_response_body: true,
            create_worker_session_called: true,
            request_id: (unique() >> 1) as i64,
        };
        let (step, task) = (self.step.clone(), remote.task.clone());
        let done = move |answer: Result<RunGraphResponse, OpError>| {
            let answer = answer.and_then(|answer| match answer.status_code {
                0 => Ok(answer),
                code => Err(OpError::from_wire(code, answer.status_error_message)),
            });
            match answer {
                Ok(answer) => _ = tell.send(Event::Answer(place, answer)),
                Err(error) if error.is_derived() => {
                    let _ = tell.send(Event::Derived(from(&task, error.root())));
                }
                Err(error) => step.cancel(from(&task, error)),
            }
        };
        self.session.worker.peers().run_graph(&remote.task, request, Box::new(done))
    }
}

/// One fetch from where it is.
fn collect(
    ready: &Ready,
    source: Source,
    fed: &[Tensor],
    here: &[Tensor],
    there: &[Option<RunGraphResponse>],
) -> Result<Tensor, OpError> {
    let missing = || OpError::internal("a task did not give back what was fetched");
    let (part, place) = match source {
        Source::Feed(place) => return fed.get(place).cloned().ok_or_else(missing),
        Source::Part(part, place) => (part, place),
    };
    match ready.homes.get(part).ok_or_else(missing)? {
        Home::Local => here.get(place).cloned().ok_or_else(missing),
        Home::Remote(remote) => {
            let key = ready.remotes[*remote].fetches.get(place).ok_or_else(missing)?;
            let answer = there.get(*remote).and_then(Option::as_ref).ok_or_else(missing)?;
            // Usually in the order of the request.
            let at = answer.recv.get(place).filter(|named| named.name == *key);
            let named = at.or_else(|| answer.recv.iter().find(|named| named.name == *key));
            codec::decode(named.and_then(|named| named.tensor.as_ref()).ok_or_else(missing)?)
        }
    }
}

/// What is not there.
pub(super) fn partial_runs() -> OpError {
    OpError::unimplemented(
        "partial runs (partial_run_setup) are not supported: run the whole step with Session.run",
    )
}
