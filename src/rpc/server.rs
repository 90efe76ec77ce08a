//! [`Server`]: all services of one task behind one address.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tonic::service::{InterceptorLayer, Routes};

use super::control::{ControlService, Identity};
use super::door::{self, Refusals};
use super::members::Members;
use super::proto::control_server::ControlServer;
use super::security::{Security, root_cause};
use super::{RpcError, Runtime};

/// HTTP/2 windows and frames that were fastest on loopback (see `benches/README.md`).
pub(super) const STREAM_WINDOW: u32 = 64 << 20;
pub(super) const CONNECTION_WINDOW: u32 = 128 << 20;
pub(super) const FRAME: u32 = 1 << 20;

/// Adds a task's own services to those that every task has.
pub type Services = Box<dyn FnOnce(Routes) -> Routes + Send>;

/// A running server; dropping it stops it.
pub struct Server {
    /// Where it listens.
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
}

/// Listens on a task's address, without waiting for anybody. Only who demands something of others may be reached by them.
pub fn listen(
    identity: &Identity,
    address: &str,
    security: &Security,
) -> Result<TcpListener, RpcError> {
    let admitted = security.admit(&identity.task, address)?;
    TcpListener::bind(&*admitted).map_err(|error| RpcError::Listen {
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
        security: &Security,
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
        let builder = security
            .server()
            .map_err(|error| RpcError::Credentials(root_cause(&error)))?
            .tcp_nodelay(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(FRAME)
            .http2_keepalive_interval(Some(Duration::from_secs(2)))
            .http2_keepalive_timeout(Some(Duration::from_secs(2)));
        let (refusals, encrypted) = (Refusals::default(), security.encrypts());
        let guard = security.guard(refusals.clone());
        drop(runtime.spawn(async move {
            let (reporter, health) = tonic_health::server::health_reporter();
            reporter.set_serving::<ControlServer<ControlService>>().await;
            let routes = services(Routes::new(health).add_service(control));
            let router = builder.layer(InterceptorLayer::new(guard)).add_routes(routes);
            let incoming = door::open(listener, encrypted, refusals);
            let serving = router.serve_with_incoming_shutdown(incoming, async {
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
