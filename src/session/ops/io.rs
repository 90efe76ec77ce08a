//! Operations that read and write checkpoints.

use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::{Kernel, OpDef};
use crate::io::IoError;
use crate::io::bundle::{Bundle, BundleData, DT_STRING, index_path, merge_bundles, write_bundle};
use crate::session::{Call, DType, Data, Node, OpError, Tensor, tensor_elements};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("SaveV2", save),
    OpDef::new("RestoreV2", restore),
    OpDef::new("MergeV2Checkpoints", merge),
    OpDef::new("ShardedFilename", sharded_filename),
    OpDef::new("StringJoin", string_join),
    OpDef::new("StaticRegexFullMatch", starts_with),
];

impl From<IoError> for OpError {
    fn from(error: IoError) -> Self {
        match &error {
            IoError::Io { source, .. } => match source.kind() {
                std::io::ErrorKind::NotFound => Self::not_found(error),
                std::io::ErrorKind::StorageFull => Self::exhausted(error),
                _ => Self::precondition(error),
            },
            IoError::Damaged { .. } | IoError::Truncated { .. } | IoError::BadRecord { .. } => {
                Self::data_loss(error)
            }
            _ => Self::invalid(error),
        }
    }
}

fn path(call: &Call<'_>, index: usize) -> Result<PathBuf, OpError> {
    path_of(&call.tensor(index)?.item::<Bytes>()?)
}

fn path_of(bytes: &Bytes) -> Result<PathBuf, OpError> {
    let text = std::str::from_utf8(bytes).ok().filter(|text| !text.is_empty());
    text.map(PathBuf::from)
        .ok_or_else(|| OpError::invalid("the path of a checkpoint is empty or not UTF-8"))
}

/// The texts of an input.
fn texts(call: &Call<'_>, index: usize) -> Result<Vec<String>, OpError> {
    let tensor = call.tensor(index)?;
    let texts = tensor.slice::<Bytes>()?.iter().map(|text| String::from_utf8(text.to_vec()));
    texts.collect::<Result<_, _>>().map_err(|_| OpError::invalid("a name is not UTF-8"))
}

/// Names of tensors; those saved in parts are refused.
fn names(call: &Call<'_>) -> Result<Vec<String>, OpError> {
    let (names, slices) = (texts(call, 1)?, texts(call, 2)?);
    if slices.len() != names.len() {
        return Err(OpError::invalid(
            "tensor_names and shape_and_slices have not equally many elements",
        ));
    }
    match names.iter().zip(&slices).find(|(_, slice)| !slice.is_empty()) {
        None => Ok(names),
        Some((name, _)) => Err(OpError::unimplemented(format!(
            "tensor {name} is to be saved or read in parts, which is not supported: use no partitioned variables"
        ))),
    }
}

fn make_parent(path: &Path) -> Result<(), OpError> {
    match path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        None => Ok(()),
        Some(dir) => std::fs::create_dir_all(dir).map_err(|error| {
            OpError::precondition(format!("cannot create {}: {error}", dir.display()))
        }),
    }
}

/// Elements as they lie in memory.
fn stored(tensor: &Tensor) -> (Vec<u8>, Vec<Vec<u8>>) {
    let bytes = match tensor.data() {
        Data::F32(v) => bytemuck::cast_slice(v).to_vec(),
        Data::F64(v) => bytemuck::cast_slice(v).to_vec(),
        Data::I32(v) => bytemuck::cast_slice(v).to_vec(),
        Data::I64(v) => bytemuck::cast_slice(v).to_vec(),
        Data::U8(v) => v.to_vec(),
        Data::Bool(v) => v.iter().map(|&x| u8::from(x)).collect(),
        Data::Str(v) => return (Vec::new(), v.iter().map(|text| text.to_vec()).collect()),
    };
    (bytes, Vec::new())
}

fn save(_: &Node<'_>) -> Result<Kernel, OpError> {
    // Files may be slow: it gets a thread of its own.
    Ok(Kernel::blocking(|call| {
        let (prefix, names) = (path(call, 0)?, names(call)?);
        if names.len() + 3 != call.inputs() {
            return Err(OpError::invalid(format!(
                "Got {} names but {} tensors",
                names.len(),
                call.inputs().saturating_sub(3)
            )));
        }
        let tensors: Result<Vec<Tensor>, OpError> =
            (3..call.inputs()).map(|i| call.tensor(i)).collect();
        let tensors = tensors?;
        let contents: Vec<_> = tensors.iter().map(stored).collect();
        let rows: Vec<_> = names
            .iter()
            .zip(&tensors)
            .zip(&contents)
            .map(|((name, tensor), (bytes, strings))| {
                let data = match tensor.dtype() {
                    DType::Str => BundleData::Strings(strings),
                    _ => BundleData::Bytes(bytes),
                };
                (name.as_str(), tensor.dtype().wire(), &**tensor.shape(), data)
            })
            .collect();
        make_parent(&prefix)?;
        Ok(write_bundle(&prefix, &rows)?)
    }))
}

