//! [`Tensor`]: what flows along the edges of a session's graph.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use super::OpError;
use crate::tensor::Shape;

/// No tensor is larger: a graph of a few bytes can ask for any size.
const MAX_BYTES: usize = 2 << 30;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it")]
pub enum DType {
    F32,
    F64,
    I32,
    I64,
    U8,
    Bool,
    Str,
}

impl DType {
    const WIRE: [(DType, i32, &'static str, usize); 7] = [
        (DType::F32, 1, "float", 4),
        (DType::F64, 2, "double", 8),
        (DType::I32, 3, "int32", 4),
        (DType::U8, 4, "uint8", 1),
        (DType::Str, 7, "string", size_of::<Bytes>()),
        (DType::I64, 9, "int64", 8),
        (DType::Bool, 10, "bool", 1),
    ];

    fn row(self) -> (DType, i32, &'static str, usize) {
        Self::WIRE.into_iter().find(|row| row.0 == self).unwrap_or(Self::WIRE[0])
    }

    /// The type of a number on the wire; a reference type counts as what it refers to.
    pub fn from_wire(number: i32) -> Result<Self, OpError> {
        let value = if number > 100 { number - 100 } else { number };
        let row = Self::WIRE.into_iter().find(|row| row.1 == value);
        row.map(|row| row.0).ok_or_else(|| {
            OpError::unimplemented(format!(
                "tensors of type {number} are not supported: use float, double, int32, int64, uint8, bool or string"
            ))
        })
    }

    /// TensorFlow's number of this type.
    pub fn wire(self) -> i32 {
        self.row().1
    }

    /// Bytes of an element in memory.
    pub fn size(self) -> usize {
        self.row().3
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().2)
    }
}

/// The elements of a tensor, row-major and shared.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Data {
    F32(Arc<Vec<f32>>),
    F64(Arc<Vec<f64>>),
    I32(Arc<Vec<i32>>),
    I64(Arc<Vec<i64>>),
    U8(Arc<Vec<u8>>),
    Bool(Arc<Vec<bool>>),
    Str(Arc<Vec<Bytes>>),
}

/// A type that tensors may have as elements.
pub trait Element: Clone + Default + Send + Sync + 'static {
    /// Its name.
    const DTYPE: DType;
    /// Elements as data.
    fn wrap(values: Arc<Vec<Self>>) -> Data;
    /// The elements of data of this type.
    fn of(data: &Data) -> Option<&Arc<Vec<Self>>>;
    /// The same, to be changed.
    fn of_mut(data: &mut Data) -> Option<&mut Arc<Vec<Self>>>;
}

macro_rules! elements {
    ($($rust:ty => $name:ident),*) => {$(
        impl Element for $rust {
            const DTYPE: DType = DType::$name;
            fn wrap(values: Arc<Vec<Self>>) -> Data {
                Data::$name(values)
            }
            fn of(data: &Data) -> Option<&Arc<Vec<Self>>> {
                if let Data::$name(values) = data { Some(values) } else { None }
            }
            fn of_mut(data: &mut Data) -> Option<&mut Arc<Vec<Self>>> {
                if let Data::$name(values) = data { Some(values) } else { None }
            }
        }
    )*};
}

elements!(f32 => F32, f64 => F64, i32 => I32, i64 => I64, u8 => U8, bool => Bool, Bytes => Str);

/// A tensor: its shape and as many elements as the shape says. A clone shares the elements; who changes them gets a copy
/// unless nobody shares them.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    shape: Shape,
    data: Data,
}

/// The number of elements of a shape that a tensor may have.
///
/// # Errors
/// RESOURCE_EXHAUSTED where they would fill more than 2 GB; extents of nothing do not excuse the others.
pub(super) fn elements(dtype: DType, shape: &[usize]) -> Result<usize, OpError> {
    let extent = shape.iter().try_fold(dtype.size(), |n, &dim| n.checked_mul(dim.max(1)));
    match extent {
        Some(bytes) if bytes <= MAX_BYTES => Ok(shape.iter().product()),
        _ => Err(OpError::exhausted(format!(
            "OOM when allocating tensor with shape{shape:?} and type {dtype}: at most 2 GB are given to one tensor"
        ))),
    }
}

impl Tensor {
    /// A tensor of these elements.
    ///
    /// # Errors
    /// Their number is not what the shape says, or it is too large.
    pub fn new<T: Element>(shape: impl Into<Shape>, values: Vec<T>) -> Result<Self, OpError> {
        let shape = shape.into();
        let wanted = elements(T::DTYPE, &shape)?;
        if wanted != values.len() {
            return Err(OpError::invalid(format!(
                "a tensor of shape {shape} has {wanted} elements, not {}",
                values.len()
            )));
        }
        Ok(Self { shape, data: T::wrap(Arc::new(values)) })
    }

