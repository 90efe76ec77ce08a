//! `tftrain` trains neural networks on every device of a machine, the way distributed TensorFlow 1 did it.
//!
//! Modules in suggested reading order; each may use only those of lower layers (`tests/architecture.rs` checks it):
//!
//! | layer | module | is |
//! |---|---|---|
//! | 8 | [`cli`] | the commands; the only place that prints |
//! | 7 | [`train`] | the step, the hooks around it, and the one place that knows the mode |
//! | 6 | [`rpc`] | tasks that talk: parameter servers and collectives over gRPC |
//! | 5 | [`ps`] | which task holds what, and when a gradient is applied |
//! | 5 | [`session`] | TensorFlow's sessions: graphs of clients, run as TensorFlow runs them |
//! | 5 | [`tower`] | a replica of the model on a device |
//! | 4 | [`store`] | where variables live and how they change |
//! | 4 | [`reduce`] | where gradients meet |
//! | 3 | [`device`] | slabs, programs and kernels on a CPU or GPU |
//! | 3 | [`model`] | the networks |
//! | 3 | [`data`] | data sets, augmentation, the input pipeline |
//! | 2 | [`graph`] | operations, gradients, programs |
//! | 2 | [`config`] | YAML, flags and their origins |
//! | 2 | [`io`] | file formats |
//! | 1 | [`tensor`], [`cluster`], [`optim`] | shapes, names, rules |
//! | 0 | [`util`] | clock, random numbers, statistics |

pub mod cli;
pub mod cluster;
pub mod config;
pub mod data;
pub mod device;
pub mod graph;
pub mod io;
pub mod model;
pub mod optim;
pub mod ps;
pub mod reduce;
pub mod rpc;
pub mod session;
pub mod store;
pub mod tensor;
pub mod tower;
pub mod train;
pub mod util;
