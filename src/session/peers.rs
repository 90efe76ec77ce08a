//! [`Peers`]: how a task calls the others, without saying by which network.

use super::OpError;
use super::proto::*;
use crate::cluster::TaskId;

/// Called once with the answer.
pub type Done<T> = Box<dyn FnOnce(Result<T, OpError>) + Send>;

/// A call that goes on; dropping it ends the call where it is not done.
pub type Guard = Box<dyn Send>;

/// The other tasks of a cluster. Errors name the task.
pub trait Peers: Send + Sync {
    /// Waits for a tensor that a task sends.
    fn recv_tensor(
        &self,
        task: &TaskId,
        request: RecvTensorRequest,
        done: Done<RecvTensorResponse>,
    ) -> Guard;

    /// Runs a task's part of a step.
    fn run_graph(
        &self,
        task: &TaskId,
        request: RunGraphRequest,
        done: Done<RunGraphResponse>,
    ) -> Guard;

    /// Tells a task that a step is over, without waiting.
    fn cleanup_graph(&self, task: &TaskId, request: CleanupGraphRequest);

    /// Asks a task for its devices, without waiting long.
    fn get_status(&self, task: &TaskId) -> Result<GetStatusResponse, OpError>;

    /// Opens a session on a task.
    fn create_worker_session(
        &self,
        task: &TaskId,
        request: CreateWorkerSessionRequest,
    ) -> Result<CreateWorkerSessionResponse, OpError>;

    /// Closes it, without waiting.
    fn delete_worker_session(&self, task: &TaskId, request: DeleteWorkerSessionRequest);

    /// Gives a task its part of a graph.
    fn register_graph(
        &self,
        task: &TaskId,
        request: RegisterGraphRequest,
    ) -> Result<RegisterGraphResponse, OpError>;

    /// Lets a task forget its part of a graph, without waiting.
    fn deregister_graph(&self, task: &TaskId, request: DeregisterGraphRequest);

    /// Lets a task forget its resources.
    fn cleanup_all(
        &self,
        task: &TaskId,
        request: CleanupAllRequest,
    ) -> Result<CleanupAllResponse, OpError>;
}
