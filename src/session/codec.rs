//! Tensors on the wire: every form that TensorFlow writes is read, `tensor_content` is written.

use bytes::Bytes;

use super::proto::tensor_shape_proto::Dim;
use super::proto::{NamedTensorProto, TensorProto, TensorShapeProto};
use super::tensor::{Data, elements};
use super::{DType, Element, OpError, Tensor};
use crate::tensor::Shape;

/// The extents of a shape that is wholly known.
pub fn shape(proto: Option<&TensorShapeProto>) -> Result<Shape, OpError> {
    let Some(proto) = proto else { return Ok(Shape::scalar()) };
    let dims: Result<Vec<usize>, _> =
        proto.dim.iter().map(|dim| usize::try_from(dim.size)).collect();
    match dims {
        Ok(dims) if !proto.unknown_rank => Ok(dims.into()),
        _ => Err(OpError::invalid(format!("shape {} is not fully defined", shape_text(proto)))),
    }
}

/// A shape as TensorFlow prints it: `[2,?]`.
pub fn shape_text(proto: &TensorShapeProto) -> String {
    if proto.unknown_rank {
        return "<unknown>".to_owned();
    }
    let dim = |dim: &Dim| if dim.size < 0 { "?".to_owned() } else { dim.size.to_string() };
    format!("[{}]", proto.dim.iter().map(dim).collect::<Vec<_>>().join(","))
}

/// Extents on the wire.
pub fn shape_proto(shape: &[usize]) -> TensorShapeProto {
    let dim = shape.iter().map(|&size| Dim { size: size as i64, ..Dim::default() }).collect();
    TensorShapeProto { dim, unknown_rank: false }
}

/// Reads a tensor.
///
/// # Errors
/// A type that tensors here do not have, a shape that is too large or open, contents of another length.
pub fn decode(proto: &TensorProto) -> Result<Tensor, OpError> {
    let dtype = DType::from_wire(proto.dtype)?;
    let shape = shape(proto.tensor_shape.as_ref())?;
    let len = elements(dtype, &shape)?;
    let content = &proto.tensor_content;
    match dtype {
        DType::F32 => {
            let raw = raw(content, len, f32::from_le_bytes);
            build(shape, len, raw, || proto.float_val.clone())
        }
        DType::F64 => {
            let raw = raw(content, len, f64::from_le_bytes);
            build(shape, len, raw, || proto.double_val.clone())
        }
        DType::I32 => {
            let raw = raw(content, len, i32::from_le_bytes);
            build(shape, len, raw, || proto.int_val.clone())
        }
        DType::I64 => {
            let raw = raw(content, len, i64::from_le_bytes);
            build(shape, len, raw, || proto.int64_val.clone())
        }
        DType::U8 => {
            let raw = raw(content, len, u8::from_le_bytes);
            build(shape, len, raw, || proto.int_val.iter().map(|&v| v as u8).collect())
        }
        DType::Bool => {
            let raw = raw(content, len, |[byte]: [u8; 1]| byte != 0);
            build(shape, len, raw, || proto.bool_val.clone())
        }
        DType::Str if content.is_empty() => {
            build(shape, len, Ok(None), || proto.string_val.clone())
        }
        DType::Str => build(shape, len, strings(content, len).map(Some), Vec::new),
    }
}

/// The elements of `tensor_content`, where there is one.
fn raw<T, const N: usize>(
    content: &Bytes,
    len: usize,
    read: impl Fn([u8; N]) -> T,
) -> Result<Option<Vec<T>>, OpError> {
    if content.is_empty() {
        return Ok(None);
    }
    let (chunks, rest) = content.as_chunks::<N>();
    if chunks.len() != len || !rest.is_empty() {
        return Err(OpError::invalid(format!(
            "a tensor of {len} elements has {} bytes of content, not {}",
            content.len(),
            len * N
        )));
    }
    Ok(Some(chunks.iter().map(|chunk| read(*chunk)).collect()))
}

/// Strings in `tensor_content`: their lengths as varints, then their bytes.
fn strings(content: &Bytes, len: usize) -> Result<Vec<Bytes>, OpError> {
    let broken = || OpError::invalid("the strings of a tensor are cut short");
    // Each has a length of at least one byte.
    if len > content.len() {
        return Err(broken());
    }
    let mut rest = content.clone();
    let mut lengths = Vec::with_capacity(len);
    for _ in 0..len {
        let length = prost::decode_length_delimiter(&mut rest).map_err(|_| broken())?;
        lengths.push(length);
    }
    let texts: Result<Vec<Bytes>, OpError> = lengths
        .into_iter()
        .map(|length| if length <= rest.len() { Ok(rest.split_to(length)) } else { Err(broken()) })
        .collect();
    if rest.is_empty() { texts } else { Err(broken()) }
}

/// A tensor of its content, or of values whose last is repeated.
fn build<T: Element>(
    shape: Shape,
    len: usize,
    content: Result<Option<Vec<T>>, OpError>,
    values: impl FnOnce() -> Vec<T>,
) -> Result<Tensor, OpError> {
    let values = match content? {
        Some(content) => content,
        None => {
            let mut values = values();
            if values.len() > len {
                return Err(OpError::invalid(format!(
                    "a tensor of shape {shape} has {len} elements, not {}",
                    values.len()
                )));
            }
            let last = values.last().cloned().unwrap_or_default();
            values.resize(len, last);
            values
        }
    };
    Tensor::new(shape, values)
}

