//! [`Ready`]: a plan whose parts are where they run, and [`Plans`]: those that a session keeps.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::partition::Part;
use super::peers::Peers;
use super::plan::{Expected, Plan, Signature, Source};
use super::program::Program;
use super::proto::{DeregisterGraphRequest, RegisterGraphRequest};
use super::{OpError, Worker};
use crate::cluster::TaskId;

/// A session keeps no more plans: clients that always ask for something new would fill all its tasks.
const MOST: usize = 1000;

/// What this task runs of a step.
pub(super) struct Local {
    pub(super) program: Arc<Program>,
    pub(super) feeds: Vec<(usize, String)>,
    pub(super) fetches: Vec<String>,
}

/// What another task runs.
pub(super) struct Remote {
    pub(super) task: TaskId,
    pub(super) graph: String,
    pub(super) feeds: Vec<(usize, String)>,
    pub(super) fetches: Vec<String>,
}

/// The place of a part among the local and remote ones.
#[derive(Clone, Copy)]
pub(super) enum Home {
    Local,
    Remote(usize),
}

/// A plan whose parts are where they run.
pub struct Ready {
    pub(super) local: Option<Local>,
    pub(super) remotes: Vec<Remote>,
    pub(super) homes: Vec<Home>,
    pub(super) expected: Vec<Expected>,
    pub(super) sources: Vec<Source>,
    peers: Arc<dyn Peers>,
    /// Whether the session keeps it no longer, although it goes on: the tasks forget their parts after the last step.
    retired: AtomicBool,
}

/// How TensorFlow names a task in errors.
pub(super) fn task_name(task: &TaskId) -> String {
    format!("/job:{}/replica:0/task:{}", task.job, task.index)
}

/// An error with the task that it comes from.
pub(super) fn from(task: &TaskId, mut error: OpError) -> OpError {
    error.message = format!("From {}:\n{}", task_name(task), error.message);
    error
}

impl Ready {
    /// Gives the parts of a plan to their tasks.
    pub(super) fn new(plan: Plan, worker: &Worker, session: &str) -> Result<Self, OpError> {
        let Plan { parts, expected, sources } = plan;
        let mut ready = Self {
            local: None,
            remotes: Vec::new(),
            homes: Vec::new(),
            expected,
            sources,
            peers: worker.peers().clone(),
            retired: AtomicBool::new(true),
        };
        for Part { task, graph, feeds, fetches } in parts {
            if task == *worker.task() {
                let program = worker.build(&graph).map_err(|error| from(&task, error))?;
                ready.local = Some(Local { program, feeds, fetches });
                ready.homes.push(Home::Local);
                continue;
            }
            let request = RegisterGraphRequest {
                session_handle: session.to_owned(),
                graph_def: Some(graph),
                create_worker_session_called: true,
                config_proto: None,
            };
            let answer = worker.peers().register_graph(&task, request);
            let graph = answer.map_err(|error| from(&task, error))?.graph_handle;
            ready.homes.push(Home::Remote(ready.remotes.len()));
            ready.remotes.push(Remote { task, graph, feeds, fetches });
        }
        Ok(ready)
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        if *self.retired.get_mut() {
            for Remote { task, graph, .. } in &self.remotes {
                let request = DeregisterGraphRequest {
                    graph_handle: graph.clone(),
                    ..DeregisterGraphRequest::default()
                };
                self.peers.deregister_graph(task, request);
            }
        }
    }
}

/// The plans of a session; the least recently used go.
#[derive(Default)]
pub(super) struct Plans {
    kept: HashMap<Arc<Signature>, (Arc<Ready>, u64)>,
    /// Grows with every use.
    uses: u64,
}

impl Plans {
    /// The plan of a signature.
    pub(super) fn get(&mut self, signature: &Signature) -> Option<Arc<Ready>> {
        self.uses += 1;
        let (ready, used) = self.kept.get_mut(signature)?;
        *used = self.uses;
        Some(ready.clone())
    }

    /// Keeps one; whoever runs the one that goes may still do so.
    pub(super) fn insert(&mut self, signature: Arc<Signature>, ready: Arc<Ready>) {
        if self.kept.len() >= MOST {
            let oldest = self.kept.iter().min_by_key(|(_, (_, used))| used);
            if let Some(oldest) = oldest.map(|(signature, _)| signature.clone())
                && let Some((ready, _)) = self.kept.remove(&oldest)
            {
                ready.retired.store(true, Ordering::Relaxed);
            }
        }
        self.uses += 1;
        // With its session all that it is made of goes, without a word for each.
        ready.retired.store(false, Ordering::Relaxed);
        if let Some((twin, _)) = self.kept.insert(signature, (ready, self.uses)) {
            twin.retired.store(true, Ordering::Relaxed);
        }
    }
}
