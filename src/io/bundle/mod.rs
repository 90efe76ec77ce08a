//! TensorFlow's checkpoint: `PREFIX.index`, a sorted table of tensors, and `PREFIX.data-00000-of-00001`, their bytes.
//!
//! The table maps `""` to a header and each name to an entry: type, shape, shard, place in the shard's file and checksum.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use prost::Message;

use super::record::{mask, masked_crc};
use super::{IoError, write_atomic};

mod proto;
mod table;

use table::{put_varint, take_varint};

const _: () = assert!(cfg!(target_endian = "little"), "tensors are written as they lie in memory");

/// TensorFlow's number of the type of strings, the only one whose elements differ in size.
pub const DT_STRING: i32 = 7;

/// The format that is written.
const PRODUCER: i32 = 1;

/// What the index says of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleEntry {
    /// TensorFlow's number of the element type.
    pub dtype: i32,
    /// The extents.
    pub shape: Vec<usize>,
    /// Whether the tensor was saved in parts, which cannot be read.
    pub sliced: bool,
    shard: i32,
    offset: u64,
    size: u64,
    crc: u32,
}

impl BundleEntry {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The element type in words.
    pub fn type_name(&self) -> &'static str {
        match self.dtype {
            1 => "f32",
            2 => "f64",
            3 => "i32",
            4 => "u8",
            DT_STRING => "string",
            9 => "i64",
            10 => "bool",
            14 => "bf16",
            19 => "f16",
            _ => "of another type",
        }
    }
}

