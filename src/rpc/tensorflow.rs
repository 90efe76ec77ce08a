//! TensorFlow's services on a task: [`sessions`] answers its clients and servers.
//!
//! Steps run where the network is served, and move away by themselves when they take long; the rest may wait, so it has a thread of
//! its own. A caller that goes away ends what it asked for.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tonic::{Code, Request, Response, Status};

use super::Services;
use super::talk::TaskApi;
use super::tensorflow_proto::master_service_server::{MasterService, MasterServiceServer};
use super::tensorflow_proto::task_service_server::TaskServiceServer;
use super::tensorflow_proto::worker_service_server::{WorkerService, WorkerServiceServer};
use crate::session::proto::*;
use crate::session::{Asked, Cancellation, Master, OpError, Running, Session, Step, Worker, codec};

/// TensorFlow's clients and servers know no limit.
pub(super) const MESSAGE: usize = 2 << 30;

/// Of an error's text: a status travels in headers, which are small.
const TEXT: usize = 4000;

/// Adds TensorFlow's two services, and the one that tasks of tftrain have for each other.
pub fn sessions(master: Arc<Master>, worker: Arc<Worker>) -> Services {
    let master = MasterServiceServer::new(MasterApi(master));
    let tasks = TaskServiceServer::new(TaskApi(worker.clone()));
    let worker = WorkerServiceServer::new(WorkerApi(worker));
    Box::new(|routes| {
        routes
            .add_service(
                master.max_decoding_message_size(MESSAGE).max_encoding_message_size(MESSAGE),
            )
            .add_service(
                worker.max_decoding_message_size(MESSAGE).max_encoding_message_size(MESSAGE),
            )
            .add_service(
                tasks.max_decoding_message_size(MESSAGE).max_encoding_message_size(MESSAGE),
            )
    })
}

fn status(error: OpError) -> Status {
    let mut text = error.message;
    if text.len() > TEXT {
        text.truncate(text.floor_char_boundary(TEXT));
        text.push_str("...");
    }
    Status::new(Code::from_i32(error.code as i32), text)
}

/// Ends what a caller asked for when the caller is gone before it is answered.
struct Caller<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Caller<F> {
    fn new(gone: F) -> Self {
        Self(Some(gone))
    }

    fn answered(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for Caller<F> {
    fn drop(&mut self) {
        if let Some(gone) = self.0.take() {
            gone();
        }
    }
}

fn of_step(step: &Arc<Step>) -> Caller<impl FnOnce() + use<>> {
    let step = step.clone();
    Caller::new(move || step.cancel(gone()))
}

fn of_call(cancellation: &Arc<Cancellation>) -> Caller<impl FnOnce() + use<>> {
    let cancellation = cancellation.clone();
    Caller::new(move || cancellation.cancel(gone()))
}

fn gone() -> OpError {
    OpError::cancelled("RPC Request was cancelled")
}

/// Work that may wait, on a thread of its own.
async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, OpError> + Send + 'static,
) -> Result<T, OpError> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.unwrap_or_else(|_| Err(OpError::internal("the server failed; its log says why")))
}

/// Work of which the caller may allow only so many milliseconds; 0 is any number.
async fn within<T>(
    millis: i64,
    step: &Step,
    work: impl Future<Output = Result<T, OpError>>,
) -> Result<T, OpError> {
    let mut work = std::pin::pin!(work);
    if let Some(millis) = u64::try_from(millis).ok().filter(|millis| *millis > 0) {
        match tokio::time::timeout(Duration::from_millis(millis), &mut work).await {
            Ok(result) => return result,
            Err(_) => step.cancel(OpError::deadline("Timed out waiting for the step")),
        }
    }
    work.await
}

struct MasterApi(Arc<Master>);

/// Runs a step of a session. A plan that is not there yet is made aside.
async fn execute(
    session: Arc<Session>,
    running: &Running,
    asked: Asked,
) -> Result<Vec<NamedTensorProto>, OpError> {
    let (ready, asked) = match session.known(&asked) {
        Some(ready) => (ready, asked),
        None => aside(move || Ok((session.prepare(&asked)?, asked))).await?,
    };
    running.execute(ready, asked)?.await
}

