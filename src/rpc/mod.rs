//! Tasks that talk: the only module that knows tokio and tonic.
//!
//! It implements the traits of the layers below over gRPC: a `VariableStore` whose variables are on parameter servers, a `Link`
//! between the workers of a collective. Compute code stays synchronous: callers block on [`Runtime`].

mod channel;
mod chunks;
mod control;
mod error;
mod members;
mod parameters;
mod remote_store;
mod runtime;
mod server;

pub use channel::{Peer, Timeouts};
pub use control::Identity;
pub use error::RpcError;
pub use members::{Departure, Failure, Members};
pub use parameters::ParameterServer;
pub use remote_store::RemoteStore;
pub use runtime::Runtime;
pub use server::{Server, Services, listen};

/// The messages and services of `tftrain.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub(crate) mod proto {
    tonic::include_proto!("tftrain.v1");
}

/// The version that [`control::Identity`] compares; raised with every change that an older program would misread.
pub const PROTOCOL: u32 = 1;
