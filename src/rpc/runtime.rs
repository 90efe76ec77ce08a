//! [`Runtime`]: the network threads of this task, behind blocking calls.

use std::future::Future;
use std::sync::Arc;

use tokio::runtime::EnterGuard;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::RpcError;
use crate::device::heap;

/// One network thread: gRPC on loopback is fastest so, and compute threads keep their cores.
#[derive(Clone)]
pub struct Runtime {
    tokio: Arc<tokio::runtime::Runtime>,
    /// The thread of [`Runtime::in_order`] ends when nobody keeps this.
    _thread: Option<Arc<oneshot::Sender<()>>>,
}

impl Runtime {
    /// Starts the thread.
    pub fn start() -> Result<Self, RpcError> {
        heap::keep_messages();
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let tokio = builder.worker_threads(1).thread_name("network").enable_all().build();
        let tokio = tokio.map_err(|error| RpcError::Runtime(error.to_string()))?;
        Ok(Self { tokio: Arc::new(tokio), _thread: None })
    }

    /// Starts a thread that takes up what is to be done in the order in which it came, for many small messages: those of one moment
    /// leave together, where the other thread sends each by itself.
    pub fn in_order() -> Result<Self, RpcError> {
        heap::keep_messages();
        let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let tokio = Arc::new(tokio.map_err(|error| RpcError::Runtime(error.to_string()))?);
        let (keep, kept) = oneshot::channel::<()>();
        let driven = tokio.clone();
        let thread = std::thread::Builder::new().name("network".to_owned());
        thread
            .spawn(move || _ = driven.block_on(kept))
            .map_err(|error| RpcError::Runtime(error.to_string()))?;
        Ok(Self { tokio, _thread: Some(Arc::new(keep)) })
    }

    /// Waits for a future on the calling thread.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.tokio.block_on(future)
    }

    /// Lets what is made meanwhile on this thread start tasks of the runtime.
    pub(super) fn enter(&self) -> EnterGuard<'_> {
        self.tokio.enter()
    }

    /// Runs a future on the network thread, whether or not anybody waits for the handle.
    pub(super) fn spawn(
        &self,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        self.tokio.spawn(future)
    }
}
