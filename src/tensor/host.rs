//! [`HostTensor`]: a typed tensor in the host's memory.

use ndarray::ArrayD;

use super::Shape;

/// A tensor in the host's memory, row-major. What checkpoints hold and programs hand out.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTensor {
    /// 32-bit floats.
    F32(ArrayD<f32>),
    /// 64-bit integers.
    I64(ArrayD<i64>),
}

impl HostTensor {
    /// A float tensor. `None` when `values` does not hold as many elements as `shape` says.
    pub fn f32(shape: &[usize], values: Vec<f32>) -> Option<Self> {
        ArrayD::from_shape_vec(shape, values).ok().map(Self::F32)
    }

    /// An integer tensor. `None` when `values` does not hold as many elements as `shape` says.
    pub fn i64(shape: &[usize], values: Vec<i64>) -> Option<Self> {
        ArrayD::from_shape_vec(shape, values).ok().map(Self::I64)
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        match self {
            Self::F32(a) => a.shape().into(),
            Self::I64(a) => a.shape().into(),
        }
    }

    /// The floats in row-major order, where this is a float tensor.
    pub fn as_f32(&self) -> Option<&[f32]> {
        match self {
            Self::F32(a) => a.as_slice(),
            Self::I64(_) => None,
        }
    }

    /// The integers in row-major order, where this is an integer tensor.
    pub fn as_i64(&self) -> Option<&[i64]> {
        match self {
            Self::I64(a) => a.as_slice(),
            Self::F32(_) => None,
        }
    }
}
