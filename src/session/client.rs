//! [`Session`]: a client's graph on the devices of a cluster, and its steps.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, RwLock};

use super::cancel::lock;
use super::graph::Graph;
use super::place::{self, Devices};
use super::plan::{Plan, Signature};
use super::proto::*;
use super::ready::{Plans, Ready};
use super::rendezvous::Step;
use super::{Execution, OpError, Tensor, Worker, block_on, codec, unique};
use crate::cluster::TaskId;

/// Callables that a session keeps at most.
const CALLABLES: usize = 10_000;

/// A graph and where its nodes are.
#[derive(Default)]
struct Placed {
    graph: Graph,
    /// A device for each node.
    chosen: Vec<usize>,
    version: i64,
}

/// A step that a client asks for.
pub struct Asked {
    pub(super) signature: Arc<Signature>,
    pub(super) fed: Vec<Tensor>,
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
    plans: Mutex<Plans>,
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

    /// The plan of a step, where there is one already.
    pub fn known(&self, asked: &Asked) -> Option<Arc<Ready>> {
        lock(&self.plans).get(&asked.signature)
    }

    /// The plan of a step; a new one is given to its tasks, which takes its time.
    ///
    /// # Errors
    /// The graph does not have what is fed or fetched, or a task does not take its part.
    pub fn prepare(&self, asked: &Asked) -> Result<Arc<Ready>, OpError> {
        self.ready(&asked.signature)
    }

    fn ready(&self, signature: &Arc<Signature>) -> Result<Arc<Ready>, OpError> {
        if let Some(ready) = lock(&self.plans).get(signature) {
            return Ok(ready);
        }
        let plan = {
            let placed = self.placed.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            Plan::new(&placed.graph, &self.devices, &placed.chosen, signature)?
        };
        let ready = Arc::new(Ready::new(plan, &self.worker, &self.handle)?);
        lock(&self.plans).insert(signature.clone(), ready.clone());
        Ok(ready)
    }

    pub(super) fn worker(&self) -> &Arc<Worker> {
        &self.worker
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

    /// Keeps a signature for [`Session::called`].
    pub fn make_callable(&self, options: CallableOptions) -> Result<i64, OpError> {
        let CallableOptions { feed: feeds, fetch: fetches, target: targets, .. } = options;
        let handle = (unique() >> 1) as i64;
        let signature = Arc::new(Signature { feeds, fetches, targets });
        self.ready(&signature)?;
        let mut callables = lock(&self.callables);
        if callables.len() == CALLABLES {
            return Err(OpError::exhausted(format!(
                "this session has {CALLABLES} callables; release some, or use Session.run"
            )));
        }
        callables.insert(handle, signature);
        Ok(handle)
    }

    /// The step of a callable.
    ///
    /// # Errors
    /// There is no such callable, or a tensor does not decode.
    pub fn called(&self, request: &RunCallableRequest) -> Result<Asked, OpError> {
        let signature = lock(&self.callables).get(&request.handle).cloned();
        let missing = || OpError::invalid(format!("No such callable handle: {}", request.handle));
        let fed: Result<Vec<Tensor>, OpError> = request.feed.iter().map(codec::decode).collect();
        Ok(Asked { signature: signature.ok_or_else(missing)?, fed: fed? })
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

impl Asked {
    /// The step of a request.
    ///
    /// # Errors
    /// It is a part of a step, or a tensor does not decode.
    pub fn new(request: RunStepRequest) -> Result<Self, OpError> {
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
        Ok(Self { signature: Arc::new(signature), fed })
    }
}

impl Running {
    /// The step, by which others can end it.
    pub fn step(&self) -> &Arc<Step> {
        &self.step
    }

    pub(super) fn id(&self) -> i64 {
        self.id
    }

    pub(super) fn session(&self) -> &Session {
        &self.session
    }

    /// Runs the step that a client asks for, and waits for it.
    ///
    /// # Errors
    /// What [`Asked::new`], [`Session::prepare`] and the step say.
    pub fn run(&self, request: RunStepRequest) -> Result<Vec<NamedTensorProto>, OpError> {
        let asked = Asked::new(request)?;
        let ready = self.session.prepare(&asked)?;
        block_on(self.execute(ready, asked)?)
    }

    /// Starts a step.
    ///
    /// # Errors
    /// What is fed does not fit the graph.
    pub fn execute(&self, ready: Arc<Ready>, asked: Asked) -> Result<Execution, OpError> {
        Execution::start(self, ready, asked)
    }
}

/// What is not there.
pub(super) fn partial_runs() -> OpError {
    OpError::unimplemented(
        "partial runs (partial_run_setup) are not supported: run the whole step with Session.run",
    )
}
