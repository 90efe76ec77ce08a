//! Tasks that talk: the only module that knows tokio and tonic.
//!
//! It implements the traits of the layers below over gRPC: a `VariableStore` whose variables are on parameter servers, a `Link`
//! between the workers of a collective, a `Tower` on another task. Compute code stays synchronous: callers block on [`Runtime`].

mod attend;
mod bulk;
mod certificates;
mod channel;
mod chunks;
mod collective;
mod control;
mod door;
mod error;
mod lent;
mod members;
mod parameters;
mod remote_store;
mod runtime;
mod security;
mod server;
mod session_client;
mod session_peers;
mod shortcut;
mod talk;
mod tensorflow;
mod towers;

pub use attend::{Attendance, attend};
pub use certificates::{Certified, issue};
pub use channel::{Peer, Timeouts};
pub use collective::{GrpcLink, Inbox};
pub use control::Identity;
pub use error::RpcError;
pub use members::{Departure, Failure, Members};
pub use parameters::ParameterServer;
pub use remote_store::{RemoteStore, Standing};
pub use runtime::Runtime;
pub use security::Security;
pub use server::{Listener, Server, Services, listen};
pub use session_client::SessionClient;
pub use session_peers::GrpcPeers;
pub use tensorflow::sessions;
pub use towers::{RemoteTower, TowerServer, TowerSizes};

/// The messages and services of `tftrain.proto`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub(crate) mod proto {
    tonic::include_proto!("tftrain.v1");
}

/// TensorFlow's services of `tensorflow.proto`; the messages are the session's.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
mod tensorflow_proto {
    include!(concat!(env!("OUT_DIR"), "/services/tensorflow.rs"));
}

use proto::collective_server::CollectiveServer;
use proto::towers_server::TowersServer;
use proto::variables_server::VariablesServer;

/// Adds the Variables service of a ps task.
pub fn variables(parameters: std::sync::Arc<ParameterServer>) -> Services {
    Box::new(|routes| routes.add_service(bulk::Bulk(VariablesServer::new(parameters))))
}

/// Adds the Towers service of a task that only serves.
pub fn towers(towers: std::sync::Arc<TowerServer>) -> Services {
    Box::new(|routes| routes.add_service(bulk::Bulk(TowersServer::new(towers))))
}

/// Adds the Collective service of a worker.
pub fn collective(inbox: std::sync::Arc<Inbox>) -> Services {
    Box::new(|routes| routes.add_service(bulk::Bulk(CollectiveServer::new(inbox))))
}

/// The version that [`control::Identity`] compares; raised with every change that an older program would misread.
pub const PROTOCOL: u32 = 2;
