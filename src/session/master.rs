//! [`Master`]: the sessions that clients open on one task.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::cancel::{Cancellation, lock};
use super::client::{Parts, Session, partial_runs};
use super::place::{Device, Devices};
use super::proto::*;
use super::ready::task_name;
use super::{OpError, Worker, unique};
use crate::cluster::{ClusterSpec, DeviceName, TaskId};

/// The pause before asking a task again that is not up yet.
const PAUSE: Duration = Duration::from_millis(250);

/// Such pauses between two lines about it: ten seconds, as TensorFlow waits.
const TOLD_EVERY: u32 = 40;

/// What a master says: the placement log, and whom it waits for.
pub trait Voice: Send + Sync {
    /// Lines of the placement log.
    fn placement(&self, lines: &str);
    /// A sentence for who looks after this task.
    fn note(&self, sentence: &str);
}

/// The sessions of one task.
pub struct Master {
    worker: Arc<Worker>,
    spec: ClusterSpec,
    voice: Box<dyn Voice>,
    /// How long tasks are waited for that are not up.
    patience: Duration,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
}

impl Master {
    /// No sessions yet.
    pub fn new(
        worker: Arc<Worker>,
        spec: ClusterSpec,
        voice: Box<dyn Voice>,
        patience: Duration,
    ) -> Self {
        Self { worker, spec, voice, patience, sessions: Mutex::default() }
    }

    /// The session of a handle.
    ///
    /// # Errors
    /// ABORTED where there is none, which a client takes as a reason to open another.
    pub fn session(&self, handle: &str) -> Result<Arc<Session>, OpError> {
        let gone = || OpError::aborted(format!("Session {handle} is not found."));
        lock(&self.sessions).get(handle).cloned().ok_or_else(gone)
    }

    /// Opens a session, once every task of the cluster is up that its filters let through.
    pub fn create(
        &self,
        request: CreateSessionRequest,
        cancellation: &Cancellation,
    ) -> Result<CreateSessionResponse, OpError> {
        let config = request.config.unwrap_or_default();
        let (others, attributes) = self.devices(&config.device_filters, cancellation)?;
        let devices = devices(&attributes)?;
        let handle = format!("{:016x}", unique());
        let (soft, log) = (config.allow_soft_placement, config.log_device_placement);
        let worker = self.worker.clone();
        let parts = Parts {
            worker,
            handle: handle.clone(),
            devices,
            attributes: attributes.clone(),
            others: others.clone(),
            soft,
            log,
        };
        let session = Arc::new(Session::new(parts));
        if let Some(lines) = session.first(request.graph_def.unwrap_or_default())? {
            self.voice.placement(&lines);
        }
        for task in &others {
            let request = CreateWorkerSessionRequest {
                session_handle: handle.clone(),
                server_def: Some(self.server_def(task)),
                isolate_session_state: false,
                cluster_device_attributes: attributes.clone(),
                master_task: task_name(self.worker.task()),
                master_incarnation: attributes.first().map_or(0, |own| own.incarnation as i64),
            };
            if let Err(error) = self.worker.peers().create_worker_session(task, request) {
                session.close(error.clone());
                return Err(error);
            }
        }
        lock(&self.sessions).insert(handle.clone(), session);
        Ok(CreateSessionResponse { session_handle: handle, graph_version: 1 })
    }

    fn server_def(&self, task: &TaskId) -> ServerDef {
        let job = |name: &str| JobDef {
            name: name.to_owned(),
            tasks: self
                .spec
                .tasks(name)
                .map(|(task, address)| (task.index as i32, address.to_owned()))
                .collect(),
        };
        ServerDef {
            cluster: Some(ClusterDef { job: self.spec.jobs().map(job).collect() }),
            job_name: task.job.clone(),
            task_index: task.index as i32,
            protocol: "grpc".to_owned(),
        }
    }

    /// The other tasks that filters let through (all, where there are none), and the devices of all, this task's first.
    fn devices(
        &self,
        filters: &[String],
        cancellation: &Cancellation,
    ) -> Result<(Vec<TaskId>, Vec<DeviceAttributes>), OpError> {
        let parse = |text: &String| {
            let bad = |_| OpError::invalid(format!("Unable to parse device filter: {text}"));
            text.parse::<DeviceName>().map_err(bad)
        };
        let filters: Result<Vec<DeviceName>, OpError> = filters.iter().map(parse).collect();
        let filters = filters?;
        let fits = |task: &TaskId| {
            let full = DeviceName {
                job: Some(task.job.clone()),
                replica: Some(0),
                task: Some(task.index),
                ..DeviceName::default()
            };
            filters.is_empty() || filters.iter().any(|filter| filter.accepts(&full))
        };
        let own = self.worker.task();
        let others: Vec<TaskId> = self
            .spec
            .all()
            .map(|(task, _)| task)
            .filter(|task| task != own && fits(task))
            .collect();
        let mut attributes = self.worker.devices().to_vec();
        for task in &others {
            attributes.extend(self.wait_for(task, cancellation)?);
        }
        Ok((others, attributes))
    }

