//! Finding the newest checkpoint of a directory that can be read.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::snapshot::{Snapshot, load};
use super::state::StateFile;
use super::{bundle_prefix, bundle_step_of, step_of};
use crate::io::IoError;

/// The newest checkpoint of `dir` that is there, by the state file; where that is missing or damaged, by
/// the step in the name. The content is not checked.
///
/// # Errors
/// Where `dir` cannot be listed.
pub fn latest(dir: &Path) -> Result<Option<PathBuf>, IoError> {
    let (candidates, _) = candidates(dir)?;
    Ok(candidates.into_iter().find(|path| path.is_file() || bundle_prefix(path).is_some()))
}

/// Loads the newest checkpoint of `dir` that is whole. Beside it come the files that were skipped, newest
/// first, and why. `None` where the directory holds no checkpoint at all.
///
/// # Errors
/// Where `dir` cannot be listed, and [`IoError::NoneUsable`] where there are checkpoints but none can be
/// read: to start anew then would throw a run away unasked.
#[expect(clippy::type_complexity, reason = "three parts that are taken apart at once")]
pub fn load_latest(
    dir: &Path,
) -> Result<Option<(PathBuf, Snapshot, Vec<(PathBuf, IoError)>)>, IoError> {
    let (candidates, state_fault) = candidates(dir)?;
    let tried = candidates.len();
    let mut skipped: Vec<_> =
        state_fault.into_iter().map(|error| (dir.join(super::STATE_FILE), error)).collect();
    let state_faults = skipped.len();
    for path in candidates {
        match load(&path) {
            Ok(snapshot) => return Ok(Some((path, snapshot, skipped))),
            Err(error) => skipped.push((path, error)),
        }
    }
    match skipped.into_iter().nth(state_faults) {
        None => Ok(None),
        Some((_, newest)) => {
            Err(IoError::NoneUsable { path: dir.to_owned(), tried, newest: Box::new(newest) })
        }
    }
}

/// The checkpoints to try, best first: those of the state file from the newest on, then those that only
/// the directory knows, by step. Beside them, why the state file could not be used.
fn candidates(dir: &Path) -> Result<(Vec<PathBuf>, Option<IoError>), IoError> {
    let (state, fault) = match StateFile::read(dir) {
        Ok(state) => (state.unwrap_or_default(), None),
        Err(error) => (StateFile::default(), Some(error)),
    };
    let named = std::iter::once(state.latest).filter(|name| !name.is_empty());
    let listed = named.chain(state.all.into_iter().rev());
    let on_disk = on_disk(dir)?.into_iter().rev().map(|(_, name)| name);
    let mut seen = HashSet::new();
    let paths = listed.chain(on_disk).map(|name| dir.join(name));
    Ok((paths.filter(|path| seen.insert(path.clone())).collect(), fault))
}

/// Steps and names of all checkpoints in the directory, by step.
pub(crate) fn on_disk(dir: &Path) -> Result<Vec<(u64, String)>, IoError> {
    let entries = fs::read_dir(dir).map_err(IoError::io(dir, "list"))?;
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.map_err(IoError::io(dir, "list"))?.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Some(step) = step_of(name) {
            found.push((step, name.to_owned()));
        } else if let Some(prefix) = name.strip_suffix(".index") {
            found.extend(bundle_step_of(prefix).map(|step| (step, prefix.to_owned())));
        }
    }
    found.sort_unstable();
    Ok(found)
}
