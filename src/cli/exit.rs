//! What each kind of failure means to whoever called the program.

use std::io::ErrorKind;
use std::process::ExitCode;

use super::output;
use crate::cluster::ClusterError;
use crate::config::ConfigError;
use crate::data::DataError;
use crate::device::DeviceError;
use crate::graph::GraphError;
use crate::io::IoError;
use crate::reduce::ReduceError;
use crate::rpc::RpcError;
use crate::session::{Code, GraphFileError, OpError};
use crate::store::StoreError;
use crate::tower::TowerError;
use crate::train::{Diverged, NotFinite};

/// Usage or configuration.
pub(super) const USAGE: u8 = 2;
/// A reader of our output went away, as the shell reports it.
const BROKEN_PIPE: u8 = 141;

/// A mistake in what was asked, found after the flags were parsed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Usage(pub(super) String);

/// A run that was asked to go on as another one. Exit code 8.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refused(pub(super) String);

/// Prints the chain of causes once, on one line, and picks the exit code.
pub(super) fn fail(error: &anyhow::Error) -> ExitCode {
    let code = code(error);
    if code != BROKEN_PIPE {
        output::note(&format!("error: {}", chain(error)));
    }
    ExitCode::from(code)
}

/// The causes, outermost first, without those that the one before has told already.
pub(super) fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text += &format!(": {cause}");
        }
    }
    text
}

pub(super) fn code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if cause.is::<ConfigError>()
            || cause.is::<ClusterError>()
            || cause.is::<Usage>()
            || cause.is::<GraphError>()
            || cause.is::<GraphFileError>()
        {
            return USAGE;
        }
        if cause.is::<Refused>() {
            return 8;
        }
        if cause.is::<DataError>() {
            return 3;
        }
        if let Some(error) = cause.downcast_ref::<OpError>() {
            return match error.code {
                Code::Unavailable => 5,
                Code::InvalidArgument | Code::Unimplemented | Code::NotFound => USAGE,
                _ => 1,
            };
        }
        if cause.is::<Diverged>() || cause.is::<NotFinite>() {
            return 6;
        }
        match cause.downcast_ref::<IoError>() {
            Some(IoError::Exists { .. }) => return USAGE,
            Some(_) => return 7,
            None => {}
        }
        if let Some(ReduceError::PeerLost { .. } | ReduceError::Length { .. }) =
            cause.downcast_ref()
        {
            return 5;
        }
        if let Some(error) = cause.downcast_ref::<RpcError>() {
            return error.code();
        }
        match cause.downcast_ref::<StoreError>() {
            Some(StoreError::Missing { .. } | StoreError::Shape { .. }) => return 8,
            Some(StoreError::Device(_)) => return 9,
            Some(StoreError::Poisoned) => return 1,
            Some(StoreError::Remote(_)) => continue,
            None => {}
        }
        match cause.downcast_ref::<TowerError>() {
            Some(TowerError::Device(_)) => return 9,
            Some(TowerError::Remote(_)) => continue,
            None => {}
        }
        if cause.is::<DeviceError>() {
            return 9;
        }
        match cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind) {
            Some(ErrorKind::BrokenPipe) => return BROKEN_PIPE,
            Some(_) => return 7,
            None => {}
        }
    }
    1
}
