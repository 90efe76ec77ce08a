//! The files a run reads and writes: records, event files, checkpoints, metrics and their directory.

use std::path::{Path, PathBuf};

mod atomic;
pub mod bundle;
pub mod checkpoint;
pub mod event;
mod metrics;
pub mod record;
mod trace;
mod train_dir;

pub use atomic::write_atomic;
pub use bundle::{Bundle, BundleData, BundleEntry, write_bundle};
pub use checkpoint::{CheckpointStore, Format, Retention, Snapshot};
pub use event::{EventKind, EventRecord, EventWriter, read_events};
pub use metrics::MetricsWriter;
pub use record::{RecordReader, RecordWriter};
pub use trace::{TRACE_FILE, write_trace};
pub use train_dir::{OpenMode, RUN_FILE, TrainDir};

/// What can go wrong with a file.
#[derive(Debug, thiserror::Error)]
pub enum IoError {
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried: `read`, `write`, ...
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The content is not what its format promises.
    #[error("{path} is damaged: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The first fault found.
        reason: String,
    },
    /// A record file ends within a record.
    #[error(
        "{path} ends within record {record} at byte {offset}: {needed} more bytes announced, {found} found"
    )]
    Truncated {
        /// The record file.
        path: PathBuf,
        /// The record's number, from 0.
        record: u64,
        /// Where the record begins.
        offset: u64,
        /// Bytes that should follow in the section that was being read.
        needed: u64,
        /// Bytes that did follow.
        found: u64,
    },
    /// A record is whole but wrong.
    #[error("record {record} at byte {offset} of {path} is damaged: {reason}")]
    BadRecord {
        /// The record file.
        path: PathBuf,
        /// The record's number, from 0.
        record: u64,
        /// Where the record begins.
        offset: u64,
        /// The fault.
        reason: String,
    },
    /// What was handed in cannot be written in this format.
    #[error("cannot write this to {path}: {reason}")]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// Another live run holds the directory.
    #[error(
        "{path} is in use by {}; stop it or choose another directory",
        .pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
    )]
    InUse {
        /// The directory.
        path: PathBuf,
        /// Who holds it, where it could be read.
        pid: Option<u32>,
    },
    /// The directory already holds a run.
    #[error(
        "{path} already holds a run; use --resume to go on with it or --overwrite to start anew"
    )]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// A directory was expected.
    #[error("{path} is not a directory; choose another path")]
    NotADirectory {
        /// What is there instead.
        path: PathBuf,
    },
    /// Checkpoints are there, but none of them can be read.
    #[error("none of the {tried} checkpoints in {path} can be read; the newest: {newest}")]
    NoneUsable {
        /// The directory.
        path: PathBuf,
        /// How many were tried.
        tried: usize,
        /// Why the newest cannot be read.
        newest: Box<IoError>,
    },
}

impl IoError {
    /// For `map_err`: wraps the system's error.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), action, source }
    }

    /// The content of `path` breaks its format.
    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.into() }
    }

    /// `path` cannot hold what was handed in.
    pub(crate) fn unwritable(path: &Path, reason: impl Into<String>) -> Self {
        Self::Unwritable { path: path.to_owned(), reason: reason.into() }
    }
}