    /// A tensor without extents.
    pub fn scalar<T: Element>(value: T) -> Self {
        Self { shape: Shape::scalar(), data: T::wrap(Arc::new(vec![value])) }
    }

    /// A vector.
    pub fn vector<T: Element>(values: Vec<T>) -> Result<Self, OpError> {
        Self::new([values.len()], values)
    }

    /// The same value in all elements.
    pub fn full<T: Element>(shape: impl Into<Shape>, value: T) -> Result<Self, OpError> {
        let shape = shape.into();
        let len = elements(T::DTYPE, &shape)?;
        Ok(Self { shape, data: T::wrap(Arc::new(vec![value; len])) })
    }

    /// Zeros, `false` or empty strings.
    pub fn zeros(dtype: DType, shape: impl Into<Shape>) -> Result<Self, OpError> {
        match dtype {
            DType::F32 => Self::full(shape, 0f32),
            DType::F64 => Self::full(shape, 0f64),
            DType::I32 => Self::full(shape, 0i32),
            DType::I64 => Self::full(shape, 0i64),
            DType::U8 => Self::full(shape, 0u8),
            DType::Bool => Self::full(shape, false),
            DType::Str => Self::full(shape, Bytes::new()),
        }
    }

    /// The extents.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        match &self.data {
            Data::F32(v) => v.len(),
            Data::F64(v) => v.len(),
            Data::I32(v) => v.len(),
            Data::I64(v) => v.len(),
            Data::U8(v) => v.len(),
            Data::Bool(v) => v.len(),
            Data::Str(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        match &self.data {
            Data::F32(_) => DType::F32,
            Data::F64(_) => DType::F64,
            Data::I32(_) => DType::I32,
            Data::I64(_) => DType::I64,
            Data::U8(_) => DType::U8,
            Data::Bool(_) => DType::Bool,
            Data::Str(_) => DType::Str,
        }
    }

    /// The elements, to be matched on.
    pub fn data(&self) -> &Data {
        &self.data
    }

    fn not<T: Element>(&self) -> OpError {
        OpError::invalid(format!("expected a tensor of type {}, got {}", T::DTYPE, self.dtype()))
    }

    /// The elements, where they are of this type.
    pub fn slice<T: Element>(&self) -> Result<&[T], OpError> {
        T::of(&self.data).map(|values| values.as_slice()).ok_or_else(|| self.not::<T>())
    }

    /// The elements to be changed; copied first where they are shared.
    pub fn slice_mut<T: Element>(&mut self) -> Result<&mut [T], OpError> {
        let error = self.not::<T>();
        let values = T::of_mut(&mut self.data).ok_or(error)?;
        Ok(Arc::make_mut(values).as_mut_slice())
    }

    /// The elements; copied where they are shared.
    pub fn into_vec<T: Element>(mut self) -> Result<Vec<T>, OpError> {
        let error = self.not::<T>();
        let values = T::of_mut(&mut self.data).ok_or(error)?;
        Ok(std::mem::take(Arc::make_mut(values)))
    }

    /// The one element of a scalar, or of any tensor with one.
    pub fn item<T: Element>(&self) -> Result<T, OpError> {
        match self.slice::<T>()? {
            [value] => Ok(value.clone()),
            _ => Err(OpError::invalid(format!("expected a scalar, got shape {}", self.shape))),
        }
    }

    /// Whole numbers of either width, as operands that are shapes, axes or indices have them.
    pub fn integers(&self) -> Result<Vec<i64>, OpError> {
        match &self.data {
            Data::I32(values) => Ok(values.iter().map(|&v| i64::from(v)).collect()),
            Data::I64(values) => Ok(values.to_vec()),
            _ => Err(OpError::invalid(format!("expected int32 or int64, got {}", self.dtype()))),
        }
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// The shape has another number of elements.
    pub fn reshaped(mut self, shape: impl Into<Shape>) -> Result<Self, OpError> {
        let shape = shape.into();
        if elements(self.dtype(), &shape)? != self.len() {
            return Err(OpError::invalid(format!(
                "Input to reshape is a tensor with {} values, but the requested shape has {}",
                self.len(),
                shape.elements()
            )));
        }
        self.shape = shape;
        Ok(self)
    }

    /// Bytes in memory, without the texts of strings.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype().size()
    }
}
