//! [`Runtime`]: the network threads of this task, behind blocking calls.

use std::future::Future;
use std::sync::Arc;

use tokio::task::JoinHandle;

use super::RpcError;
use crate::device::heap;

/// One network thread: gRPC on loopback is fastest so, and compute threads keep their cores.
#[derive(Clone)]
pub struct Runtime(Arc<tokio::runtime::Runtime>);

impl Runtime {
    /// Starts the thread.
    pub fn start() -> Result<Self, RpcError> {
        heap::keep_messages();
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("network")
            .enable_all()
            .build()
            .map(|runtime| Self(Arc::new(runtime)))
            .map_err(|error| RpcError::Runtime(error.to_string()))
    }

    /// Waits for a future on the calling thread.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.0.block_on(future)
    }

    /// Runs a future on the network thread, whether or not anybody waits for the handle.
    pub(super) fn spawn(
        &self,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        self.0.spawn(future)
    }
}
