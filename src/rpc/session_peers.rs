//! [`GrpcPeers`]: the other tasks of a session's cluster, by TensorFlow's own protocol.

use std::collections::HashMap;
use std::error::Error;
use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

use super::Runtime;
use super::security::root_cause;
use super::server::{CONNECTION_WINDOW, STREAM_WINDOW};
use super::tensorflow::MESSAGE;
use super::tensorflow_proto::worker_service_client::WorkerServiceClient;
use crate::cluster::{ClusterSpec, TaskId};
use crate::session::proto::*;
use crate::session::{Done, Guard, OpError, Peers};

/// How long a task may take to say who it is, or to connect.
const PATIENCE: Duration = Duration::from_secs(5);

type Client = WorkerServiceClient<Channel>;

/// Connections to other tasks, made when they are needed and again when they break.
pub struct GrpcPeers {
    runtime: Runtime,
    spec: ClusterSpec,
    clients: Mutex<HashMap<TaskId, Client>>,
}

/// A call that ends when nobody waits for it.
struct Call(JoinHandle<()>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl GrpcPeers {
    /// The tasks of `spec`.
    pub fn new(runtime: Runtime, spec: ClusterSpec) -> Self {
        Self { runtime, spec, clients: Mutex::default() }
    }

    fn client(&self, task: &TaskId) -> Result<Client, OpError> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(task) {
            return Ok(client.clone());
        }
        let missing = || OpError::invalid(format!("{task} is not in the cluster"));
        let address = self.spec.address(task).ok_or_else(missing)?;
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| OpError::invalid(format!("{task} at {address}: {error}")))?
            .connect_timeout(PATIENCE)
            .tcp_nodelay(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(10));
        // A channel starts a task of its runtime.
        let channel = self.runtime.block_on(async { endpoint.connect_lazy() });
        let client = WorkerServiceClient::new(channel)
            .max_decoding_message_size(MESSAGE)
            .max_encoding_message_size(MESSAGE);
        clients.insert(task.clone(), client.clone());
        Ok(client)
    }

    /// The error of a call: what the task says, or that it is not there.
    fn failed(&self, task: &TaskId) -> impl Fn(Status) -> OpError + Send + use<> {
        let address = self.spec.address(task).unwrap_or("?").to_owned();
        let task = task.clone();
        move |status| match status.source() {
            Some(cause) => OpError::unavailable(format!("{task} at {address}: {}", root_cause(cause))),
            None => OpError::from_wire(status.code() as i32, status.message().to_owned()),
        }
    }

    /// Starts a call that tells its answer.
    fn start<T, F>(&self, task: &TaskId, call: impl FnOnce(Client) -> F, done: Done<T>) -> Guard
    where
        T: Send + 'static,
        F: Future<Output = Result<Response<T>, Status>> + Send + 'static,
    {
        match self.client(task) {
            Ok(client) => {
                let (call, failed) = (call(client), self.failed(task));
                let call = async move { done(call.await.map(Response::into_inner).map_err(failed)) };
                Box::new(Call(self.runtime.spawn(call)))
            }
            Err(error) => {
                done(Err(error));
                Box::new(())
            }
        }
    }

    /// Makes a call and waits.
    fn ask<T, F>(&self, task: &TaskId, call: impl FnOnce(Client) -> F) -> Result<T, OpError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let call = call(self.client(task)?);
        self.runtime.block_on(call).map(Response::into_inner).map_err(self.failed(task))
    }

    /// Makes a call whose answer is of no interest.
    fn tell<T, F>(&self, task: &TaskId, call: impl FnOnce(Client) -> F)
    where
        F: Future<Output = Result<Response<T>, Status>> + Send + 'static,
    {
        if let Ok(client) = self.client(task) {
            let call = call(client);
            drop(self.runtime.spawn(async move { _ = tokio::time::timeout(PATIENCE, call).await }));
        }
    }
}

impl Peers for GrpcPeers {
    fn recv_tensor(
        &self,
        task: &TaskId,
        request: RecvTensorRequest,
        done: Done<RecvTensorResponse>,
    ) -> Guard {
        self.start(task, |mut client| async move { client.recv_tensor(request).await }, done)
    }

    fn run_graph(
        &self,
        task: &TaskId,
        request: RunGraphRequest,
        done: Done<RunGraphResponse>,
    ) -> Guard {
        self.start(task, |mut client| async move { client.run_graph(request).await }, done)
    }

    fn cleanup_graph(&self, task: &TaskId, request: CleanupGraphRequest) {
        self.tell(task, |mut client| async move { client.cleanup_graph(request).await });
    }

    fn get_status(&self, task: &TaskId) -> Result<GetStatusResponse, OpError> {
        self.ask(task, |mut client| async move {
            let late = |_| Status::unavailable("it does not answer");
            let call = client.get_status(GetStatusRequest {});
            tokio::time::timeout(PATIENCE, call).await.unwrap_or_else(|e| Err(late(e)))
        })
    }

    fn create_worker_session(
        &self,
        task: &TaskId,
        request: CreateWorkerSessionRequest,
    ) -> Result<CreateWorkerSessionResponse, OpError> {
        self.ask(task, |mut client| async move { client.create_worker_session(request).await })
    }

    fn delete_worker_session(&self, task: &TaskId, request: DeleteWorkerSessionRequest) {
        self.tell(task, |mut client| async move { client.delete_worker_session(request).await });
    }

    fn register_graph(
        &self,
        task: &TaskId,
        request: RegisterGraphRequest,
    ) -> Result<RegisterGraphResponse, OpError> {
        self.ask(task, |mut client| async move { client.register_graph(request).await })
    }

    fn cleanup_all(
        &self,
        task: &TaskId,
        request: CleanupAllRequest,
    ) -> Result<CleanupAllResponse, OpError> {
        self.ask(task, |mut client| async move { client.cleanup_all(request).await })
    }
}
