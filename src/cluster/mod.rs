//! Names of tasks and devices, and who is where in a cluster; no sockets, no reading of the
//! environment (callers hand in a lookup).
//!
//! # Layout
//! [`TaskId`] and [`ClusterSpec`] name the tasks and what their jobs are for, [`find`] reads places
//! from environment variables, [`Place`] joins flags, file and environment.

mod address;
mod claim;
mod device_name;
mod env;
mod error;
mod launcher;
mod nodelist;
mod place;
mod role;
mod spec;
mod task_id;
mod tf_config;

pub use device_name::{DeviceKind, DeviceName, DeviceNameError};
pub use env::{Found, Lookup, find};
pub use error::ClusterError;
pub use nodelist::expand_nodelist;
pub use place::{Place, PlaceFlags};
pub use role::{CLIENT, EVALUATOR};
pub use spec::ClusterSpec;
pub use task_id::TaskId;
