//! [`CheckpointStore`]: saves checkpoints and deletes old ones.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::latest::on_disk;
use super::snapshot::Snapshot;
use super::state::StateFile;
use super::{PREFIX, STATE_FILE, bundle_step_of, file_name, step_of};
use crate::io::IoError;
use crate::io::atomic::target_of_temporary;
use crate::io::bundle::remove_bundle;
use crate::util::clock::Clock;

/// Which checkpoints stay, by the rules of TensorFlow's `Saver`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Retention {
    /// How many of the newest are kept; 0 keeps all.
    pub newest: usize,
    /// One that falls out of the newest is still kept for good when it was saved after the hour mark,
    /// which then advances by so many hours. The first mark lies so many hours after the start.
    pub every_hours: Option<f64>,
}

impl Default for Retention {
    /// The five newest.
    fn default() -> Self {
        Self { newest: 5, every_hours: None }
    }
}

impl Retention {
    /// The length of the spans of which one checkpoint each stays for good, in seconds.
    fn span(&self) -> f64 {
        self.every_hours.map_or(f64::INFINITY, |hours| hours * 3600.0)
    }
}

/// What a checkpoint is written as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// One safetensors file.
    #[default]
    Safetensors,
    /// TensorFlow's bundle: `model.ckpt-7.index` and its data file.
    TensorFlow,
}

/// Saves the checkpoints of one run. The run should hold the directory's lock
/// ([`TrainDir`](crate::io::TrainDir)).
pub struct CheckpointStore {
    dir: PathBuf,
    retention: Retention,
    format: Format,
    clock: Arc<dyn Clock>,
    /// What the state file lists, oldest first: name and time of saving.
    kept: Vec<(String, f64)>,
    /// The hour mark less one span: the start, or the last mark that kept a checkpoint.
    last_preserved: f64,
}

impl fmt::Debug for CheckpointStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckpointStore")
            .field("dir", &self.dir)
            .field("retention", &self.retention)
            .field("kept", &self.kept)
            .finish_non_exhaustive()
    }
}

impl CheckpointStore {
    /// Goes on with the checkpoints of `dir` and removes what a killed run left half written. Where the
    /// state file is missing or damaged, the newest files of the directory are taken for listed.
    ///
    /// # Errors
    /// Where the directory cannot be listed or a left-over cannot be removed.
    pub fn open(dir: &Path, retention: Retention, clock: Arc<dyn Clock>) -> Result<Self, IoError> {
        remove_temporaries(dir)?;
        let now = clock.wall().as_secs_f64();
        let state = match StateFile::read(dir) {
            Ok(Some(state)) => state,
            Ok(None) | Err(_) => {
                let found = on_disk(dir)?;
                let unlisted = match retention.newest {
                    0 => 0,
                    n => found.len().saturating_sub(n),
                };
                let all = found.into_iter().skip(unlisted).map(|(_, name)| name).collect();
                StateFile { all, ..StateFile::default() }
            }
        };
        let times = state.timestamps.into_iter().map(Some).chain(std::iter::repeat(None));
        let kept = state
            .all
            .into_iter()
            .zip(times)
            // Only files of this program, in this directory, may ever be deleted.
            .filter(|(name, _)| step_of(name).or_else(|| bundle_step_of(name)).is_some())
            .map(|(name, time)| (name, time.unwrap_or(now)))
            .collect();
        let last_preserved = state.last_preserved.unwrap_or(now);
        let format = Format::default();
        Ok(Self { dir: dir.to_owned(), retention, format, clock, kept, last_preserved })
    }

    /// Writes further checkpoints in another format.
    #[must_use]
    pub fn with_format(mut self, format: Format) -> Self {
        self.format = format;
        self
    }

    /// Saves `snapshot`, then deletes what falls out of the retention. A checkpoint of the same step is
    /// replaced. Returns the file.
    ///
    /// # Errors
    /// Where the disk refuses or the snapshot uses reserved names. Earlier files are then untouched and
    /// still listed.
    pub fn save(&mut self, snapshot: &Snapshot) -> Result<PathBuf, IoError> {
        let name = match self.format {
            Format::Safetensors => file_name(snapshot.global_step),
            Format::TensorFlow => format!("{PREFIX}{}", snapshot.global_step),
        };
        let path = self.dir.join(&name);
        match self.format {
            Format::Safetensors => snapshot.save(&path)?,
            Format::TensorFlow => super::tensorflow::save(snapshot, &path)?,
        }

        let mut kept = self.kept.clone();
        kept.retain(|(other, _)| *other != name);
        kept.push((name.clone(), self.clock.wall().as_secs_f64()));
        let excess = match self.retention.newest {
            0 => 0,
            newest => kept.len().saturating_sub(newest),
        };
        let mut last_preserved = self.last_preserved;
        let mut dropped: Vec<String> = Vec::new();
        for (name, saved) in kept.drain(..excess) {
            if saved > last_preserved + self.retention.span() {
                last_preserved += self.retention.span();
            } else {
                dropped.push(name);
            }
        }
        self.state(&name, &kept, last_preserved).write(&self.dir)?;
        (self.kept, self.last_preserved) = (kept, last_preserved);

        // Last, so that the state file never lists what is gone.
        for name in dropped {
            let path = self.dir.join(&name);
            match step_of(&name) {
                Some(_) => remove(&path)?,
                None => remove_bundle(&path)?,
            }
        }
        Ok(path)
    }

    /// The times are written only where the rule of the hours needs them.
    fn state(&self, latest: &str, kept: &[(String, f64)], last_preserved: f64) -> StateFile {
        let all = kept.iter().map(|(name, _)| name.clone()).collect();
        let mut state = StateFile { latest: latest.to_owned(), all, ..StateFile::default() };
        if self.retention.every_hours.is_some() {
            state.timestamps = kept.iter().map(|&(_, time)| time).collect();
            state.last_preserved = Some(last_preserved);
        }
        state
    }
}

/// Removes a file that may be gone already.
fn remove(path: &Path) -> Result<(), IoError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(IoError::io(path, "remove")(error))
        }
        _ => Ok(()),
    }
}

/// Removes the temporaries of checkpoints and state files.
fn remove_temporaries(dir: &Path) -> Result<(), IoError> {
    for entry in fs::read_dir(dir).map_err(IoError::io(dir, "list"))? {
        let entry = entry.map_err(IoError::io(dir, "list"))?;
        let name = entry.file_name();
        let target = name.to_str().and_then(target_of_temporary);
        let of_checkpoint = |name: &str| step_of(name).or_else(|| bundle_step_of(name)).is_some();
        if target.is_some_and(|target| target == STATE_FILE || of_checkpoint(target)) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
