//! Files that appear whole or not at all.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::IoError;

/// Writes `path` so that a reader, or a run after a crash, sees the old content or the new one, never
/// a part: a temporary beside it is filled, synced and renamed over it, then the directory is synced.
///
/// # Errors
/// Where a step fails. The temporary is removed; before the rename the old content is untouched.
pub fn write_atomic(
    path: &Path,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), IoError> {
    let temporary = temporary_for(path)?;
    let written = File::create(&temporary).and_then(|mut file| {
        fill(&mut file)?;
        file.sync_all()
    });
    if let Err(source) = written.and_then(|()| fs::rename(&temporary, path)) {
        // The first error is the one to report; a temporary left behind is removed at the next open.
        let _ = fs::remove_file(&temporary);
        return Err(IoError::io(path, "write")(source));
    }
    let dir = match path.parent() {
        Some(dir) if dir != Path::new("") => dir,
        _ => Path::new("."),
    };
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(IoError::io(dir, "sync"))
}

/// `.<name>.tmp` in the same directory.
fn temporary_for(path: &Path) -> Result<PathBuf, IoError> {
    let name = path.file_name().ok_or_else(|| IoError::unwritable(path, "it names no file"))?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(".tmp");
    Ok(path.with_file_name(temporary))
}

/// The file that `name` is a temporary of, where it is one.
pub(crate) fn target_of_temporary(name: &str) -> Option<&str> {
    name.strip_prefix('.')?.strip_suffix(".tmp")
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn replaces_the_content_and_leaves_no_temporary() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        for content in ["one", "two"] {
            write_atomic(&path, |file| file.write_all(content.as_bytes())).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(names(dir.path()), ["a"]);
    }

    #[test]
    fn a_failed_write_leaves_the_old_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "old").unwrap();
        let error = write_atomic(&path, |file| {
            file.write_all(b"half")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        })
        .unwrap_err();
        assert!(error.to_string().starts_with("cannot write "), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(dir.path()), ["a"]);
    }

    #[test]
    fn a_failed_rename_leaves_no_temporary() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("a")).unwrap();
        assert!(write_atomic(&dir.path().join("a"), |_| Ok(())).is_err());
        assert_eq!(names(dir.path()), ["a"]);
    }

    #[test]
    fn a_path_without_a_name_is_refused() {
        let refused = write_atomic(Path::new("/"), |_| Ok(()));
        assert!(matches!(refused, Err(IoError::Unwritable { .. })));
    }

    #[test]
    fn temporaries_are_told_by_name() {
        let path = temporary_for(Path::new("d/checkpoint")).unwrap();
        assert_eq!(path, Path::new("d/.checkpoint.tmp"));
        assert_eq!(target_of_temporary(".checkpoint.tmp"), Some("checkpoint"));
        assert_eq!(target_of_temporary("checkpoint"), None);
    }
}
