//! The CIFAR archives: where they are, and how they are unpacked.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};

use flate2::read::GzDecoder;

use super::{CifarSet, DataError, Digest};

/// A published archive.
#[derive(Clone, Copy, Debug)]
pub struct ArchiveInfo {
    /// Where it is published.
    pub url: &'static str,
    /// Its bytes.
    pub size: u64,
    /// Its fingerprint.
    pub digest: Digest<'static>,
    /// The files to unpack.
    pub members: &'static [&'static str],
}

impl ArchiveInfo {
    /// The archive of a data set, as <https://www.cs.toronto.edu/~kriz/cifar.html> lists it.
    pub fn of(set: CifarSet) -> Self {
        match set {
            CifarSet::Ten => Self {
                url: "http://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                size: 170_052_171,
                digest: Digest::Sha256(
                    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                ),
                members: &[
                    "cifar-10-batches-bin/batches.meta.txt",
                    "cifar-10-batches-bin/data_batch_1.bin",
                    "cifar-10-batches-bin/data_batch_2.bin",
                    "cifar-10-batches-bin/data_batch_3.bin",
                    "cifar-10-batches-bin/data_batch_4.bin",
                    "cifar-10-batches-bin/data_batch_5.bin",
                    "cifar-10-batches-bin/test_batch.bin",
                ],
            },
            CifarSet::Hundred => Self {
                url: "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                size: 168_513_733,
                digest: Digest::Md5("03b5dce01913d631647c71ecec9e9cb8"),
                members: &[
                    "cifar-100-binary/fine_label_names.txt",
                    "cifar-100-binary/train.bin",
                    "cifar-100-binary/test.bin",
                ],
            },
        }
    }

    /// The archive's file name.
    pub fn file_name(&self) -> &'static str {
        self.url.rsplit('/').next().unwrap_or(self.url)
    }
}

/// No member of the published archives is as large as this.
const MEMBER_LIMIT: u64 = 1 << 28;

/// Unpacks the `expected` members of a `.tar.gz` archive into `dir`.
///
/// Other plain files are skipped. Everything is written to a temporary folder in `dir` first, from
/// which the members' top folders are moved, so an interrupted or failed call leaves nothing that
/// looks complete.
///
/// # Errors
/// When a member's name is absolute or has `..` in it, is a link or device, comes twice, is too
/// large or missing, when a top folder exists already, or when something cannot be read or written.
pub fn unpack(archive: &Path, dir: &Path, expected: &[&str]) -> Result<(), DataError> {
    let tops: BTreeSet<&str> = expected.iter().filter_map(|m| m.split('/').next()).collect();
    if let Some(path) = tops.iter().map(|top| dir.join(top)).find(|path| path.exists()) {
        return Err(DataError::Exists { path });
    }
    let part = dir.join(".unpacking");
    let unwritable = |source| DataError::Write { path: part.clone(), source };
    remove(&part).and_then(|()| fs::create_dir_all(&part)).map_err(unwritable)?;
    let unpacked = extract(archive, &part, expected).and_then(|()| {
        tops.iter().try_for_each(|top| {
            let path = dir.join(top);
            fs::rename(part.join(top), &path).map_err(|source| DataError::Write { path, source })
        })
    });
    // What failed first matters more than whether it could be cleared away.
    let removed = remove(&part).map_err(unwritable);
    unpacked.and(removed)
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Writes the expected members below `to`.
fn extract(archive: &Path, to: &Path, expected: &[&str]) -> Result<(), DataError> {
    let unreadable = |source| DataError::Read { path: archive.to_owned(), source };
    let file = File::open(archive).map_err(unreadable)?;
    let mut tar = tar::Archive::new(GzDecoder::new(file));
    let mut missing: BTreeSet<&str> = expected.iter().copied().collect();
    for entry in tar.entries().map_err(unreadable)? {
        let mut entry = entry.map_err(unreadable)?;
        let member = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let refuse = |problem| {
            Err(DataError::Member { path: archive.to_owned(), member: member.clone(), problem })
        };
        let Some(name) = plain_name(&member) else {
            return refuse("has a name that leads out of the folder");
        };
        let kind = entry.header().entry_type();
        if kind.is_dir() || kind.is_pax_global_extensions() {
            continue;
        }
        if !kind.is_file() {
            return refuse("is not a plain file");
        }
        if !expected.contains(&name.as_str()) {
            continue;
        }
        if !missing.remove(name.as_str()) {
            return refuse("comes twice");
        }
        if entry.size() > MEMBER_LIMIT {
            return refuse("is larger than any member of the data set");
        }
        let path = to.join(&name);
        write_member(&mut entry, &path, unreadable)?;
    }
    match missing.first() {
        None => Ok(()),
        Some(member) => Err(DataError::Member {
            path: archive.to_owned(),
            member: (*member).to_owned(),
            problem: "is missing",
        }),
    }
}

fn write_member(
    entry: &mut impl io::Read,
    path: &Path,
    unreadable: impl Fn(io::Error) -> DataError,
) -> Result<(), DataError> {
    let unwritable = |source| DataError::Write { path: path.to_owned(), source };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(unwritable)?;
    }
    let mut file = File::create_new(path).map_err(unwritable)?;
    // In blocks of our own, to tell a damaged archive from a full disk.
    let mut buffer = vec![0; 1 << 16];
    loop {
        match entry.read(&mut buffer).map_err(&unreadable)? {
            0 => return file.sync_all().map_err(unwritable),
            n => io::Write::write_all(&mut file, &buffer[..n]).map_err(unwritable)?,
        }
    }
}

