//! Operands of different shapes: extents of 1 stretch, missing ones in front are 1.

use bytes::Bytes;

use crate::session::{Element, OpError, Tensor};
use crate::tensor::Shape;

/// A shape as TensorFlow prints it: `[2,3]`.
pub(super) fn text(shape: &[usize]) -> String {
    format!("[{}]", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
}

/// The shape that both stretch to.
pub(super) fn shape(a: &[usize], b: &[usize]) -> Result<Vec<usize>, OpError> {
    let rank = a.len().max(b.len());
    let dim = |s: &[usize], i: usize| (i + s.len()).checked_sub(rank).map_or(1, |i| s[i]);
    let stretch = |i| match (dim(a, i), dim(b, i)) {
        (x, y) if x == y => Some(x),
        (1, y) => Some(y),
        (x, 1) => Some(x),
        _ => None,
    };
    let dims: Option<Vec<usize>> = (0..rank).map(stretch).collect();
    dims.ok_or_else(|| {
        OpError::invalid(format!("Incompatible shapes: {} vs. {}", text(a), text(b)))
    })
}

/// Visits the elements of a tensor of shape `from` in the order of the shape `to`, which it stretches to.
pub(super) struct Walk {
    /// Extents and strides of `from`, innermost first, neighbours merged where they lie in one run.
    dims: Vec<(usize, usize)>,
    at: Vec<usize>,
    index: usize,
}

impl Walk {
    pub(super) fn new(from: &[usize], to: &[usize]) -> Self {
        let mut stride = 1;
        let mut dims: Vec<(usize, usize)> = Vec::new();
        for (i, &extent) in to.iter().rev().enumerate() {
            let own = from.len().checked_sub(i + 1).map_or(1, |at| from[at]);
            let step = if own == 1 { 0 } else { stride };
            stride *= own;
            match dims.last_mut() {
                Some((n, inner)) if *inner * *n == step && (*inner != 0 || step == 0) => {
                    *n *= extent
                }
                _ => dims.push((extent, step)),
            }
        }
        Self { at: vec![0; dims.len()], dims, index: 0 }
    }
}

impl Iterator for Walk {
    type Item = usize;

    /// Without an end: the caller knows how many there are.
    fn next(&mut self) -> Option<usize> {
        let index = self.index;
        for (at, &(extent, stride)) in self.at.iter_mut().zip(&self.dims) {
            *at += 1;
            self.index += stride;
            if *at < extent {
                break;
            }
            self.index -= stride * extent;
            *at = 0;
        }
        Some(index)
    }
}

/// The elements of `tensor` in the shape `to`.
pub(super) fn stretch<T: Element>(tensor: &Tensor, to: &[usize]) -> Result<Vec<T>, OpError> {
    let from = tensor.slice::<T>()?;
    let count = crate::session::tensor_elements(T::DTYPE, to)?;
    if let [value] = from {
        return Ok(vec![value.clone(); count]);
    }
    Ok(Walk::new(tensor.shape(), to).take(count).map(|i| from[i].clone()).collect())
}

/// Whether `inner` is `outer` without some extents in front, so that it repeats as a whole.
fn repeats(inner: &[usize], outer: &[usize]) -> bool {
    let skip = inner.iter().take_while(|&&dim| dim == 1).count();
    outer.ends_with(&inner[skip..])
}

/// `f` of both operands, element by element.
pub(super) fn zip<A: Element + Copy, B: Element + Copy, O: Element>(
    a: &Tensor,
    b: &Tensor,
    f: impl Fn(A, B) -> O,
) -> Result<Tensor, OpError> {
    let (x, y) = (a.slice::<A>()?, b.slice::<B>()?);
    if a.shape() == b.shape() {
        let out = x.iter().zip(y).map(|(&x, &y)| f(x, y)).collect();
        return Tensor::new(a.shape().clone(), out);
    }
    let to = shape(a.shape(), b.shape())?;
    let count = crate::session::tensor_elements(O::DTYPE, &to)?;
    let out: Vec<O> = match (x, y) {
        _ if count == 0 => Vec::new(),
        (x, &[y]) if x.len() == count => x.iter().map(|&x| f(x, y)).collect(),
        (&[x], y) if y.len() == count => y.iter().map(|&y| f(x, y)).collect(),
        _ if x.len() == count && repeats(b.shape(), &to) => {
            let row = |x: &[A]| x.iter().zip(y).map(|(&x, &y)| f(x, y)).collect::<Vec<_>>();
            x.chunks_exact(y.len()).flat_map(row).collect()
        }
        _ => {
            let pairs = Walk::new(a.shape(), &to).zip(Walk::new(b.shape(), &to)).take(count);
            pairs.map(|(i, j)| f(x[i], y[j])).collect()
        }
    };
    Tensor::new(to, out)
}

/// The same where the result may lie in the first operand's memory.
pub(super) fn zip_into<T: Element + Copy>(
    mut a: Tensor,
    b: &Tensor,
    f: impl Fn(T, T) -> T,
) -> Result<Tensor, OpError> {
    let stretched = a.shape() != b.shape() && !(b.len() == 1 && b.shape().len() <= a.shape().len());
    if stretched {
        return zip(&a, b, f);
    }
    match b.slice::<T>()? {
        &[y] => a.slice_mut::<T>()?.iter_mut().for_each(|x| *x = f(*x, y)),
        y => a.slice_mut::<T>()?.iter_mut().zip(y).for_each(|(x, &y)| *x = f(*x, y)),
    }
    Ok(a)
}

/// Strings share what they hold until they are joined: the sum of their lengths is bounded too.
pub(super) fn bounded<'a>(columns: impl Iterator<Item = &'a [Bytes]>) -> Result<(), OpError> {
    let bytes = columns.flatten().fold(0usize, |sum, text| sum.saturating_add(text.len()));
    crate::session::tensor_elements(crate::session::DType::U8, &[bytes]).map(drop)
}

