//! [`Snapshot`]: the state of a run, and the safetensors file that holds it.
//!
//! A file is `header length u64 | header JSON | data`. Beside the format's own fields, the metadata holds
//! a SHA-256 digest of each tensor's data and one of the metadata itself.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::bundle_prefix;
use crate::io::{IoError, write_atomic};
use crate::tensor::HostTensor;

const _: () = assert!(cfg!(target_endian = "little"), "tensors are written as they lie in memory");

/// The value of the metadata's `format`.
const FORMAT: &str = "tftrain-1";
const FORMAT_KEY: &str = "format";
/// A tensor's digest is under this and its name; the metadata's own under this and [`METADATA`].
const DIGEST_PREFIX: &str = "sha256:";
/// The header's key for metadata; no tensor can have this name.
const METADATA: &str = "__metadata__";
/// The name of the scalar tensor that holds the step.
const GLOBAL_STEP: &str = "global_step";

/// The state of a run at one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The number of steps done.
    pub global_step: u64,
    /// Names and values, each name once. Files keep the order, but hold integers before floats.
    pub tensors: Vec<(String, HostTensor)>,
    /// What the caller wants to find again. `format` and keys that begin with `sha256:` are reserved.
    pub metadata: BTreeMap<String, String>,
}

impl Snapshot {
    /// Writes the file at once or not at all. Data is written from where it lies.
    pub(crate) fn save(&self, path: &Path) -> Result<(), IoError> {
        let step = i64::try_from(self.global_step)
            .map_err(|_| IoError::unwritable(path, "the global step is above 2^63 - 1"))?;
        let step = HostTensor::I64(ndarray::arr0(step).into_dyn());
        // Integers first: readers that map the file need eight-byte values on eight-byte offsets.
        let named = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        let mut tensors: Vec<_> = std::iter::once((GLOBAL_STEP, &step)).chain(named).collect();
        tensors.sort_by_key(|(_, tensor)| matches!(tensor, HostTensor::F32(_)));
        let tensors: Vec<_> =
            tensors.into_iter().map(|(name, tensor)| (name, tensor, bytes_of(tensor))).collect();

        let header = header(&self.metadata, &tensors).map_err(|r| IoError::unwritable(path, r))?;
        write_atomic(path, |file| {
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(header.as_bytes())?;
            tensors.iter().try_for_each(|(_, _, bytes)| file.write_all(bytes))
        })
    }
}

/// The values as they lie in memory; copied only where they are not row-major.
pub(super) fn bytes_of(tensor: &HostTensor) -> Cow<'_, [u8]> {
    match tensor {
        HostTensor::F32(a) => match a.as_slice() {
            Some(values) => Cow::Borrowed(bytemuck::cast_slice(values)),
            None => Cow::Owned(a.iter().flat_map(|v| v.to_le_bytes()).collect()),
        },
        HostTensor::I64(a) => match a.as_slice() {
            Some(values) => Cow::Borrowed(bytemuck::cast_slice(values)),
            None => Cow::Owned(a.iter().flat_map(|v| v.to_le_bytes()).collect()),
        },
    }
}

