//! [`TrainDir`]: the directory of one run, held by one process at a time.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::atomic::target_of_temporary;
use super::checkpoint::{PREFIX, STATE_FILE, bundle_step_of, step_of};
use super::{IoError, MetricsWriter};

/// The file that is locked; it holds the process id and stays when the run ends.
const LOCK_FILE: &str = ".lock";

/// What to do with a run that the directory holds already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Refuse.
    New,
    /// Go on with it. Without a checkpoint the caller starts anew.
    Resume,
    /// Make room for a new one, by [`TrainDir::clear`] as soon as that is sure to start.
    Overwrite,
}

/// A directory that no other run can open while this value lives.
#[derive(Debug)]
pub struct TrainDir {
    path: PathBuf,
    /// The lock goes with the file's last handle, also when the process is killed.
    _lock: File,
}

impl TrainDir {
    /// Creates the directory where needed, locks it, and refuses an earlier run with [`OpenMode::New`].
    ///
    /// # Errors
    /// [`IoError::NotADirectory`], [`IoError::InUse`], [`IoError::Exists`] (only with [`OpenMode::New`]),
    /// and [`IoError::Io`] where the directory cannot be created or written.
    pub fn open(path: &Path, mode: OpenMode) -> Result<Self, IoError> {
        if fs::metadata(path).is_ok_and(|found| !found.is_dir()) {
            return Err(IoError::NotADirectory { path: path.to_owned() });
        }
        fs::create_dir_all(path).map_err(IoError::io(path, "create directory"))?;
        let lock = lock(path)?;
        match mode {
            OpenMode::New if any_file(path, tells_of_a_run)? => {
                return Err(IoError::Exists { path: path.to_owned() });
            }
            OpenMode::New | OpenMode::Resume | OpenMode::Overwrite => {}
        }
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// Removes the files of an earlier run: only those this program writes, never a directory.
    ///
    /// # Errors
    /// Where the directory cannot be listed or a file cannot be removed.
    pub fn clear(&self) -> Result<(), IoError> {
        remove_run(&self.path)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Takes the lock and writes the process id.
fn lock(dir: &Path) -> Result<File, IoError> {
    let path = dir.join(LOCK_FILE);
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(IoError::io(&path, "open"))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(IoError::InUse { path: dir.to_owned(), pid: read_pid(&file) });
        }
        Err(TryLockError::Error(source)) => return Err(IoError::io(&path, "lock")(source)),
    }
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(IoError::io(&path, "write"))?;
    Ok(file)
}

/// The id in a lock file; `None` where its holder has not written it yet.
fn read_pid(file: &File) -> Option<u32> {
    let mut text = String::new();
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim_end().parse().ok()
}

/// The file of a run that holds its resolved configuration.
pub const RUN_FILE: &str = "run.yaml";

/// Names that only a directory with a run in it holds.
fn tells_of_a_run(name: &str) -> bool {
    name.starts_with(PREFIX) || is_ours(name)
}

/// Names of files that this program writes.
fn is_ours(name: &str) -> bool {
    let name = target_of_temporary(name).unwrap_or(name);
    [STATE_FILE, MetricsWriter::FILE_NAME, RUN_FILE].contains(&name)
        || name.starts_with("events.out.tfevents.")
        || step_of(name).or_else(|| bundle_step_of(name)).is_some()
}

/// Whether the directory holds an entry of such a name.
fn any_file(dir: &Path, wanted: fn(&str) -> bool) -> Result<bool, IoError> {
    for entry in fs::read_dir(dir).map_err(IoError::io(dir, "list"))? {
        let name = entry.map_err(IoError::io(dir, "list"))?.file_name();
        if name.to_str().is_some_and(wanted) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Removes the files of an earlier run.
fn remove_run(dir: &Path) -> Result<(), IoError> {
    for entry in fs::read_dir(dir).map_err(IoError::io(dir, "list"))? {
        let entry = entry.map_err(IoError::io(dir, "list"))?;
        let path = entry.path();
        // The type of the entry itself: a link is removed, not what it leads to.
        let kind = entry.file_type().map_err(IoError::io(&path, "inspect"))?;
        if !kind.is_dir() && entry.file_name().to_str().is_some_and(is_ours) {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(IoError::io(&path, "remove")(error));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: [&str; 6] = [
        "checkpoint",
        "model.ckpt-12.safetensors",
        "events.out.tfevents.1700000000.host",
        "metrics.jsonl",
        "run.yaml",
        ".model.ckpt-13.safetensors.tmp",
    ];

    fn fill(dir: &Path, names: &[&str]) {
        names.iter().for_each(|name| fs::write(dir.join(name), "x").unwrap());
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_directory_is_created_and_locked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let held = TrainDir::open(&path, OpenMode::New).unwrap();
        assert_eq!(held.path(), path);
        for mode in [OpenMode::New, OpenMode::Resume, OpenMode::Overwrite] {
            let error = TrainDir::open(&path, mode).unwrap_err();
            assert!(
                matches!(error, IoError::InUse { pid: Some(pid), .. } if pid == std::process::id())
            );
            let pid = format!("in use by process {}", std::process::id());
            assert!(error.to_string().contains(&pid), "{error}");
        }
        drop(held);
        TrainDir::open(&path, OpenMode::New).unwrap();
    }

    #[test]
    fn a_lock_without_a_pid_is_still_a_lock() {
        let dir = tempfile::tempdir().unwrap();
        for content in ["", "soon", "99999999999999999999"] {
            let path = dir.path().join(LOCK_FILE);
            fs::write(&path, content).unwrap();
            let holder = File::options().write(true).open(&path).unwrap();
            holder.try_lock().unwrap();
            let error = TrainDir::open(dir.path(), OpenMode::New).unwrap_err();
            assert!(matches!(error, IoError::InUse { pid: None, .. }), "{error}");
            assert!(error.to_string().contains("another process"), "{error}");
        }
        // A stale file, longer than the new id, is no lock.
        fs::write(dir.path().join(LOCK_FILE), "9".repeat(40)).unwrap();
        let _held = TrainDir::open(dir.path(), OpenMode::New).unwrap();
        let pid = fs::read_to_string(dir.path().join(LOCK_FILE)).unwrap();
        assert_eq!(pid, format!("{}\n", std::process::id()));
    }

    #[test]
    fn a_new_run_does_not_touch_an_old_one() {
        for name in
            ["checkpoint", "metrics.jsonl", "model.ckpt-5.safetensors", "model.ckpt-5.indices"]
        {
            let dir = tempfile::tempdir().unwrap();
            fill(dir.path(), &[name]);
            let error = TrainDir::open(dir.path(), OpenMode::New).unwrap_err();
            assert!(matches!(error, IoError::Exists { .. }), "{error}");
            assert!(
                error.to_string().contains("--resume") && error.to_string().contains("--overwrite")
            );
            TrainDir::open(dir.path(), OpenMode::Resume).unwrap();
            assert!(dir.path().join(name).exists());
        }
        let dir = tempfile::tempdir().unwrap();
        fill(dir.path(), &["notes.txt"]);
        TrainDir::open(dir.path(), OpenMode::New).unwrap();
        TrainDir::open(dir.path(), OpenMode::Resume).unwrap();
    }

    #[test]
    fn overwriting_removes_only_our_files() {
        let dir = tempfile::tempdir().unwrap();
        fill(dir.path(), &OURS);
        let foreign = ["model.ckpt-5.indices", "model.ckpt-x.safetensors", "notes.txt", "a.tmp"];
        fill(dir.path(), &foreign);
        let inner = dir.path().join("events.out.tfevents.dir");
        fs::create_dir(&inner).unwrap();
        fill(&inner, &["checkpoint"]);
        TrainDir::open(dir.path(), OpenMode::Overwrite).unwrap().clear().unwrap();
        let mut left = vec![".lock", "a.tmp", "events.out.tfevents.dir"];
        left.extend(&foreign[..3]);
        assert_eq!(names(dir.path()), left);
        assert_eq!(names(&inner), ["checkpoint"]);
    }

    #[test]
    #[cfg(unix)]
    fn overwriting_removes_a_link_not_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let target = tempfile::tempdir().unwrap();
        fill(target.path(), &["metrics.jsonl"]);
        std::os::unix::fs::symlink(target.path(), dir.path().join("checkpoint")).unwrap();
        TrainDir::open(dir.path(), OpenMode::Overwrite).unwrap().clear().unwrap();
        assert_eq!(names(dir.path()), [".lock"]);
        assert_eq!(names(target.path()), ["metrics.jsonl"]);
    }

    #[test]
    fn a_file_in_the_way_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = TrainDir::open(&file, OpenMode::Overwrite).unwrap_err();
        assert!(matches!(error, IoError::NotADirectory { .. }), "{error}");
        let error = TrainDir::open(&file.join("run"), OpenMode::New).unwrap_err();
        assert!(error.to_string().starts_with("cannot create directory "), "{error}");
        assert_eq!(fs::read(&file).unwrap(), b"");
    }

    #[test]
    fn a_lock_that_cannot_be_written_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(LOCK_FILE)).unwrap();
        let error = TrainDir::open(dir.path(), OpenMode::New).unwrap_err();
        assert!(matches!(error, IoError::Io { action: "open", .. }), "{error}");
    }
}
