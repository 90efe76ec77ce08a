//! [`Worker`]: what one task does for the sessions of a cluster, whoever their master is.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use super::cancel::lock;
use super::executor::Site;
use super::peers::Peers;
use super::program::Program;
use super::proto::{DeviceAttributes, DeviceLocality, GraphDef, NamedTensorProto, RunGraphRequest};
use super::rendezvous::{Arrival, Step};
use super::run::Run;
use super::{Gpu, OpError, Tensor, codec, unique};
use crate::cluster::{DeviceKind, DeviceName, TaskId};

/// As TensorFlow reports it for CPUs, where nobody knows better.
const MEMORY: i64 = 256 << 20;

/// A graph that a session registered.
struct Registered {
    session: String,
    program: Arc<Program>,
}

/// One task's devices, resources, graphs and steps.
pub struct Worker {
    task: TaskId,
    devices: Vec<DeviceAttributes>,
    gpus: Vec<Arc<Gpu>>,
    site: Site,
    graphs: Mutex<HashMap<String, Registered>>,
    steps: Mutex<HashMap<i64, Arc<Step>>>,
}

/// The full name of a task's device.
pub(super) fn device_name(task: &TaskId, kind: DeviceKind, ordinal: u32) -> DeviceName {
    DeviceName {
        job: Some(task.job.clone()),
        replica: Some(0),
        task: Some(task.index),
        kind: Some(kind),
        ordinal: Some(ordinal),
    }
}

/// What others are told of a task's device.
fn attributes(
    task: &TaskId,
    kind: DeviceKind,
    ordinal: u32,
    memory_limit: i64,
    description: &str,
) -> DeviceAttributes {
    DeviceAttributes {
        name: device_name(task, kind, ordinal).to_string(),
        device_type: kind.to_string(),
        memory_limit,
        locality: Some(DeviceLocality {}),
        incarnation: unique(),
        physical_device_desc: description.to_owned(),
        xla_global_id: -1,
    }
}

impl Worker {
    /// A task with one CPU device, which reaches the others by `peers`.
    pub fn new(task: TaskId, peers: Arc<dyn Peers>) -> Self {
        let devices = vec![attributes(&task, DeviceKind::Cpu, 0, MEMORY, "")];
        let job = task.job.as_str().into();
        let site = Site { resources: Arc::default(), job, peers };
        let gpus = Vec::new();
        Self { task, devices, gpus, site, graphs: Mutex::default(), steps: Mutex::default() }
    }

    /// The same with these GPUs, too.
    pub fn with_gpus(mut self, gpus: impl IntoIterator<Item = Gpu>) -> Self {
        for (i, gpu) in gpus.into_iter().enumerate() {
            let (kind, memory) = (DeviceKind::Gpu, gpu.memory() as i64);
            self.devices.push(attributes(&self.task, kind, i as u32, memory, gpu.description()));
            self.gpus.push(Arc::new(gpu));
        }
        self
    }

    /// This task.
    pub fn task(&self) -> &TaskId {
        &self.task
    }

    /// How it reaches the others.
    pub fn peers(&self) -> &Arc<dyn Peers> {
        &self.site.peers
    }

    /// Its devices. Their incarnations are other numbers after every start, so that others notice.
    pub fn devices(&self) -> &[DeviceAttributes] {
        &self.devices
    }

    /// Builds a graph that runs here.
    pub fn build(&self, graph: &GraphDef) -> Result<Arc<Program>, OpError> {
        Program::build(graph, &self.task, &self.gpus).map(Arc::new)
    }

    /// Keeps a graph for a session of another task; the value is its handle.
    pub fn register(&self, session: &str, graph: &GraphDef) -> Result<String, OpError> {
        let (handle, program) = (format!("{:016x}", unique()), self.build(graph)?);
        let registered = Registered { session: session.to_owned(), program };
        lock(&self.graphs).insert(handle.clone(), registered);
        Ok(handle)
    }

    /// Forgets a graph.
    pub fn deregister(&self, handle: &str) {
        lock(&self.graphs).remove(handle);
    }

    /// Forgets the graphs of a session.
    pub fn delete_session(&self, session: &str) {
        lock(&self.graphs).retain(|_, graph| graph.session != session);
    }

