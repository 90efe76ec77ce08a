//! [`Server`]: all services of one task behind one address.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::server::Router;

use super::control::{ControlService, Identity};
use super::members::Members;
use super::proto::control_server::ControlServer;
use super::{RpcError, Runtime};

/// HTTP/2 windows and frames that were fastest on loopback (see `benches/README.md`).
pub(super) const STREAM_WINDOW: u32 = 64 << 20;
pub(super) const CONNECTION_WINDOW: u32 = 128 << 20;
pub(super) const FRAME: u32 = 1 << 20;

/// Adds a task's own services to those that every task has.
pub type Services = Box<dyn FnOnce(Router) -> Router + Send>;

/// A running server; dropping it stops it.
pub struct Server {
    /// Where it listens.
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
}

/// Listens on a task's address, without waiting for anybody.
pub fn listen(identity: &Identity, address: &str) -> Result<TcpListener, RpcError> {
    TcpListener::bind(address).map_err(|error| RpcError::Listen {
        task: identity.task.clone(),
        address: address.to_owned(),
        reason: error.to_string(),
    })
}

impl Server {
    /// Serves on `listener` until dropped.
    pub fn start(
        runtime: &Runtime,
        listener: TcpListener,
        identity: Arc<Identity>,
        members: Arc<Members>,
        services: Services,
    ) -> Result<Self, RpcError> {
        let failed = |error: std::io::Error| RpcError::Listen {
            task: identity.task.clone(),
            address: "its address".to_owned(),
            reason: error.to_string(),
        };
        let address = listener.local_addr().map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let (stop, stopped) = oneshot::channel::<()>();
        let listener = runtime.block_on(async { tokio::net::TcpListener::from_std(listener) });
        let listener = listener.map_err(failed)?;
        let control = ControlServer::new(ControlService { identity: identity.clone(), members });
        let task = identity.task.clone();
        drop(runtime.spawn(async move {
            let (reporter, health) = tonic_health::server::health_reporter();
            reporter.set_serving::<ControlServer<ControlService>>().await;
            let router = tonic::transport::Server::builder()
                .tcp_nodelay(true)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .max_frame_size(FRAME)
                .http2_keepalive_interval(Some(std::time::Duration::from_secs(2)))
                .http2_keepalive_timeout(Some(std::time::Duration::from_secs(2)))
                .add_service(health)
                .add_service(control);
            let incoming = TcpListenerStream::new(listener);
            let serving = services(router).serve_with_incoming_shutdown(incoming, async {
                // An error means that the handle was dropped, which asks for the same.
                let _ = stopped.await;
            });
            if let Err(error) = serving.await {
                tracing::error!("{task} stopped serving: {error}");
            }
        }));
        Ok(Self { address, stop: Some(stop) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }
}
