//! TensorFlow's sessions: graphs of clients, executed as TensorFlow executes them, on the tasks of a cluster.
//!
//! Apart from the trainer's graph: named nodes with free device strings, control edges, references, queues, and edges across
//! tasks. No sockets here; `rpc/tensorflow.rs` speaks TensorFlow's protocol.
//!
//! # Layout
//! [`Tensor`] is what flows along edges (`codec.rs`: on the wire), [`ops`] are the kernels, [`Call`] is one run of one, [`Resources`] what
//! a task keeps between steps, [`Gpu`] where some kernels compute. [`Worker`] is a task's side: it builds a [`Program`] from its part of a graph (`program.rs`) and runs it
//! (`run.rs`, `executor.rs`), tensors of other tasks come through the [`rendezvous`](Step). [`Master`] is the client's side: a
//! [`Session`] places a graph (`place.rs`), prunes it for a step (`plan.rs`), cuts it into parts (`partition.rs`), hands these out
//! (`ready.rs`) and has them run (`execution.rs`). [`Peers`] reaches other tasks.
//!
//! A step is a future that no thread sleeps for: what arrives is put in its inbox (`inbox.rs`), and a node that waits for other steps
//! leaves its [`Bell`] with who will bring it. What takes long has a thread (`weight.rs`, `pool.rs`).

mod call;
mod cancel;
mod client;
pub mod codec;
mod error;
mod execution;
mod executor;
mod gpu;
mod graph;
mod graph_file;
mod inbox;
mod master;
mod node;
pub mod ops;
mod partition;
mod peers;
mod place;
mod plan;
mod pool;
mod program;
mod ready;
mod rendezvous;
mod resources;
mod run;
mod tensor;
mod weight;
mod worker;

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

pub use call::{Attempt, Call, Context, Found, Value};
pub use cancel::{Bell, Cancellation, Monitor};
pub use client::{Asked, Running, Session};
pub use error::{Code, OpError};
pub use execution::Execution;
pub use gpu::Gpu;
pub use graph_file::{GraphFileError, read_graph};
pub use inbox::block_on;
pub use master::{Master, Voice};
pub use node::{Input, Node};
pub use peers::{Done, Guard, Peers};
pub use program::Program;
pub use ready::Ready;
pub use rendezvous::{Arrival, Step};
pub use resources::{Handle, Resources, Variable};
use tensor::elements as tensor_elements;
pub use tensor::{DType, Data, Element, Tensor};
pub use worker::Worker;

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

/// A number that no other task draws: steps, sessions and incarnations are named so. Never zero.
fn unique() -> u64 {
    static DRAWN: AtomicU64 = AtomicU64::new(0);
    static STATE: std::sync::LazyLock<RandomState> = std::sync::LazyLock::new(RandomState::new);
    STATE.hash_one(DRAWN.fetch_add(1, Ordering::Relaxed)).max(1)
}