/// The header's JSON, padded to eight bytes. The same snapshot always gives the same bytes.
fn header(
    given: &BTreeMap<String, String>,
    tensors: &[(&str, &HostTensor, Cow<'_, [u8]>)],
) -> Result<String, String> {
    if let Some(key) = given.keys().find(|key| is_reserved(key)) {
        return Err(format!("the metadata key `{key}` is reserved"));
    }
    let mut metadata = given.clone();
    metadata.insert(FORMAT_KEY.to_owned(), FORMAT.to_owned());
    let mut entries = BTreeMap::new();
    let mut start = 0;
    for (name, tensor, bytes) in tensors {
        let end = start + bytes.len();
        let dtype = match tensor {
            HostTensor::F32(_) => Dtype::F32,
            HostTensor::I64(_) => Dtype::I64,
        };
        let info = TensorInfo { dtype, shape: tensor.shape().to_vec(), data_offsets: (start, end) };
        if *name == METADATA || entries.insert(*name, json!(info)).is_some() {
            return Err(format!("the tensor name `{name}` is reserved or used twice"));
        }
        metadata.insert(format!("{DIGEST_PREFIX}{name}"), hex(&Sha256::digest(bytes)));
        start = end;
    }
    let digest = metadata_digest(&metadata);
    metadata.insert(format!("{DIGEST_PREFIX}{METADATA}"), digest);
    entries.insert(METADATA, json!(metadata));
    let mut header = json!(entries).to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    Ok(header)
}

fn is_reserved(key: &str) -> bool {
    key == FORMAT_KEY || key.starts_with(DIGEST_PREFIX)
}

/// The digest of all metadata but this digest itself, each key and value under its length.
fn metadata_digest(metadata: &BTreeMap<String, String>) -> String {
    let mut hasher = Sha256::new();
    for text in metadata.iter().flat_map(|(key, value)| [key, value]) {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text);
    }
    hex(&hasher.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a checkpoint and checks sizes and digests. `path` may be the prefix of TensorFlow's files.
///
/// # Errors
/// [`IoError::Io`] where the file cannot be read, [`IoError::Damaged`] where it is not what
/// [`CheckpointStore::save`](super::CheckpointStore::save) or TensorFlow wrote.
pub fn load(path: &Path) -> Result<Snapshot, IoError> {
    if let Some(prefix) = bundle_prefix(path) {
        return super::tensorflow::load(&prefix);
    }
    let failed = IoError::io(path, "read");
    let damaged = |reason: String| IoError::damaged(path, reason);
    let opened = File::open(path).and_then(|file| Ok((file.metadata()?.len(), file)));
    let (file_length, file) = match opened {
        Ok(opened) => opened,
        Err(source) => return Err(failed(source)),
    };
    let mut input = BufReader::new(file);
    let mut length = [0; 8];
    input.read_exact(&mut length).map_err(|e| damaged(format!("no header length: {e}")))?;
    let length = u64::from_le_bytes(length);
    let data_length = file_length.saturating_sub(8).checked_sub(length).ok_or_else(|| {
        damaged(format!("a header of {length} bytes is announced, the file has {file_length}"))
    })?;
    // No more is set aside for what the file announces than the file holds.
    let mut header = vec![0; length as usize];
    input.read_exact(&mut header).map_err(|e| damaged(format!("no header: {e}")))?;
    // Checks that the tensors follow each other without gaps and that shapes fit their sizes.
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| damaged(format!("its header is no safetensors header: {error}")))?;
    if header.data_len() as u64 != data_length {
        let announced = header.data_len();
        return Err(damaged(format!("{announced} bytes of data announced, {data_length} found")));
    }
    read_tensors(&header, &mut input).map_err(damaged)
}

/// Checks the metadata, then reads and checks the data.
fn read_tensors(header: &Metadata, input: &mut impl Read) -> Result<Snapshot, String> {
    let mut metadata: BTreeMap<String, String> =
        header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
    match metadata.get(FORMAT_KEY).map(String::as_str) {
        Some(FORMAT) => {}
        other => return Err(format!("its format is {other:?}, not `{FORMAT}`")),
    }
    let digest = metadata.remove(&format!("{DIGEST_PREFIX}{METADATA}"));
    if digest.as_deref() != Some(&metadata_digest(&metadata)) {
        return Err("the digest of its metadata is missing or wrong".to_owned());
    }

    let infos: HashMap<String, &TensorInfo> = header.tensors();
    let mut infos: Vec<_> = infos.into_iter().collect();
    infos.sort_by(|(a, x), (b, y)| (x.data_offsets, a).cmp(&(y.data_offsets, b)));
    let mut global_step = None;
    let mut tensors = Vec::with_capacity(infos.len());
    for (name, info) in infos {
        let digest = metadata.remove(&format!("{DIGEST_PREFIX}{name}"));
        let tensor = read_tensor(info, digest.as_deref(), input)
            .map_err(|reason| format!("tensor `{name}`: {reason}"))?;
        if name == GLOBAL_STEP {
            global_step = tensor.as_i64().filter(|_| info.shape.is_empty()).map(|step| step[0]);
        } else {
            tensors.push((name, tensor));
        }
    }
    let global_step = global_step
        .and_then(|step| u64::try_from(step).ok())
        .ok_or("it holds no scalar `global_step` of 0 or more")?;
    metadata.retain(|key, _| !is_reserved(key));
    Ok(Snapshot { global_step, tensors, metadata })
}

/// Reads the next tensor's data into its own memory.
fn read_tensor(
    info: &TensorInfo,
    digest: Option<&str>,
    input: &mut impl Read,
) -> Result<HostTensor, String> {
    let bytes = info.data_offsets.1 - info.data_offsets.0;
    let mut fill = |data: &mut [u8]| {
        input.read_exact(data).map_err(|error| format!("its data cannot be read: {error}"))?;
        match digest {
            None => Err("it has no digest".to_owned()),
            Some(digest) if digest == hex(&Sha256::digest(&*data)) => Ok(()),
            Some(_) => Err("its data does not match its digest".to_owned()),
        }
    };
    let tensor = match info.dtype {
        Dtype::F32 => {
            let mut values = vec![0f32; bytes / size_of::<f32>()];
            fill(bytemuck::cast_slice_mut(&mut values))?;
            HostTensor::f32(&info.shape, values)
        }
        Dtype::I64 => {
            let mut values = vec![0i64; bytes / size_of::<i64>()];
            fill(bytemuck::cast_slice_mut(&mut values))?;
            HostTensor::i64(&info.shape, values)
        }
        other => return Err(format!("its type is {other}; only F32 and I64 are read")),
    };
    tensor.ok_or_else(|| format!("its shape {:?} cannot be", info.shape))
}

#[cfg(test)]
#[path = "snapshot_tests.rs"]
mod tests;
