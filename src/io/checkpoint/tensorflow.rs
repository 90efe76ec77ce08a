//! Snapshots in TensorFlow's own checkpoint files, so that TensorFlow can go on from ours and we from theirs.

use std::path::{Path, PathBuf};

use super::snapshot::Snapshot;
use crate::io::IoError;
use crate::io::bundle::{Bundle, BundleData, BundleEntry, DT_STRING, index_path, write_bundle};
use crate::tensor::HostTensor;

const GLOBAL_STEP: &str = "global_step";
/// Metadata are scalars of strings under this name; TensorFlow's `Saver` passes over what its graph does not know.
const METADATA: &str = "tftrain/";

const DT_FLOAT: i32 = 1;
const DT_DOUBLE: i32 = 2;
const DT_INT32: i32 = 3;
const DT_INT64: i32 = 9;

/// The prefix of TensorFlow's checkpoint, where `path` is that, or its index, and the index is there.
pub fn bundle_prefix(path: &Path) -> Option<PathBuf> {
    let prefix = match path.extension() {
        Some(end) if end == "index" => path.with_extension(""),
        _ => path.to_owned(),
    };
    index_path(&prefix).is_file().then_some(prefix)
}

/// Reads the numbers of a checkpoint; tensors of other types are passed over.
pub(super) fn load(prefix: &Path) -> Result<Snapshot, IoError> {
    let bundle = Bundle::open(prefix)?;
    let mut snapshot = Snapshot::default();
    let mut global_step = None;
    for (name, entry) in bundle.entries() {
        if let Some(key) = name.strip_prefix(METADATA).filter(|_| entry.dtype == DT_STRING) {
            let values = bundle.read_strings(name)?;
            let value = values.into_iter().next().and_then(|value| String::from_utf8(value).ok());
            snapshot.metadata.extend(value.map(|value| (key.to_owned(), value)));
            continue;
        }
        let Some(tensor) = read(&bundle, name, entry)? else { continue };
        if name == GLOBAL_STEP {
            global_step = tensor.as_i64().and_then(|step| step.first().copied());
        } else {
            snapshot.tensors.push((name.to_owned(), tensor));
        }
    }
    let step = global_step.and_then(|step| u64::try_from(step).ok());
    let missing = "it holds no `global_step` of 0 or more";
    snapshot.global_step = step.ok_or_else(|| IoError::damaged(&index_path(prefix), missing))?;
    Ok(snapshot)
}

fn read(bundle: &Bundle, name: &str, entry: &BundleEntry) -> Result<Option<HostTensor>, IoError> {
    if entry.sliced || ![DT_FLOAT, DT_DOUBLE, DT_INT32, DT_INT64].contains(&entry.dtype) {
        return Ok(None);
    }
    let bytes = bundle.read(name)?;
    let (fours, eights) = (bytes.as_chunks::<4>().0, bytes.as_chunks::<8>().0);
    Ok(match entry.dtype {
        DT_FLOAT => {
            HostTensor::f32(&entry.shape, fours.iter().map(|b| f32::from_le_bytes(*b)).collect())
        }
        DT_DOUBLE => HostTensor::f32(
            &entry.shape,
            eights.iter().map(|b| f64::from_le_bytes(*b) as f32).collect(),
        ),
        DT_INT32 => HostTensor::i64(
            &entry.shape,
            fours.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        ),
        _ => HostTensor::i64(&entry.shape, eights.iter().map(|b| i64::from_le_bytes(*b)).collect()),
    })
}

/// Writes a snapshot; metadata too, which TensorFlow passes over.
pub(super) fn save(snapshot: &Snapshot, prefix: &Path) -> Result<(), IoError> {
    let step = i64::try_from(snapshot.global_step).map_err(|_| {
        IoError::unwritable(&index_path(prefix), "the global step is above 2^63 - 1")
    })?;
    let step = HostTensor::I64(ndarray::arr0(step).into_dyn());
    let named = snapshot.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    let numbers: Vec<_> = std::iter::once((GLOBAL_STEP, &step))
        .chain(named)
        .map(|(name, tensor)| {
            let dtype = if tensor.as_f32().is_some() { DT_FLOAT } else { DT_INT64 };
            (name, dtype, tensor.shape(), super::snapshot::bytes_of(tensor))
        })
        .collect();
    let metadata: Vec<_> = snapshot
        .metadata
        .iter()
        .map(|(key, value)| (format!("{METADATA}{key}"), [value.clone().into_bytes()]))
        .collect();
    let numbers = numbers
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, *dtype, &**shape, BundleData::Bytes(bytes)));
    let strings = metadata
        .iter()
        .map(|(name, value)| (name.as_str(), DT_STRING, &[][..], BundleData::Strings(value)));
    write_bundle(prefix, &numbers.chain(strings).collect::<Vec<_>>())
}
