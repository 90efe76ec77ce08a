//! Names of tasks and devices; no sockets.

mod device_name;

pub use device_name::{DeviceKind, DeviceName, DeviceNameError};
