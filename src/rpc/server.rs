//! [`Server`]: all services of one task behind one address.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tonic::service::{InterceptorLayer, Routes};

use super::control::{ControlService, Identity};
use super::door::{self, Refusals};
use super::members::Members;
use super::proto::control_server::ControlServer;
use super::security::{Security, root_cause};
use super::{RpcError, Runtime, shortcut};

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
    _handle: watch::Sender<()>,
}

/// Where a task listens, before it serves: for everybody, and for tasks on the same host.
pub struct Listener {
    /// With its port, also where any free one was asked for.
    pub address: SocketAddr,
    far: TcpListener,
    near: Option<UnixListener>,
}

/// Listens on a task's address, without waiting for anybody. Only who demands something of others may be reached by them.
pub fn listen(
    identity: &Identity,
    address: &str,
    security: &Security,
) -> Result<Listener, RpcError> {
    let admitted = security.admit(&identity.task, address)?;
    let bind = || {
        let far = TcpListener::bind(&*admitted)?;
        far.set_nonblocking(true)?;
        let address = far.local_addr()?;
        let near = shortcut::listen(address)
            .inspect_err(|error| tracing::info!("{}: TCP only, as {error}", identity.task));
        Ok(Listener { address, far, near: near.ok() })
    };
    bind().map_err(|error: io::Error| RpcError::Listen {
        task: identity.task.clone(),
        address: address.to_owned(),
        reason: error.to_string(),
    })
}

impl Server {
    /// Serves on `listener` until dropped.
    pub fn start(
        runtime: &Runtime,
        listener: Listener,
        identity: Arc<Identity>,
        security: &Security,
        members: Arc<Members>,
        services: Services,
    ) -> Result<Self, RpcError> {
        let Listener { address, far, near } = listener;
        let (handle, stopped) = watch::channel(());
        let far = runtime.block_on(async { tokio::net::TcpListener::from_std(far) });
        let far = far.map_err(|error| RpcError::Listen {
            task: identity.task.clone(),
            address: address.to_string(),
            reason: error.to_string(),
        })?;
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
            let mut builder = builder.layer(InterceptorLayer::new(guard));
            let near = builder
                .add_routes(routes.clone())
                .serve_with_incoming_shutdown(shortcut::open(near), dropped(stopped.clone()));
            let far = builder.add_routes(routes).serve_with_incoming_shutdown(
                door::open(far, encrypted, refusals),
                dropped(stopped),
            );
            if let Err(error) = tokio::try_join!(near, far) {
                tracing::error!("{task} stopped serving: {error}");
            }
        }));
        Ok(Self { address, _handle: handle })
    }
}

/// Waits until the handle of a server is dropped.
async fn dropped(mut handle: watch::Receiver<()>) {
    while handle.changed().await.is_ok() {}
}