/// The content of a tensor to be written.
#[derive(Clone, Copy, Debug)]
pub enum BundleData<'a> {
    /// Elements of equal size, row-major, little-endian.
    Bytes(&'a [u8]),
    /// Strings.
    Strings(&'a [Vec<u8>]),
}

/// Path of the index of a checkpoint.
pub fn index_path(prefix: &Path) -> PathBuf {
    with_suffix(prefix, ".index")
}

/// Path of the file of a shard.
fn data_path(prefix: &Path, shard: i32, shards: i32) -> PathBuf {
    with_suffix(prefix, &format!(".data-{shard:05}-of-{shards:05}"))
}

fn with_suffix(prefix: &Path, suffix: &str) -> PathBuf {
    let mut path = prefix.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

/// Removes the files of a checkpoint: index, data and TensorFlow's graph, whatever of them is there.
///
/// # Errors
/// Where a file cannot be removed.
pub fn remove_bundle(prefix: &Path) -> Result<(), IoError> {
    // The index first: what remains without it is no checkpoint.
    let files = [index_path(prefix), data_path(prefix, 0, 1), with_suffix(prefix, ".meta")];
    for path in files {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(IoError::io(&path, "remove")(error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Makes one checkpoint of several that hold different tensors: their data files are renamed, their indices become one.
///
/// # Errors
/// Where a part cannot be read or moved, or two hold a tensor of one name.
pub fn merge_bundles(parts: &[PathBuf], to: &Path) -> Result<(), IoError> {
    let path = index_path(to);
    let parts: Result<Vec<Bundle>, IoError> = parts.iter().map(|part| Bundle::open(part)).collect();
    let parts = parts?;
    let shards = parts.iter().fold(0i32, |n, part| n.saturating_add(part.shards));
    let (mut merged, mut first) = (BTreeMap::new(), 0);
    for part in &parts {
        for (name, entry) in &part.entries {
            let moved = BundleEntry { shard: first + entry.shard, ..entry.clone() };
            if entry.sliced || merged.insert(name.as_str(), moved).is_some() {
                let reason = format!("tensor `{name}` is in two parts");
                return Err(IoError::unwritable(&path, reason));
            }
        }
        for shard in 0..part.shards {
            let from = data_path(&part.prefix, shard, part.shards);
            let to = data_path(to, first + shard, shards);
            fs::rename(&from, &to).map_err(IoError::io(&from, "move"))?;
        }
        first += part.shards;
    }
    write_index(&path, shards, merged.iter().map(|(name, entry)| (*name, entry)))?;
    for part in &parts {
        let index = index_path(&part.prefix);
        if index != path {
            fs::remove_file(&index).map_err(IoError::io(&index, "remove"))?;
        }
    }
    Ok(())
}

/// Writes an index; names must ascend.
fn write_index<'a>(
    path: &Path,
    shards: i32,
    entries: impl Iterator<Item = (&'a str, &'a BundleEntry)>,
) -> Result<(), IoError> {
    let header = proto::Header {
        num_shards: shards,
        endianness: 0,
        version: Some(proto::Version { producer: PRODUCER, min_consumer: 0 }),
    };
    let mut rows = vec![(&b""[..], header.encode_to_vec())];
    rows.extend(entries.map(|(name, entry)| {
        let dim = entry.shape.iter().map(|&size| proto::Dim { size: size as i64 }).collect();
        let row = proto::Entry {
            dtype: entry.dtype,
            shape: Some(proto::ShapeProto { dim, unknown_rank: false }),
            shard_id: entry.shard,
            offset: entry.offset as i64,
            size: entry.size as i64,
            crc32c: entry.crc,
            slices: Vec::new(),
        };
        (name.as_bytes(), row.encode_to_vec())
    }));
    let index = table::encode(rows.iter().map(|(name, entry)| (*name, entry.as_slice())));
    write_atomic(path, |file| file.write_all(&index))
}

/// Writes a checkpoint: first the data, then the index, each at once or not at all.
///
/// # Errors
/// Where the disk refuses, or a name is empty or given twice.
pub fn write_bundle(
    prefix: &Path,
    tensors: &[(&str, i32, &[usize], BundleData<'_>)],
) -> Result<(), IoError> {
    let path = index_path(prefix);
    let mut sorted: Vec<_> = tensors.iter().collect();
    sorted.sort_by_key(|tensor| tensor.0);
    if let Some(twice) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(IoError::unwritable(&path, format!("tensor `{}` is given twice", twice[0].0)));
    }
    if sorted.first().is_some_and(|tensor| tensor.0.is_empty()) {
        return Err(IoError::unwritable(&path, "a tensor has no name"));
    }
    let mut entries = Vec::with_capacity(sorted.len());
    write_atomic(&data_path(prefix, 0, 1), |file| {
        let mut file = std::io::BufWriter::new(file);
        let mut offset = 0;
        for (name, dtype, shape, data) in sorted {
            let (size, crc) = match data {
                BundleData::Bytes(bytes) => {
                    file.write_all(bytes)?;
                    (bytes.len() as u64, masked_crc(bytes))
                }
                BundleData::Strings(strings) => write_strings(&mut file, strings)?,
            };
            let (dtype, shape) = (*dtype, shape.to_vec());
            entries.push((
                *name,
                BundleEntry { dtype, shape, sliced: false, shard: 0, offset, size, crc },
            ));
            offset += size;
        }
        file.flush()
    })?;
    write_index(&path, 1, entries.iter().map(|(name, entry)| (*name, entry)))
}

/// Strings: their lengths, a checksum of these, their bytes. Returns size and checksum.
fn write_strings(file: &mut impl Write, strings: &[Vec<u8>]) -> std::io::Result<(u64, u32)> {
    let mut head = Vec::new();
    strings.iter().for_each(|s| put_varint(&mut head, s.len() as u64));
    let crc = lengths_crc(strings.iter().map(|s| s.len() as u64));
    let check = mask(crc).to_le_bytes();
    head.extend(check);
    file.write_all(&head)?;
    strings.iter().try_for_each(|s| file.write_all(s))?;
    let crc = crc32c::crc32c_append(crc, &check);
    let crc = strings.iter().fold(crc, |crc, s| crc32c::crc32c_append(crc, s));
    Ok(((head.len() + strings.iter().map(Vec::len).sum::<usize>()) as u64, mask(crc)))
}

/// The checksum of lengths takes each as four bytes, or as eight where it needs them.
fn lengths_crc(lengths: impl Iterator<Item = u64>) -> u32 {
    lengths.fold(0, |crc, length| match u32::try_from(length) {
        Ok(length) => crc32c::crc32c_append(crc, &length.to_le_bytes()),
        Err(_) => crc32c::crc32c_append(crc, &length.to_le_bytes()),
    })
}

/// A checkpoint that is read.
#[derive(Debug)]
pub struct Bundle {
    prefix: PathBuf,
    shards: i32,
    entries: BTreeMap<String, BundleEntry>,
}

impl Bundle {
    /// Reads the index; the data is read tensor by tensor.
    ///
    /// # Errors
    /// [`IoError::Io`] where the index cannot be read, [`IoError::Damaged`] where it is no index, or one of another kind.
    pub fn open(prefix: &Path) -> Result<Self, IoError> {
        let path = index_path(prefix);
        let file = fs::read(&path).map_err(IoError::io(&path, "read"))?;
        let (shards, entries) = parse_index(&file).map_err(|r| IoError::damaged(&path, r))?;
        Ok(Self { prefix: prefix.to_owned(), shards, entries })
    }

    /// All tensors, by name.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &BundleEntry)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// One tensor.
    pub fn entry(&self, name: &str) -> Option<&BundleEntry> {
        self.entries.get(name)
    }

    /// The stored bytes of a tensor, checked against their checksum.
    ///
    /// # Errors
    /// Where the file of its shard cannot be read or is cut short, and where the checksum is wrong.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, IoError> {
        let (path, bytes, entry) = self.read_raw(name)?;
        if entry.dtype != DT_STRING && masked_crc(&bytes) != entry.crc {
            let reason = format!("the checksum of tensor `{name}` is wrong");
            return Err(IoError::damaged(&path, reason));
        }
        Ok(bytes)
    }

    /// The elements of a tensor of strings.
    ///
    /// # Errors
    /// As [`Bundle::read`].
    pub fn read_strings(&self, name: &str) -> Result<Vec<Vec<u8>>, IoError> {
        let (path, bytes, entry) = self.read_raw(name)?;
        parse_strings(&bytes, entry.elements(), entry.crc).ok_or_else(|| {
            IoError::damaged(
                &path,
                format!("the strings of tensor `{name}` do not match their checksum"),
            )
        })
    }

    fn read_raw(&self, name: &str) -> Result<(PathBuf, Vec<u8>, &BundleEntry), IoError> {
        let index = || index_path(&self.prefix);
        let entry = self
            .entry(name)
            .ok_or_else(|| IoError::damaged(&index(), format!("it has no tensor `{name}`")))?;
        if entry.sliced {
            let reason = format!("tensor `{name}` was saved in parts, which is not read");
            return Err(IoError::damaged(&index(), reason));
        }
        let path = data_path(&self.prefix, entry.shard, self.shards);
        let mut file = File::open(&path).map_err(IoError::io(&path, "open"))?;
        let length = file.metadata().map_err(IoError::io(&path, "inspect"))?.len();
        // Nothing is set aside for what is not there.
        if entry.offset.checked_add(entry.size).is_none_or(|end| end > length) {
            let (offset, size) = (entry.offset, entry.size);
            let reason = format!(
                "tensor `{name}` takes {size} bytes from {offset} on, but the file has {length}"
            );
            return Err(IoError::damaged(&path, reason));
        }
        let mut bytes = vec![0; entry.size as usize];
        file.seek(SeekFrom::Start(entry.offset))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(IoError::io(&path, "read"))?;
        Ok((path, bytes, entry))
    }
}

fn parse_index(file: &[u8]) -> Result<(i32, BTreeMap<String, BundleEntry>), String> {
    let mut entries = table::decode(file)?.into_iter();
    let header = entries.next().filter(|(key, _)| key.is_empty()).ok_or("it has no header")?;
    let header = proto::Header::decode(header.1.as_slice())
        .map_err(|error| format!("its header cannot be decoded: {error}"))?;
    if header.endianness != 0 {
        return Err("its numbers are big-endian".to_owned());
    }
    if header.version.as_ref().is_some_and(|version| version.min_consumer > PRODUCER) {
        return Err("it needs a newer reader".to_owned());
    }
    if header.num_shards < 1 {
        return Err(format!("it announces {} shards", header.num_shards));
    }
    let mut parsed = BTreeMap::new();
    for (key, value) in entries {
        // The key of a part of a tensor begins with a zero byte; the whole has its own entry.
        if key.first() == Some(&0) {
            continue;
        }
        let name = String::from_utf8(key).map_err(|_| "the name of a tensor is not UTF-8")?;
        let entry = proto::Entry::decode(value.as_slice())
            .map_err(|error| format!("the entry of `{name}` cannot be decoded: {error}"))?;
        let entry = checked(&entry, header.num_shards)
            .ok_or_else(|| format!("the entry of `{name}` cannot be"))?;
        parsed.insert(name, entry);
    }
    Ok((header.num_shards, parsed))
}

fn checked(entry: &proto::Entry, shards: i32) -> Option<BundleEntry> {
    let shape = entry.shape.clone().unwrap_or_default();
    let dims: Option<Vec<usize>> =
        shape.dim.iter().map(|dim| usize::try_from(dim.size).ok()).collect();
    let dims = dims.filter(|_| !shape.unknown_rank)?;
    let elements = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))?;
    let sliced = !entry.slices.is_empty();
    let size = u64::try_from(entry.size).ok()?;
    let width = match entry.dtype {
        1 | 3 | 12 | 22 => 4,
        2 | 8 | 9 | 23 => 8,
        4 | 6 | 10 | 11 | 13 => 1,
        5 | 14 | 17 | 19 => 2,
        _ => 0,
    };
    if width > 0 && !sliced && (elements as u64).checked_mul(width) != Some(size) {
        return None;
    }
    // A string takes a byte at least, for its length.
    if entry.dtype == DT_STRING && (elements as u64) > size {
        return None;
    }
    Some(BundleEntry {
        dtype: entry.dtype,
        shape: dims,
        sliced,
        shard: Some(entry.shard_id).filter(|shard| (0..shards).contains(shard))?,
        offset: u64::try_from(entry.offset).ok()?,
        size,
        crc: entry.crc32c,
    })
}

fn parse_strings(mut bytes: &[u8], count: usize, crc: u32) -> Option<Vec<Vec<u8>>> {
    let input = &mut bytes;
    let lengths: Option<Vec<u64>> = (0..count).map(|_| take_varint(input)).collect();
    let lengths = lengths?;
    let (check, mut rest) = input.split_first_chunk::<4>()?;
    let so_far = lengths_crc(lengths.iter().copied());
    let found = crc32c::crc32c_append(crc32c::crc32c_append(so_far, check), rest);
    if mask(so_far).to_le_bytes() != *check || mask(found) != crc {
        return None;
    }
    let mut strings = Vec::with_capacity(count);
    for length in lengths {
        let (string, tail) = rest.split_at_checked(usize::try_from(length).ok()?)?;
        strings.push(string.to_vec());
        rest = tail;
    }
    rest.is_empty().then_some(strings)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