/// Writes tensors with their names.
pub(super) fn named(
    names: impl IntoIterator<Item = String>,
    tensors: Vec<Tensor>,
) -> Vec<NamedTensorProto> {
    let named =
        |(name, tensor): (String, Tensor)| NamedTensorProto { name, tensor: Some(encode(&tensor)) };
    names.into_iter().zip(tensors).map(named).collect()
}

/// Writes a tensor.
pub fn encode(tensor: &Tensor) -> TensorProto {
    let mut proto = TensorProto {
        dtype: tensor.dtype().wire(),
        tensor_shape: Some(shape_proto(tensor.shape())),
        ..TensorProto::default()
    };
    proto.tensor_content = match tensor.data() {
        Data::F32(v) => bytes_of(v.iter().map(|v| v.to_le_bytes())),
        Data::F64(v) => bytes_of(v.iter().map(|v| v.to_le_bytes())),
        Data::I32(v) => bytes_of(v.iter().map(|v| v.to_le_bytes())),
        Data::I64(v) => bytes_of(v.iter().map(|v| v.to_le_bytes())),
        Data::U8(v) => Bytes::copy_from_slice(v),
        Data::Bool(v) => bytes_of(v.iter().map(|&v| [u8::from(v)])),
        Data::Str(v) => {
            proto.string_val = v.to_vec();
            Bytes::new()
        }
    };
    proto
}

fn bytes_of<const N: usize>(values: impl ExactSizeIterator<Item = [u8; N]>) -> Bytes {
    let mut out = Vec::with_capacity(values.len() * N);
    for value in values {
        out.extend_from_slice(&value);
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(dtype: i32, dims: &[i64]) -> TensorProto {
        let dim = dims.iter().map(|&size| Dim { size, ..Dim::default() }).collect();
        let tensor_shape = Some(TensorShapeProto { dim, unknown_rank: false });
        TensorProto { dtype, tensor_shape, ..TensorProto::default() }
    }

    #[test]
    fn reads_every_form() {
        let last = TensorProto { float_val: vec![1.0, 2.0], ..of(1, &[2, 2]) };
        assert_eq!(decode(&last).unwrap().slice::<f32>().unwrap(), [1.0, 2.0, 2.0, 2.0]);
        let none = of(3, &[3]);
        assert_eq!(decode(&none).unwrap().slice::<i32>().unwrap(), [0; 3]);
        let packed = TensorProto { tensor_content: b"\x01\x02abb"[..].into(), ..of(7, &[2]) };
        assert_eq!(decode(&packed).unwrap().slice::<Bytes>().unwrap(), [&b"a"[..], b"bb"]);
        let scalar = TensorProto { dtype: 9, int64_val: vec![-1], ..TensorProto::default() };
        assert_eq!(decode(&scalar).unwrap(), Tensor::scalar(-1i64));
        assert!(decode(&of(1, &[0])).unwrap().is_empty());
    }

    #[test]
    fn refuses_what_lies() {
        let huge = TensorProto { float_val: vec![1.0], ..of(1, &[1_000_000_000]) };
        assert_eq!(decode(&huge).unwrap_err().code, crate::session::Code::ResourceExhausted);
        for bad in [
            of(1, &[-1]),
            of(1, &[i64::MAX, i64::MAX, 0]),
            of(77, &[1]),
            TensorProto { tensor_content: b"abc"[..].into(), ..of(1, &[1]) },
            TensorProto { tensor_content: b"\x05a"[..].into(), ..of(7, &[1]) },
            TensorProto { tensor_content: b"\xff\xff\xff\xff\xff"[..].into(), ..of(7, &[1]) },
            TensorProto { float_val: vec![0.0; 3], ..of(1, &[2]) },
        ] {
            assert!(decode(&bad).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn decode_undoes_encode(rows in 0usize..4, columns in 0usize..4, seed in any::<i64>()) {
            let n = rows * columns;
            let wide: Vec<i64> = (0..n as i64).map(|i| seed.wrapping_mul(i + 1)).collect();
            let texts = wide.iter().map(|v| Bytes::from(v.to_string())).collect::<Vec<_>>();
            let shape = [rows, columns];
            for tensor in [
                Tensor::new(shape, wide.iter().map(|&v| v as f32).collect()),
                Tensor::new(shape, wide.iter().map(|&v| v as f64).collect()),
                Tensor::new(shape, wide.iter().map(|&v| v as i32).collect()),
                Tensor::new(shape, wide.iter().map(|&v| v as u8).collect()),
                Tensor::new(shape, wide.iter().map(|&v| v % 2 == 0).collect()),
                Tensor::new(shape, texts),
                Tensor::new(shape, wide),
            ] {
                let tensor = tensor.unwrap();
                prop_assert_eq!(decode(&encode(&tensor)).unwrap(), tensor);
            }
        }
    }
}