    /// Asks a task for its devices until it answers.
    fn wait_for(
        &self,
        task: &TaskId,
        cancellation: &Cancellation,
    ) -> Result<Vec<DeviceAttributes>, OpError> {
        let mut pauses = 0;
        loop {
            cancellation.check()?;
            match self.worker.peers().get_status(task) {
                Ok(status) => return Ok(status.device_attributes),
                Err(_) if PAUSE * pauses < self.patience => {}
                Err(error) => {
                    let (name, secs) = (task_name(task), self.patience.as_secs());
                    let error = error.message;
                    return Err(OpError::unavailable(format!(
                        "no response from worker {name} within {secs} s: {error}; start it, or leave it out with device_filters"
                    )));
                }
            }
            pauses += 1;
            if pauses % TOLD_EVERY == 0 {
                self.voice.note(&format!(
                    "CreateSession still waiting for response from worker: {}",
                    task_name(task)
                ));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Adds nodes to a session's graph.
    pub fn extend(&self, request: ExtendSessionRequest) -> Result<ExtendSessionResponse, OpError> {
        let session = self.session(&request.session_handle)?;
        let graph = request.graph_def.unwrap_or_default();
        let (new_graph_version, log) = session.extend(graph, request.current_graph_version)?;
        if let Some(lines) = log {
            self.voice.placement(&lines);
        }
        Ok(ExtendSessionResponse { new_graph_version })
    }

    /// Closes a session; its steps end.
    pub fn close(&self, handle: &str) -> Result<(), OpError> {
        let session = self.session(handle)?;
        lock(&self.sessions).remove(handle);
        let text = "Step was cancelled by an explicit call to `Session::Close()`.";
        session.close(OpError::cancelled(text));
        Ok(())
    }

    /// The devices of a session, or of the cluster.
    pub fn list_devices(
        &self,
        handle: &str,
        cancellation: &Cancellation,
    ) -> Result<Vec<DeviceAttributes>, OpError> {
        match handle {
            "" => Ok(self.devices(&[], cancellation)?.1),
            handle => Ok(self.session(handle)?.devices().to_vec()),
        }
    }

    /// Closes all sessions, and lets the tasks that filters let through forget the resources of containers.
    pub fn reset(
        &self,
        request: &ResetRequest,
        cancellation: &Cancellation,
    ) -> Result<(), OpError> {
        let sessions: Vec<Arc<Session>> = lock(&self.sessions).drain().map(|(_, s)| s).collect();
        for session in sessions {
            session.close(OpError::aborted(format!("Session {} was reset", session.handle())));
        }
        let (others, _) = self.devices(&request.device_filters, cancellation)?;
        self.worker.reset(&request.container);
        for task in &others {
            let request = CleanupAllRequest { container: request.container.clone() };
            self.worker.peers().cleanup_all(task, request)?;
        }
        Ok(())
    }

    /// Always an error.
    pub fn partial_run_setup(&self) -> Result<PartialRunSetupResponse, OpError> {
        Err(partial_runs())
    }
}

/// The devices in the order of their names; the first of `attributes` is the default.
fn devices(attributes: &[DeviceAttributes]) -> Result<Devices, OpError> {
    let mut all = Vec::new();
    for attributes in attributes {
        // Kinds that nobody here can place on, such as TensorFlow's XLA devices.
        if let Ok(name) = attributes.name.parse::<DeviceName>() {
            let (text, incarnation) = (attributes.name.clone(), attributes.incarnation);
            all.push(Device { text, name, incarnation });
        }
    }
    let own = attributes.first().map(|own| own.name.clone()).unwrap_or_default();
    all.sort_by(|a, b| a.text.cmp(&b.text));
    let default = all.iter().position(|device| device.text == own);
    let default = default.ok_or_else(|| OpError::internal("this task has no device"))?;
    Ok(Devices { all, default })
}
