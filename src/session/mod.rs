//! TensorFlow's sessions: graphs of clients, executed as TensorFlow executes them, on the tasks of a cluster.
//!
//! Apart from the trainer's graph: named nodes with free device strings, control edges, references, queues, and edges across
//! tasks. No sockets here; `rpc/tensorflow.rs` speaks TensorFlow's protocol.
//!
//! # Layout
//! [`Tensor`] is what flows along edges (`codec.rs`: on the wire), [`ops`] are the kernels, [`Call`] is one run of one, [`Resources`] what
//! a task keeps between steps.

mod call;
mod cancel;
pub mod codec;
mod error;
mod node;
pub mod ops;
mod resources;
mod tensor;

pub use call::{Call, Context, Value};
pub use cancel::{Cancellation, Monitor};
pub use error::{Code, OpError};
pub use node::{Input, Node};
pub use resources::{Handle, Resources, Variable};
pub use tensor::{DType, Data, Element, Tensor};
use tensor::elements as tensor_elements;

/// The messages of `tensorflow.proto`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/tensorflow.rs"));
}