#[tonic::async_trait]
impl MasterService for MasterApi {
    async fn create_session(
        &self,
        request: Request<CreateSessionRequest>,
    ) -> Result<Response<CreateSessionResponse>, Status> {
        let (master, cancellation) = (self.0.clone(), Arc::<Cancellation>::default());
        let _caller = of_call(&cancellation);
        let created = aside(move || {
            let created = master.create(request.into_inner(), &cancellation)?;
            // Nobody would close it.
            cancellation.check().inspect_err(|_| _ = master.close(&created.session_handle))?;
            Ok(created)
        });
        created.await.map(Response::new).map_err(status)
    }

    async fn extend_session(
        &self,
        request: Request<ExtendSessionRequest>,
    ) -> Result<Response<ExtendSessionResponse>, Status> {
        let master = self.0.clone();
        let extended = aside(move || master.extend(request.into_inner()));
        extended.await.map(Response::new).map_err(status)
    }

    async fn partial_run_setup(
        &self,
        _: Request<PartialRunSetupRequest>,
    ) -> Result<Response<PartialRunSetupResponse>, Status> {
        self.0.partial_run_setup().map(Response::new).map_err(status)
    }

    async fn run_step(
        &self,
        request: Request<RunStepRequest>,
    ) -> Result<Response<RunStepResponse>, Status> {
        let request = request.into_inner();
        let session = self.0.session(&request.session_handle).map_err(status)?;
        let running = session.begin().map_err(status)?;
        let _caller = of_step(running.step());
        let in_body = request.store_errors_in_response_body;
        let millis = request.options.as_ref().map_or(0, |options| options.timeout_in_ms);
        let step = async { execute(session, &running, Asked::new(request)?).await };
        let answer = match within(millis, running.step(), step).await {
            Ok(tensor) => RunStepResponse { tensor, ..RunStepResponse::default() },
            Err(error) if in_body => RunStepResponse {
                status_code: error.code as i32,
                status_error_message: error.message,
                ..RunStepResponse::default()
            },
            Err(error) => return Err(status(error)),
        };
        Ok(Response::new(answer))
    }

    async fn close_session(
        &self,
        request: Request<CloseSessionRequest>,
    ) -> Result<Response<CloseSessionResponse>, Status> {
        self.0.close(&request.into_inner().session_handle).map_err(status)?;
        Ok(Response::new(CloseSessionResponse {}))
    }

    async fn list_devices(
        &self,
        request: Request<ListDevicesRequest>,
    ) -> Result<Response<ListDevicesResponse>, Status> {
        let (master, cancellation) = (self.0.clone(), Arc::<Cancellation>::default());
        let _caller = of_call(&cancellation);
        let handle = request.into_inner().session_handle;
        let listed = aside(move || master.list_devices(&handle, &cancellation));
        let local_device = listed.await.map_err(status)?;
        Ok(Response::new(ListDevicesResponse { local_device, remote_device: Vec::new() }))
    }

    async fn reset(
        &self,
        request: Request<ResetRequest>,
    ) -> Result<Response<ResetResponse>, Status> {
        let (master, cancellation) = (self.0.clone(), Arc::<Cancellation>::default());
        let _caller = of_call(&cancellation);
        let reset = aside(move || master.reset(&request.into_inner(), &cancellation));
        reset.await.map(|()| Response::new(ResetResponse {})).map_err(status)
    }

    async fn make_callable(
        &self,
        request: Request<MakeCallableRequest>,
    ) -> Result<Response<MakeCallableResponse>, Status> {
        let MakeCallableRequest { session_handle, options, .. } = request.into_inner();
        let session = self.0.session(&session_handle).map_err(status)?;
        let made = aside(move || session.make_callable(options.unwrap_or_default()));
        let handle = made.await.map_err(status)?;
        Ok(Response::new(MakeCallableResponse { handle }))
    }

    async fn run_callable(
        &self,
        request: Request<RunCallableRequest>,
    ) -> Result<Response<RunCallableResponse>, Status> {
        let request = request.into_inner();
        let session = self.0.session(&request.session_handle).map_err(status)?;
        let running = session.begin().map_err(status)?;
        let _caller = of_step(running.step());
        let asked = session.called(&request).map_err(status)?;
        let fetched = execute(session, &running, asked).await.map_err(status)?;
        let fetch = fetched.into_iter().filter_map(|named| named.tensor).collect();
        Ok(Response::new(RunCallableResponse { fetch, metadata: None }))
    }

    async fn release_callable(
        &self,
        request: Request<ReleaseCallableRequest>,
    ) -> Result<Response<ReleaseCallableResponse>, Status> {
        let request = request.into_inner();
        let session = self.0.session(&request.session_handle).map_err(status)?;
        session.release_callable(request.handle);
        Ok(Response::new(ReleaseCallableResponse {}))
    }
}

