//! Shapes and tensors on the host.

mod host;
mod shape;

pub use host::HostTensor;
pub use shape::Shape;