fn restore(node: &Node<'_>) -> Result<Kernel, OpError> {
    let dtypes = node.dtypes("dtypes")?;
    Ok(Kernel::blocking(move |call| {
        let (prefix, names) = (path(call, 0)?, names(call)?);
        if names.len() != dtypes.len() {
            return Err(OpError::invalid(format!(
                "Got {} names but {} expected types",
                names.len(),
                dtypes.len()
            )));
        }
        if !index_path(&prefix).is_file() {
            return Err(OpError::not_found(format!(
                "Unsuccessful TensorSliceReader constructor: Failed to find any matching files for {}",
                prefix.display()
            )));
        }
        let bundle = Bundle::open(&prefix)?;
        for (i, (name, dtype)) in names.iter().zip(&dtypes).enumerate() {
            call.set(i, restored(&bundle, name, *dtype)?);
        }
        Ok(())
    }))
}

fn restored(bundle: &Bundle, name: &str, dtype: DType) -> Result<Tensor, OpError> {
    let entry = bundle
        .entry(name)
        .ok_or_else(|| OpError::not_found(format!("Key {name} not found in checkpoint")))?;
    if entry.dtype != dtype.wire() {
        return Err(OpError::invalid(format!(
            "tensor {name} is of type {} in the checkpoint, not {dtype}",
            entry.type_name()
        )));
    }
    let shape = entry.shape.as_slice();
    tensor_elements(dtype, shape)?;
    if entry.dtype == DT_STRING {
        let texts = bundle.read_strings(name)?.into_iter().map(Bytes::from);
        return Tensor::new(shape, texts.collect());
    }
    let bytes = bundle.read(name)?;
    let (fours, eights) = (bytes.as_chunks::<4>().0, bytes.as_chunks::<8>().0);
    match dtype {
        DType::F32 => Tensor::new(shape, fours.iter().map(|b| f32::from_le_bytes(*b)).collect()),
        DType::I32 => Tensor::new(shape, fours.iter().map(|b| i32::from_le_bytes(*b)).collect()),
        DType::F64 => Tensor::new(shape, eights.iter().map(|b| f64::from_le_bytes(*b)).collect()),
        DType::I64 => Tensor::new(shape, eights.iter().map(|b| i64::from_le_bytes(*b)).collect()),
        DType::Bool => Tensor::new(shape, bytes.iter().map(|b| *b != 0).collect()),
        DType::U8 | DType::Str => Tensor::new(shape, bytes),
    }
}

fn merge(node: &Node<'_>) -> Result<Kernel, OpError> {
    let remove = node.bool("delete_old_dirs", true)?;
    Ok(Kernel::blocking(move |call| {
        let parts: Result<Vec<PathBuf>, _> =
            call.tensor(0)?.slice::<Bytes>()?.iter().map(path_of).collect();
        let (parts, to) = (parts?, path(call, 1)?);
        make_parent(&to)?;
        merge_bundles(&parts, &to)?;
        if remove {
            for dir in parts.iter().filter_map(|part| part.parent()) {
                // Only when nothing else lies in it.
                let _ = std::fs::remove_dir(dir);
            }
        }
        Ok(())
    }))
}

fn sharded_filename(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let base = call.tensor(0)?.item::<Bytes>()?;
        let (shard, shards) = (call.tensor(1)?.item::<i32>()?, call.tensor(2)?.item::<i32>()?);
        let mut name = base.to_vec();
        name.extend(format!("-{shard:05}-of-{shards:05}").bytes());
        call.set(0, Tensor::scalar(Bytes::from(name)));
        Ok(())
    }))
}

/// TensorFlow's `Saver` asks whether a path is in a cloud, by `^s3://.*`: a beginning is all that is looked for here.
fn starts_with(node: &Node<'_>) -> Result<Kernel, OpError> {
    let pattern = node.text("pattern")?;
    let start = pattern.strip_prefix('^').unwrap_or(pattern).strip_suffix(".*");
    let start = start.filter(|start| !start.contains(|c: char| r"\.+*?()|[]{}^$".contains(c)));
    let start = start.ok_or_else(|| {
        OpError::unimplemented(format!(
            "the pattern {pattern} is not supported: only `beginning.*` is"
        ))
    })?;
    let start = start.as_bytes().to_vec();
    Ok(Kernel::new(move |call| {
        let value = call.tensor(0)?;
        let found = value.slice::<Bytes>()?.iter().map(|text| text.starts_with(&start));
        let out = Tensor::new(value.shape().clone(), found.collect::<Vec<bool>>())?;
        call.set(0, out);
        Ok(())
    }))
}

fn string_join(node: &Node<'_>) -> Result<Kernel, OpError> {
    let separator = node.text("separator")?.as_bytes().to_vec();
    Ok(Kernel::new(move |call| {
        let parts: Result<Vec<Tensor>, OpError> =
            (0..call.inputs()).map(|i| call.tensor(i)).collect();
        let parts = parts?;
        let shape = parts.iter().map(|part| part.shape()).find(|shape| !shape.is_empty());
        let shape = shape.cloned().unwrap_or_default();
        let columns: Result<Vec<Vec<Bytes>>, OpError> =
            parts.iter().map(|part| super::broadcast::stretch(part, &shape)).collect();
        let columns = columns?;
        super::broadcast::bounded(columns.iter().map(Vec::as_slice))?;
        let row = |i: usize| {
            let texts: Vec<&[u8]> =
                columns.iter().filter_map(|c| c.get(i)).map(|t| &t[..]).collect();
            Bytes::from(texts.join(&separator[..]))
        };
        let out =
            Tensor::new(shape.clone(), (0..shape.elements()).map(row).collect::<Vec<Bytes>>())?;
        call.set(0, out);
        Ok(())
    }))
}
