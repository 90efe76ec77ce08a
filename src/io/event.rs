//! TensorBoard's event files: a TFRecord file of `Event` messages.

mod histogram;
pub(crate) mod proto;
mod reader;
mod writer;

pub use histogram::Histogram;
pub use reader::{EventKind, EventRecord, Events, read_events};
pub use writer::EventWriter;
