//! Reads CIFAR-10 and CIFAR-100 in their binary layout (<https://www.cs.toronto.edu/~kriz/cifar.html>).

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::{DataError, Pictures};

/// One of the two data sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CifarSet {
    /// CIFAR-10: ten classes.
    Ten,
    /// CIFAR-100: a hundred classes, the "fine" labels.
    Hundred,
}

/// Which part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The pictures to learn from.
    Train,
    /// The pictures held out to measure on.
    Test,
}

const TEN_CLASSES: [&str; 10] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

/// Larger files of class names are not read.
const NAMES_LIMIT: u64 = 1 << 16;

impl CifarSet {
    /// The name of the data set.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ten => "cifar10",
            Self::Hundred => "cifar100",
        }
    }

    /// The folder that the data set's archive unpacks to.
    pub fn folder(self) -> &'static str {
        match self {
            Self::Ten => "cifar-10-batches-bin",
            Self::Hundred => "cifar-100-binary",
        }
    }

    fn files(self, split: Split) -> &'static [&'static str] {
        match (self, split) {
            (Self::Ten, Split::Train) => &[
                "data_batch_1.bin",
                "data_batch_2.bin",
                "data_batch_3.bin",
                "data_batch_4.bin",
                "data_batch_5.bin",
            ],
            (Self::Ten, Split::Test) => &["test_batch.bin"],
            (Self::Hundred, Split::Train) => &["train.bin"],
            (Self::Hundred, Split::Test) => &["test.bin"],
        }
    }

    /// The records of each of the files.
    fn records(self, split: Split) -> u64 {
        match (self, split) {
            (Self::Hundred, Split::Train) => 50_000,
            _ => 10_000,
        }
    }

    fn classes(self) -> usize {
        match self {
            Self::Ten => 10,
            Self::Hundred => 100,
        }
    }

    /// CIFAR-100 has the coarse label before the fine one.
    fn label_at(self) -> usize {
        match self {
            Self::Ten => 0,
            Self::Hundred => 1,
        }
    }

    fn names_file(self) -> &'static str {
        match self {
            Self::Ten => "batches.meta.txt",
            Self::Hundred => "fine_label_names.txt",
        }
    }
}

/// Reads a split from `dir`, which is the data set's folder or the one around it.
///
/// Files with fewer records than the published ones are fine.
///
/// # Errors
/// Names the file, and the record where there is one: a file is missing, empty, cut short or too
/// long, or a label is out of range.
pub fn load(set: CifarSet, dir: &Path, split: Split) -> Result<Pictures, DataError> {
    let dir = find_folder(set, dir, split);
    let record_len = Pictures::record_len(set.label_at());
    let files: Vec<(PathBuf, usize)> = set
        .files(split)
        .iter()
        .map(|name| {
            let path = dir.join(name);
            checked_len(&path, record_len, set.records(split)).map(|len| (path, len))
        })
        .collect::<Result<_, _>>()?;

    let mut records = vec![0; files.iter().map(|(_, len)| len).sum()];
    let mut rest = records.as_mut_slice();
    let mut parts = Vec::with_capacity(files.len());
    for (path, len) in &files {
        let (part, after) = rest.split_at_mut(*len);
        parts.push((path, part));
        rest = after;
    }
    parts.into_par_iter().try_for_each(|(path, part)| read_records(path, part, set))?;
    Ok(Pictures::new(set.name(), records, set.label_at(), class_names(set, &dir)))
}

/// Reads one file of records, wherever it lies; at most as many as the published files hold.
///
/// # Errors
/// As for [`load`].
pub fn load_file(set: CifarSet, path: &Path) -> Result<Pictures, DataError> {
    let most = set.records(Split::Train);
    let mut records = vec![0; checked_len(path, Pictures::record_len(set.label_at()), most)?];
    read_records(path, &mut records, set)?;
    let dir = path.parent().unwrap_or(Path::new("."));
    Ok(Pictures::new(set.name(), records, set.label_at(), class_names(set, dir)))
}

/// `dir` itself where it holds a file of the split, else the set's folder in it where there is one.
fn find_folder(set: CifarSet, dir: &Path, split: Split) -> PathBuf {
    let inner = dir.join(set.folder());
    let here = set.files(split).iter().any(|name| dir.join(name).exists());
    if !here && inner.is_dir() { inner } else { dir.to_owned() }
}

/// The length of a file of whole records.
fn checked_len(path: &Path, record_len: usize, most: u64) -> Result<usize, DataError> {
    let path = path.to_owned();
    let len = match fs::metadata(&path) {
        Ok(data) if data.is_file() => data.len(),
        Ok(_) => {
            let source = std::io::Error::other("it is not a plain file");
            return Err(DataError::Read { path, source });
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let there = listing(path.parent().unwrap_or(Path::new(".")));
            return Err(DataError::Missing { path, there });
        }
        Err(source) => return Err(DataError::Read { path, source }),
    };
    let bytes = record_len as u64;
    if len == 0 {
        Err(DataError::Empty { path })
    } else if len > most * bytes {
        Err(DataError::TooLong { path, records: most, over: len - most * bytes })
    } else if len % bytes != 0 {
        Err(DataError::Truncated { path, record: len / bytes, over: len % bytes, record_len })
    } else {
        Ok(len as usize)
    }
}

/// The names in a folder, as people read them.
fn listing(dir: &Path) -> String {
    const SHOWN: usize = 12;
    let Ok(entries) = fs::read_dir(dir) else {
        return "nothing: there is no such folder".to_owned();
    };
    let mut names: Vec<String> =
        entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    match names.len() {
        0 => "nothing".to_owned(),
        n if n > SHOWN => format!("{} and {} more", names[..SHOWN].join(", "), n - SHOWN),
        _ => names.join(", "),
    }
}

/// Fills `records` from a file and checks their labels.
fn read_records(path: &Path, records: &mut [u8], set: CifarSet) -> Result<(), DataError> {
    File::open(path)
        .and_then(|mut file| file.read_exact(records))
        .map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    check_labels(path, records, set)
}

fn check_labels(path: &Path, records: &[u8], set: CifarSet) -> Result<(), DataError> {
    let labels = records.chunks_exact(Pictures::record_len(set.label_at()));
    for (record, label) in labels.map(|r| r[set.label_at()]).enumerate() {
        if usize::from(label) >= set.classes() {
            let max = set.classes() - 1;
            return Err(DataError::Label { path: path.to_owned(), record, label, max });
        }
    }
    Ok(())
}

/// The names in the folder's list, or the standard ones where it is missing or malformed.
fn class_names(set: CifarSet, dir: &Path) -> Vec<String> {
    listed_names(&dir.join(set.names_file()), set.classes()).unwrap_or_else(|| match set {
        CifarSet::Ten => TEN_CLASSES.map(str::to_owned).to_vec(),
        CifarSet::Hundred => (0..set.classes()).map(|i| format!("class_{i}")).collect(),
    })
}

/// One printable name a line, blank lines apart; `None` unless there are exactly `count` different ones.
fn listed_names(path: &Path, count: usize) -> Option<Vec<String>> {
    let data = fs::metadata(path).ok()?;
    if !data.is_file() || data.len() > NAMES_LIMIT {
        return None;
    }
    let text = fs::read_to_string(path).ok()?;
    let names: Vec<String> =
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
    let printable = |name: &String| !name.chars().any(char::is_control);
    let mut unique = names.clone();
    unique.sort();
    unique.dedup();
    (names.len() == count && unique.len() == count && names.iter().all(printable)).then_some(names)
}
