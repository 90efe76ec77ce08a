//! [`SessionClient`]: the other end of TensorFlow's MasterService, as TensorFlow's own clients are.

use std::future::Future;

use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

use super::Runtime;
use super::security::root_cause;
use super::session_peers::PATIENCE;
use super::tensorflow::MESSAGE;
use super::tensorflow_proto::master_service_client::MasterServiceClient;
use crate::session::proto::*;
use crate::session::{Code, OpError};

/// A connection to a server that may be tftrain's or TensorFlow's.
pub struct SessionClient {
    runtime: Runtime,
    client: MasterServiceClient<Channel>,
    address: String,
}

impl SessionClient {
    /// Connects to `HOST:PORT`.
    ///
    /// # Errors
    /// UNAVAILABLE where nobody listens, INVALID_ARGUMENT where it is no address.
    pub fn connect(address: &str) -> Result<Self, OpError> {
        let runtime = Runtime::start().map_err(|error| OpError::internal(error.to_string()))?;
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| OpError::invalid(format!("grpc://{address}: {error}")))?
            .connect_timeout(PATIENCE)
            .tcp_nodelay(true);
        let channel = runtime.block_on(endpoint.connect()).map_err(|error| {
            OpError::unavailable(format!(
                "grpc://{address} does not answer: {}",
                root_cause(&error)
            ))
        })?;
        let client = MasterServiceClient::new(channel)
            .max_decoding_message_size(MESSAGE)
            .max_encoding_message_size(MESSAGE);
        Ok(Self { runtime, client, address: address.to_owned() })
    }

    fn call<T, F>(&self, call: impl FnOnce(MasterServiceClient<Channel>) -> F) -> Result<T, OpError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let answer = self.runtime.block_on(call(self.client.clone()));
        answer.map(Response::into_inner).map_err(|status| {
            let error = OpError::from_wire(status.code() as i32, status.message().to_owned());
            match error.code {
                Code::Unavailable => {
                    OpError::unavailable(format!("grpc://{}: {}", self.address, error.message))
                }
                _ => error,
            }
        })
    }

    /// Opens a session.
    pub fn create(&self, request: CreateSessionRequest) -> Result<CreateSessionResponse, OpError> {
        self.call(|mut client| async move { client.create_session(Request::new(request)).await })
    }

    /// Runs a step; the values are its fetches.
    pub fn step(&self, request: RunStepRequest) -> Result<Vec<NamedTensorProto>, OpError> {
        let answer =
            self.call(|mut client| async move { client.run_step(Request::new(request)).await })?;
        match answer.status_code {
            0 => Ok(answer.tensor),
            code => Err(OpError::from_wire(code, answer.status_error_message)),
        }
    }

    /// Closes a session.
    pub fn close(&self, handle: &str) -> Result<(), OpError> {
        let request = CloseSessionRequest { session_handle: handle.to_owned() };
        self.call(|mut client| async move { client.close_session(Request::new(request)).await })?;
        Ok(())
    }
}