/// Row-major strides of a shape.
pub(super) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1] * shape[i + 1].max(1);
    }
    strides
}

/// A whole number as an axis of `rank` dimensions; negative ones count from the end.
pub(super) fn axis(axis: i64, rank: usize) -> Result<usize, OpError> {
    let signed = rank as i64;
    let at = if axis < 0 { axis.checked_add(signed) } else { Some(axis) };
    at.filter(|at| (0..signed).contains(at)).map(|at| at as usize).ok_or_else(|| {
        OpError::invalid(format!(
            "Expected dimension in the range [{}, {signed}), but got {axis}",
            -signed
        ))
    })
}

/// Whole numbers as extents.
pub(super) fn extents(tensor: &Tensor) -> Result<Shape, OpError> {
    let dims = tensor.integers()?;
    let dims: Result<Vec<usize>, _> = dims.iter().map(|&dim| usize::try_from(dim)).collect();
    dims.map(Shape::from).map_err(|_| OpError::invalid("Dimensions must be >= 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn walks_repeat_what_stretches() {
        let walk = |from: &[usize], to: &[usize]| {
            Walk::new(from, to).take(to.iter().product()).collect::<Vec<_>>()
        };
        assert_eq!(walk(&[3], &[2, 3]), [0, 1, 2, 0, 1, 2]);
        assert_eq!(walk(&[2, 1], &[2, 3]), [0, 0, 0, 1, 1, 1]);
        assert_eq!(walk(&[2, 1, 2], &[2, 2, 2]), [0, 1, 0, 1, 2, 3, 2, 3]);
        assert_eq!(walk(&[], &[2, 2]), [0; 4]);
        assert_eq!(walk(&[2, 3], &[2, 3]), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn shapes_that_do_not_fit_are_named() {
        let error = shape(&[2, 3], &[2]).unwrap_err();
        assert_eq!(error.message, "Incompatible shapes: [2,3] vs. [2]");
        assert_eq!(shape(&[2, 1], &[3]).unwrap(), [2, 3]);
        assert_eq!(shape(&[0, 1], &[1, 4]).unwrap(), [0, 4]);
        assert!(axis(i64::MIN, 2).is_err());
        assert_eq!(axis(-1, 2).unwrap(), 1);
    }
}