    /// The graph of a handle.
    ///
    /// # Errors
    /// ABORTED where there is none, as after a restart of this task.
    pub fn graph(&self, handle: &str) -> Result<Arc<Program>, OpError> {
        let gone = || {
            let task = &self.task;
            OpError::aborted(format!(
                "Graph handle is not found: {handle}; {task} was started anew"
            ))
        };
        lock(&self.graphs).get(handle).map(|graph| graph.program.clone()).ok_or_else(gone)
    }

    /// A step; other tasks may ask for its tensors before it runs here.
    pub fn step(&self, id: i64) -> Arc<Step> {
        lock(&self.steps).entry(id).or_default().clone()
    }

    /// A program's part of a step; its values are those of [`Program::fetches`].
    pub(super) fn run(
        &self,
        program: &Arc<Program>,
        id: i64,
        step: &Arc<Step>,
        fed: Vec<(&str, Tensor)>,
    ) -> Result<Run, OpError> {
        let mut feeds = vec![None; program.feeds.len()];
        for (key, tensor) in fed {
            match program.feeds.iter().position(|feed| **feed == *key) {
                Some(place) => feeds[place] = Some(tensor),
                None => step.rendezvous.send(&key.into(), Some(tensor))?,
            }
        }
        Ok(Run::new(program.clone(), self.site.clone(), step.clone(), id, feeds))
    }

    /// Runs the registered graph of a request.
    pub fn run_graph(
        &self,
        step: &Arc<Step>,
        request: RunGraphRequest,
    ) -> Result<impl Future<Output = Result<Vec<NamedTensorProto>, OpError>> + Send + use<>, OpError>
    {
        let RunGraphRequest { graph_handle, step_id, send, recv_key: mut wanted, .. } = request;
        let program = self.graph(&graph_handle)?;
        let decode = |fed: &'_ NamedTensorProto| {
            codec::decode(fed.tensor.as_ref().unwrap_or(&Default::default()))
        };
        let tensors: Result<Vec<Tensor>, OpError> = send.iter().map(decode).collect();
        let fed = send.iter().map(|fed| fed.name.as_str()).zip(tensors?).collect();
        let mut run = self.run(&program, step_id, step, fed)?;
        let step = step.clone();
        Ok(poll_fn(move |context| {
            let run = Pin::new(&mut run).poll(context);
            run.map(|fetched| {
                let fetched = fetched.and_then(|fetched| program.pick(fetched, &wanted));
                let fetched = fetched.inspect_err(|error| step.cancel(error.clone()))?;
                Ok(codec::named(wanted.drain(..), fetched))
            })
        }))
    }

    /// Waits for a tensor that a step sends to another task.
    pub fn receive(
        &self,
        id: i64,
        key: &str,
        waiter: impl FnOnce(Result<Arrival, OpError>) + Send + 'static,
    ) {
        self.step(id).rendezvous.receive(key.into(), Box::new(waiter));
    }

    /// Nobody waits for this tensor any more.
    pub fn forget(&self, id: i64, key: &str) {
        let mut steps = lock(&self.steps);
        // Who asks for steps that never come leaves nothing behind.
        let idle = steps
            .get(&id)
            .is_some_and(|step| step.rendezvous.forget(key) && Arc::strong_count(step) == 1);
        if idle {
            steps.remove(&id);
        }
    }

    /// Forgets a step that is done here, unless others have yet to ask for what it sent; whether it is forgotten.
    pub fn settle(&self, id: i64) -> bool {
        let mut steps = lock(&self.steps);
        let settled = steps.get(&id).is_some_and(|step| step.rendezvous.is_empty());
        if settled {
            steps.remove(&id);
        }
        settled
    }

    /// Ends a step and all who wait in it.
    pub fn cleanup(&self, id: i64) {
        let step = lock(&self.steps).remove(&id);
        if let Some(step) = step {
            step.cancel(OpError::aborted(format!("Cleanup {id}")));
        }
    }

    /// Forgets the resources of containers.
    pub fn reset(&self, containers: &[String]) {
        self.site.resources.clear(containers);
    }
}
