//! [`GrpcPeers`]: the other tasks of a session's cluster, by TensorFlow's own protocol.

use std::collections::HashMap;
use std::error::Error;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use super::Runtime;
use super::security::root_cause;
use super::server::{CONNECTION_WINDOW, STREAM_WINDOW};
use super::shortcut::{self, Shortcut};
use super::talk::{LARGE, Talk, lock};
use super::tensorflow::MESSAGE;
use super::tensorflow_proto::task_service_client::TaskServiceClient;
use super::tensorflow_proto::worker_service_client::WorkerServiceClient;
use crate::cluster::{ClusterSpec, TaskId};
use crate::session::proto::*;
use crate::session::{Done, Guard, OpError, Peers};

/// How long a task may take to say who it is, or to connect.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

type Client = WorkerServiceClient<Channel>;

/// Connections to other tasks, made when they are needed and again when they break.
pub struct GrpcPeers {
    runtime: Runtime,
    spec: ClusterSpec,
    channels: Mutex<HashMap<TaskId, Channel>>,
    talks: Arc<Mutex<HashMap<TaskId, Manner>>>,
}

/// How steps reach a task.
#[derive(Clone)]
enum Manner {
    /// By calls, until it has answered whether it talks.
    Asked,
    /// By calls: it is TensorFlow's.
    Calls,
    /// By messages.
    Talk(Arc<Talk>),
}

/// A call that ends when nobody waits for it.
struct Call(JoinHandle<()>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The way to a task: the short one on the same host, else TCP.
#[derive(Clone)]
struct Way(Arc<str>);

impl Service<Uri> for Way {
    type Response = TokioIo<Road>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let address = self.0.clone();
        Box::pin(async move {
            if let Some(near) = shortcut::find(&address).await.and_then(Shortcut::into_stream) {
                return Ok(TokioIo::new(Road::Near(near)));
            }
            let far = TcpStream::connect(&*address).await?;
            far.set_nodelay(true)?;
            Ok(TokioIo::new(Road::Far(far)))
        })
    }
}

/// A connection by either way.
enum Road {
    Near(UnixStream),
    Far(TcpStream),
}

impl AsyncRead for Road {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Near(stream) => Pin::new(stream).poll_read(context, into),
            Self::Far(stream) => Pin::new(stream).poll_read(context, into),
        }
    }
}

impl AsyncWrite for Road {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Near(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Far(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Near(stream) => Pin::new(stream).poll_write_vectored(context, parts),
            Self::Far(stream) => Pin::new(stream).poll_write_vectored(context, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Sockets keep nothing back.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Near(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Far(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

impl GrpcPeers {
    /// The tasks of `spec`.
    pub fn new(runtime: Runtime, spec: ClusterSpec) -> Self {
        Self { runtime, spec, channels: Mutex::default(), talks: Arc::default() }
    }

    fn client(&self, task: &TaskId) -> Result<Client, OpError> {
        Ok(WorkerServiceClient::new(self.channel(task)?)
            .max_decoding_message_size(MESSAGE)
            .max_encoding_message_size(MESSAGE))
    }

    fn channel(&self, task: &TaskId) -> Result<Channel, OpError> {
        let mut channels = lock(&self.channels);
        if let Some(channel) = channels.get(task) {
            return Ok(channel.clone());
        }
        let missing = || OpError::invalid(format!("{task} is not in the cluster"));
        let address = self.spec.address(task).ok_or_else(missing)?;
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| OpError::invalid(format!("{task} at {address}: {error}")))?
            .connect_timeout(PATIENCE)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(10));
        let way = Way(address.into());
        // A channel starts a task.
        let _runtime = self.runtime.enter();
        let channel = endpoint.connect_with_connector_lazy(way);
        channels.insert(task.clone(), channel.clone());
        Ok(channel)
    }

    /// The error of a call: what the task says, or that it is not there.
    fn failed(&self, task: &TaskId) -> impl Fn(Status) -> OpError + Clone + Send + Sync + use<> {
        let address = self.spec.address(task).unwrap_or("?").to_owned();
        let task = task.clone();
        move |status| match status.source() {
            Some(cause) => {
                OpError::unavailable(format!("{task} at {address}: {}", root_cause(cause)))
            }
            None => OpError::from_wire(status.code() as i32, status.message().to_owned()),
        }
    }

    /// The talk with a task, where there is one; else it is asked for one.
    pub(super) fn talk(&self, task: &TaskId) -> Option<Arc<Talk>> {
        let mut talks = lock(&self.talks);
        match talks.get(task) {
            Some(Manner::Talk(talk)) => return Some(talk.clone()),
            Some(Manner::Asked | Manner::Calls) => return None,
            None => {}
        }
        let (channel, client) = (self.channel(task).ok()?, self.client(task).ok()?);
        talks.insert(task.clone(), Manner::Asked);
        let (failed, talks, task) = (self.failed(task), self.talks.clone(), task.clone());
        let (runtime, of_call) = (self.runtime.clone(), failed.clone());
        let by_call = move |request: RecvTensorRequest, done: Done<RecvTensorResponse>| {
            let (mut client, failed) = (client.clone(), of_call.clone());
            drop(runtime.spawn(async move {
                let answer = client.recv_tensor(request).await;
                done(answer.map(Response::into_inner).map_err(failed));
            }));
        };
        drop(self.runtime.spawn(async move {
            let (talk, said) = Talk::new(Box::new(by_call));
            let mut client = TaskServiceClient::new(channel)
                .max_decoding_message_size(MESSAGE)
                .max_encoding_message_size(MESSAGE);
            match client.talk(said).await {
                Ok(answers) => {
                    lock(&talks).insert(task.clone(), Manner::Talk(talk.clone()));
                    talk.listen(answers.into_inner(), failed).await;
                }
                Err(status) if status.code() == Code::Unimplemented => {
                    lock(&talks).insert(task, Manner::Calls);
                    return;
                }
                Err(_) => {}
            }
            lock(&talks).remove(&task);
        }));
        None
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
                let call =
                    async move { done(call.await.map(Response::into_inner).map_err(failed)) };
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
        match self.talk(task) {
            Some(talk) => talk.recv_tensor(request, done),
            None => self.start(
                task,
                |mut client| async move { client.recv_tensor(request).await },
                done,
            ),
        }
    }

    fn run_graph(
        &self,
        task: &TaskId,
        request: RunGraphRequest,
        done: Done<RunGraphResponse>,
    ) -> Guard {
        match self.talk(task).filter(|_| request.encoded_len() < LARGE) {
            Some(talk) => talk.run_graph(request, done),
            None => {
                self.start(task, |mut client| async move { client.run_graph(request).await }, done)
            }
        }
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

    fn deregister_graph(&self, task: &TaskId, request: DeregisterGraphRequest) {
        self.tell(task, |mut client| async move { client.deregister_graph(request).await });
    }

    fn cleanup_all(
        &self,
        task: &TaskId,
        request: CleanupAllRequest,
    ) -> Result<CleanupAllResponse, OpError> {
        self.ask(task, |mut client| async move { client.cleanup_all(request).await })
    }
}
