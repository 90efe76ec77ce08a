//! [`RpcError`]: what can go wrong between tasks, and how it travels.

use tonic::{Code, Status};

use crate::cluster::TaskId;
use crate::ps::PsError;

/// What can go wrong between tasks. Every variant names the task.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RpcError {
    /// A peer never came, exit code 4, or did not come back, exit code 5.
    #[error(
        "{} did not come {}within {waited_secs:.0} s: {last}; start it, or raise --rendezvous-timeout",
        list(missing), if *again { "back " } else { "" }
    )]
    Missing {
        /// Who.
        missing: Vec<(TaskId, String)>,
        /// Whether it was there before.
        again: bool,
        /// How long it was waited for.
        waited_secs: f64,
        /// The last error of the first of them.
        last: String,
    },
    /// A peer that was there is gone. Exit code 5.
    #[error("lost {task} at {address}: {reason}")]
    Lost {
        /// Who.
        task: TaskId,
        /// Where it was.
        address: String,
        /// How it showed.
        reason: String,
    },
    /// A peer does not agree. Exit code 8.
    #[error("{task} refuses: {reason}")]
    Refused {
        /// Who.
        task: TaskId,
        /// The differing key and both values.
        reason: String,
    },
    /// Another task failed and everybody stops; its exit code is theirs.
    #[error("{task} stopped the run: {reason}")]
    Stopped {
        /// Who failed.
        task: String,
        /// Its own words.
        reason: String,
        /// Its exit code.
        code: u8,
    },
    /// The own address cannot be listened on. Exit code 2.
    #[error("{task} cannot listen on {address}: {reason}")]
    Listen {
        /// This task.
        task: TaskId,
        /// The address.
        address: String,
        /// The system's words.
        reason: String,
    },
    /// Others could reach a task that asks them for nothing. Exit code 8.
    #[error(
        "{task} would be open to everybody who reaches {address}: give all tasks the same --token-file or TFTRAIN_TOKEN, or \
         certificates by --tls-ca, --tls-cert and --tls-key (see `tftrain certs`)"
    )]
    Exposed {
        /// This task.
        task: TaskId,
        /// Its address, which is not loopback.
        address: String,
    },
    /// A token or certificates that are none. Exit code 2.
    #[error("{0}")]
    Credentials(String),
    /// The runtime cannot be started.
    #[error("cannot start the network threads: {0}")]
    Runtime(String),
    /// A peer answered what no peer of this version does.
    #[error("{task} answered nonsense: {reason}")]
    Protocol {
        /// Who.
        task: TaskId,
        /// What.
        reason: String,
    },
}

fn list(missing: &[(TaskId, String)]) -> String {
    let names: Vec<String> =
        missing.iter().map(|(task, address)| format!("{task} ({address})")).collect();
    names.join(", ")
}

/// Separates the failed task, the exit code and the reason in a status that stops a run.
const SEPARATOR: char = '\u{1f}';

/// The status that tells a waiting peer that the run is over.
pub(super) fn stopped(task: &str, code: u8, reason: &str) -> Status {
    Status::aborted(format!("{task}{SEPARATOR}{code}{SEPARATOR}{reason}"))
}

impl RpcError {
    /// What a peer's status means to the caller.
    pub(super) fn from_status(task: &TaskId, address: &str, status: &Status) -> Self {
        let (task, reason) = (task.clone(), status.message().to_owned());
        match status.code() {
            Code::FailedPrecondition | Code::AlreadyExists | Code::Unauthenticated => {
                Self::Refused { task, reason }
            }
            Code::InvalidArgument | Code::Unimplemented | Code::OutOfRange => {
                Self::Protocol { task, reason }
            }
            Code::Aborted => {
                let mut parts = reason.splitn(3, SEPARATOR);
                match (parts.next(), parts.next().and_then(|c| c.parse().ok()), parts.next()) {
                    (Some(who), Some(code), Some(reason)) => {
                        Self::Stopped { task: who.to_owned(), reason: reason.to_owned(), code }
                    }
                    _ => Self::Protocol { task, reason },
                }
            }
            _ => Self::Lost { task, address: address.to_owned(), reason },
        }
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        match self {
            Self::Listen { .. } | Self::Credentials(_) => 2,
            Self::Missing { again: false, .. } => 4,
            Self::Missing { again: true, .. } | Self::Lost { .. } | Self::Protocol { .. } => 5,
            Self::Refused { .. } | Self::Exposed { .. } => 8,
            Self::Stopped { code, .. } => *code,
            Self::Runtime(_) => 1,
        }
    }
}

/// What a shard's refusal is on the wire.
pub(super) fn refusal(error: PsError) -> Status {
    let text = error.to_string();
    match error {
        PsError::Initialized { .. } => Status::already_exists(text),
        PsError::Empty | PsError::Incarnation { .. } => Status::unavailable(text),
        PsError::Length { .. } | PsError::Missing { .. } | PsError::Mode { .. } => {
            Status::failed_precondition(text)
        }
        PsError::Stranger { .. } => Status::permission_denied(text),
        PsError::Device(_) => Status::internal(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_travels_with_its_code() {
        let task: TaskId = "ps:0".parse().unwrap();
        let status = stopped("worker:2", 6, "model diverged with loss = NaN");
        match RpcError::from_status(&task, "a:1", &status) {
            RpcError::Stopped { task, reason, code } => {
                assert_eq!((task.as_str(), code), ("worker:2", 6));
                assert_eq!(reason, "model diverged with loss = NaN");
            }
            other => panic!("{other}"),
        }
        let lost = RpcError::from_status(&task, "a:1", &Status::unavailable("broken pipe"));
        assert_eq!(lost.to_string(), "lost ps:0 at a:1: broken pipe");
        assert_eq!(lost.code(), 5);
    }
}
