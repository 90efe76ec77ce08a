//! [`DataError`]: what can go wrong between a data set and a batch.

use std::io;
use std::path::PathBuf;

/// What went wrong with the input, and what to do about it. Records are counted from 0.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file of the data set is not there.
    #[error("failed to find file: {path} (its folder holds {there}); download the data set again or correct the data folder", path = path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// What its folder holds instead, as people read it.
        there: String,
    },
    /// A file or folder could not be read.
    #[error("cannot read {path}: {source}; check that it is a plain file you may read", path = path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file or folder could not be written.
    #[error("cannot write {path}: {source}; check the folder's permissions and free space", path = path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file of the data set holds no record.
    #[error("{path} is empty; download the data set again", path = path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A file of the data set ends inside a record.
    #[error("{path}: record {record} is cut short: {over} bytes are left over where a record takes {record_len}; download the data set again", path = path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The incomplete record.
        record: u64,
        /// The bytes after the last complete record.
        over: u64,
        /// The bytes of a complete record.
        record_len: usize,
    },
    /// A file of the data set holds more than the data set's files do.
    #[error("{path}: {over} bytes follow record {last}, the last one of such a file; download the data set again", path = path.display(), last = records.saturating_sub(1))]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The records that such a file holds.
        records: u64,
        /// The bytes after those records.
        over: u64,
    },
    /// A record's label names no class.
    #[error("{path}: record {record} has label {label}, but labels are 0 to {max}; download the data set again", path = path.display())]
    Label {
        /// The file.
        path: PathBuf,
        /// The record in that file.
        record: usize,
        /// Its label.
        label: u8,
        /// The largest label.
        max: usize,
    },
    /// There are not enough examples for one batch.
    #[error(
        "{source_name} has {examples} examples, fewer than the {batch} of one batch; use a smaller batch or more examples"
    )]
    TooFew {
        /// The set of examples.
        source_name: String,
        /// How many it has.
        examples: usize,
        /// How many a batch takes.
        batch: usize,
    },
    /// A number that the pipeline cannot work with.
    #[error("the input pipeline cannot work with {setting} = {value}; it must be {need}")]
    Spec {
        /// The field of the specification.
        setting: &'static str,
        /// Its value.
        value: u64,
        /// What would do.
        need: &'static str,
    },
    /// A thread of the pipeline could not be started.
    #[error("cannot start an input thread: {0}; use fewer threads")]
    Spawn(io::Error),
    /// A thread of the pipeline panicked.
    #[error(
        "the input thread that makes batch {batch} of {source_name} stopped: {message}; this is a bug in the data source"
    )]
    Worker {
        /// The set of examples.
        source_name: String,
        /// The batch, counted from 0 since the pipeline started.
        batch: u64,
        /// The panic's message.
        message: String,
    },
    /// A file could not be downloaded.
    #[error(
        "cannot download {url}: {problem}; check the network, or train without the data set with `--synthetic`"
    )]
    Download {
        /// The address.
        url: String,
        /// What happened.
        problem: String,
    },
    /// A downloaded file is not as long as it should be.
    #[error(
        "{url} has {got} bytes instead of the expected {expected}; the file was changed at its source or on the way, try again or train with `--synthetic`"
    )]
    Size {
        /// The address.
        url: String,
        /// The bytes that the file should have.
        expected: u64,
        /// The bytes that it has, or that had come when it proved too long.
        got: u64,
    },
    /// A downloaded file is not the one that is expected.
    #[error(
        "{url} has digest {got} instead of the expected {expected}; the file was changed at its source or on the way, try again or train with `--synthetic`"
    )]
    Digest {
        /// The address.
        url: String,
        /// The digest that the file should have, in hex.
        expected: String,
        /// The digest that it has, in hex.
        got: String,
    },
    /// A PNG or JPEG file cannot be decoded.
    #[error("cannot decode the picture {path}: {reason}; it must be a PNG or JPEG file", path = path.display())]
    Picture {
        /// The file.
        path: PathBuf,
        /// The decoder's words.
        reason: String,
    },
    /// An archive holds something that must not or cannot be unpacked.
    #[error("{path}: member {member:?} {problem}; delete the archive and download it again", path = path.display())]
    Member {
        /// The archive.
        path: PathBuf,
        /// The member's name.
        member: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The place where an archive would be unpacked is taken.
    #[error("{path} already exists; move it away to unpack the archive there", path = path.display())]
    Exists {
        /// The file or folder in the way.
        path: PathBuf,
    },
}