/// The name without `.` parts; `None` where it is absolute or goes up.
fn plain_name(member: &str) -> Option<String> {
    let mut name = PathBuf::new();
    for part in Path::new(member).components() {
        match part {
            Component::Normal(part) => name.push(part),
            Component::CurDir => {}
            _ => return None,
        }
    }
    name.to_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compression, write::GzEncoder};
    use tar::{EntryType, Header};

    const EXPECTED: [&str; 2] = ["set/a.bin", "set/b.bin"];

    type Member<'a> = (&'a str, EntryType, &'a [u8]);

    const A: Member<'static> = ("set/a.bin", EntryType::Regular, b"first");
    const B: Member<'static> = ("./set/b.bin", EntryType::Regular, b"second");

    /// Writes names as they are: the tar crate itself would refuse the hostile ones.
    fn archive(members: &[Member<'_>]) -> Vec<u8> {
        let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        for (name, kind, content) in members {
            let mut header = Header::new_ustar();
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(*kind);
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            if kind.is_symlink() || kind.is_hard_link() {
                header.set_link_name("/etc/passwd").unwrap();
            }
            header.set_cksum();
            tar.append(&header, *content).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap()
    }

    fn unpack_bytes(folder: &Path, bytes: &[u8]) -> Result<(), DataError> {
        let path = folder.join("set.tar.gz");
        fs::write(&path, bytes).unwrap();
        unpack(&path, &folder.join("data"), &EXPECTED)
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .map(|entries| entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect())
            .unwrap_or_default();
        names.sort();
        names
    }

    #[test]
    fn unpacks_the_expected_members_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let members = [
            ("set", EntryType::Directory, b"".as_slice()),
            A,
            ("set/readme.html", EntryType::Regular, b"skip me"),
            B,
        ];
        unpack_bytes(folder.path(), &archive(&members)).unwrap();
        let data = folder.path().join("data");
        assert_eq!(names(&data), ["set"]);
        assert_eq!(names(&data.join("set")), ["a.bin", "b.bin"]);
        assert_eq!(fs::read(data.join("set/a.bin")).unwrap(), b"first");
        assert_eq!(fs::read(data.join("set/b.bin")).unwrap(), b"second");

        let again = unpack_bytes(folder.path(), &archive(&members)).unwrap_err().to_string();
        assert!(again.contains("data/set already exists"), "{again}");
    }

    #[test]
    fn hostile_members_are_refused_and_leave_nothing() {
        let outside = "../outside";
        for (hostile, reason) in [
            ((outside, EntryType::Regular, b"x".as_slice()), "leads out"),
            (("set/../../outside", EntryType::Regular, b"x"), "leads out"),
            (("/tmp/outside", EntryType::Regular, b"x"), "leads out"),
            (("set/c.bin", EntryType::Symlink, b""), "not a plain file"),
            (("set/c.bin", EntryType::Link, b""), "not a plain file"),
            (("set/c.bin", EntryType::Fifo, b""), "not a plain file"),
            (("set/c.bin", EntryType::Char, b""), "not a plain file"),
            (A, "comes twice"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let bytes = archive(&[A, hostile, B]);
            let error = unpack_bytes(folder.path(), &bytes).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains(hostile.0), "{error}");
            assert_eq!(names(folder.path()), ["data", "set.tar.gz"]);
            assert_eq!(names(&folder.path().join("data")), [""; 0]);
        }
    }

    #[test]
    fn missing_members_and_damaged_archives_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let error = unpack_bytes(folder.path(), &archive(&[A])).unwrap_err().to_string();
        assert!(error.contains("\"set/b.bin\" is missing"), "{error}");

        let whole = archive(&[A, B]);
        for bytes in [&whole[..whole.len() / 2], b"not an archive", b""] {
            let error = unpack_bytes(folder.path(), bytes).unwrap_err().to_string();
            assert!(error.contains("set.tar.gz"), "{error}");
            assert_eq!(names(&folder.path().join("data")), [""; 0]);
        }
        unpack_bytes(folder.path(), &whole).unwrap();
    }

    #[test]
    fn a_member_that_claims_to_be_huge_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut header = Header::new_ustar();
        header.set_path("set/a.bin").unwrap();
        header.set_size(MEMBER_LIMIT + 1);
        header.set_cksum();
        let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
        io::Write::write_all(&mut gz, header.as_bytes()).unwrap();
        let error = unpack_bytes(folder.path(), &gz.finish().unwrap()).unwrap_err().to_string();
        assert!(error.contains("larger than any member"), "{error}");
    }

    #[test]
    fn published_archives_hold_the_files_that_are_loaded() {
        for set in [CifarSet::Ten, CifarSet::Hundred] {
            let info = ArchiveInfo::of(set);
            assert!(info.members.iter().all(|m| m.starts_with(set.folder())));
            assert!(
                info.file_name().starts_with("cifar-1") && info.file_name().ends_with(".tar.gz")
            );
        }
    }
}