struct WorkerApi(Arc<Worker>);

/// Runs a task's part of a step.
pub(super) async fn run_graph(
    worker: &Worker,
    request: RunGraphRequest,
) -> Result<RunGraphResponse, OpError> {
    let (id, step) = (request.step_id, worker.step(request.step_id));
    let caller = of_step(&step);
    let ran = match worker.run_graph(&step, request) {
        Ok(running) => running.await,
        Err(error) => Err(error),
    };
    // Others may still ask for what it sent.
    caller.answered();
    let recv = ran?;
    Ok(RunGraphResponse { recv, clean: worker.settle(id), ..RunGraphResponse::default() })
}

#[tonic::async_trait]
impl WorkerService for WorkerApi {
    async fn get_status(
        &self,
        _: Request<GetStatusRequest>,
    ) -> Result<Response<GetStatusResponse>, Status> {
        let device_attributes = self.0.devices().to_vec();
        Ok(Response::new(GetStatusResponse { device_attributes }))
    }

    async fn create_worker_session(
        &self,
        _: Request<CreateWorkerSessionRequest>,
    ) -> Result<Response<CreateWorkerSessionResponse>, Status> {
        // A session leaves nothing here but its graphs.
        Ok(Response::new(CreateWorkerSessionResponse {}))
    }

    async fn delete_worker_session(
        &self,
        request: Request<DeleteWorkerSessionRequest>,
    ) -> Result<Response<DeleteWorkerSessionResponse>, Status> {
        self.0.delete_session(&request.into_inner().session_handle);
        Ok(Response::new(DeleteWorkerSessionResponse {}))
    }

    async fn register_graph(
        &self,
        request: Request<RegisterGraphRequest>,
    ) -> Result<Response<RegisterGraphResponse>, Status> {
        let worker = self.0.clone();
        let registered = aside(move || {
            let RegisterGraphRequest { session_handle, graph_def, .. } = request.into_inner();
            worker.register(&session_handle, &graph_def.unwrap_or_default())
        });
        let graph_handle = registered.await.map_err(status)?;
        Ok(Response::new(RegisterGraphResponse { graph_handle }))
    }

    async fn deregister_graph(
        &self,
        request: Request<DeregisterGraphRequest>,
    ) -> Result<Response<DeregisterGraphResponse>, Status> {
        self.0.deregister(&request.into_inner().graph_handle);
        Ok(Response::new(DeregisterGraphResponse {}))
    }

    async fn run_graph(
        &self,
        request: Request<RunGraphRequest>,
    ) -> Result<Response<RunGraphResponse>, Status> {
        let request = request.into_inner();
        let in_body = request.store_errors_in_response_body;
        match run_graph(&self.0, request).await {
            Ok(answer) => Ok(Response::new(answer)),
            Err(error) if in_body => Ok(Response::new(RunGraphResponse {
                status_code: error.code as i32,
                status_error_message: error.message,
                ..RunGraphResponse::default()
            })),
            Err(error) => Err(status(error)),
        }
    }

    async fn cleanup_graph(
        &self,
        request: Request<CleanupGraphRequest>,
    ) -> Result<Response<CleanupGraphResponse>, Status> {
        self.0.cleanup(request.into_inner().step_id);
        Ok(Response::new(CleanupGraphResponse {}))
    }

    async fn cleanup_all(
        &self,
        request: Request<CleanupAllRequest>,
    ) -> Result<Response<CleanupAllResponse>, Status> {
        self.0.reset(&request.into_inner().container);
        Ok(Response::new(CleanupAllResponse {}))
    }

    async fn recv_tensor(
        &self,
        request: Request<RecvTensorRequest>,
    ) -> Result<Response<RecvTensorResponse>, Status> {
        let RecvTensorRequest { step_id, rendezvous_key, .. } = request.into_inner();
        let (tell, told) = oneshot::channel();
        self.0.receive(step_id, &rendezvous_key, move |result| _ = tell.send(result));
        let worker = self.0.clone();
        let caller = Caller::new(move || worker.forget(step_id, &rendezvous_key));
        let arrival = told.await.unwrap_or_else(|_| Err(OpError::aborted("the step is over")));
        caller.answered();
        let tensor = arrival.map_err(status)?;
        Ok(Response::new(RecvTensorResponse {
            is_dead: tensor.is_none(),
            tensor: tensor.as_ref().map(codec::encode),
            send_start_micros: 0,
        }))
    }
}
