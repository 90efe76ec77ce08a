//! Operations that take tensors apart and put them together.

#![allow(clippy::clone_on_copy, reason = "strings share the code of numbers")]

use super::array::one_integer;
use super::broadcast::{axis, strides, text};
use super::number::all_types;
use super::{Kernel, OpDef};
use crate::session::{Call, Element, Node, OpError, Tensor, tensor_elements};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("StridedSlice", strided_slice),
    OpDef::new("StridedSliceGrad", strided_slice_grad),
    OpDef::new("Slice", slice),
    OpDef::new("ReverseV2", reverse),
    OpDef::new("Transpose", transpose),
    OpDef::new("Concat", concat),
    OpDef::new("ConcatV2", concat),
    OpDef::new("Pack", pack),
    OpDef::new("Unpack", unpack),
    OpDef::new("Split", split),
    OpDef::new("SplitV", split),
];

/// How many tensors may be made of one.
const MOST_PARTS: usize = 1 << 22;

/// Elements of a tensor at regular distances.
struct View {
    start: i64,
    /// Extents and strides, outermost first.
    dims: Vec<(usize, i64)>,
}

impl View {
    /// Where each element lies. Every place is inside the tensor that the view was made for.
    fn places(&self) -> impl Iterator<Item = usize> {
        let count: usize = self.dims.iter().map(|dim| dim.0).product();
        let mut at = vec![0; self.dims.len()];
        let mut place = self.start;
        (0..count).map(move |_| {
            let now = place as usize;
            for (at, &(extent, stride)) in at.iter_mut().zip(&self.dims).rev() {
                *at += 1;
                place += stride;
                if *at < extent {
                    break;
                }
                place -= stride * extent as i64;
                *at = 0;
            }
            now
        })
    }

    fn read<T: Element>(&self, from: &[T]) -> Vec<T> {
        match self.dims.split_last() {
            // Whole rows where they lie together.
            Some((&(row, 1), outer)) if row > 8 => {
                let rows = View { start: self.start, dims: outer.to_vec() };
                rows.places().flat_map(|at| &from[at..at + row]).cloned().collect()
            }
            _ => self.places().map(|at| from[at].clone()).collect(),
        }
    }
}

/// The masks of a strided slice.
#[derive(Clone, Copy)]
struct Masks {
    begin: i64,
    end: i64,
    ellipsis: i64,
    new_axis: i64,
    shrink: i64,
}

impl Masks {
    fn of(node: &Node<'_>) -> Result<Self, OpError> {
        Ok(Self {
            begin: node.int("begin_mask", 0)?,
            end: node.int("end_mask", 0)?,
            ellipsis: node.int("ellipsis_mask", 0)?,
            new_axis: node.int("new_axis_mask", 0)?,
            shrink: node.int("shrink_axis_mask", 0)?,
        })
    }

    /// The view of a tensor of this shape, and the shape of what it shows.
    fn view(
        &self,
        shape: &[usize],
        [begin, end, step]: [&[i64]; 3],
    ) -> Result<(View, Vec<usize>), OpError> {
        if begin.len() != end.len() || begin.len() != step.len() || begin.len() > 63 {
            return Err(OpError::invalid("begin, end and strides must be vectors of one length"));
        }
        let has = |mask: i64, i: usize| mask >> i & 1 == 1;
        let takes = |i: &usize| !has(self.ellipsis, *i) && !has(self.new_axis, *i);
        let taken = (0..begin.len()).filter(takes).count();
        let Some(mut spare) = shape.len().checked_sub(taken) else {
            return Err(OpError::invalid(format!(
                "Index out of range using input dim {}; input has only {} dims",
                shape.len(),
                shape.len()
            )));
        };
        let lengths = strides(shape);
        let (mut view, mut result) = (View { start: 0, dims: Vec::new() }, Vec::new());
        let mut d = 0;
        for i in 0..begin.len() {
            if has(self.ellipsis, i) {
                for _ in 0..std::mem::take(&mut spare) {
                    view.dims.push((shape[d], lengths[d] as i64));
                    result.push(shape[d]);
                    d += 1;
                }
                continue;
            }
            if has(self.new_axis, i) {
                result.push(1);
                continue;
            }
            let (size, length, step) = (shape[d] as i64, lengths[d] as i64, step[i]);
            if step == 0 {
                return Err(OpError::invalid(format!("strides[{i}] must be non-zero")));
            }
            if has(self.shrink, i) {
                let at = if begin[i] < 0 { begin[i].saturating_add(size) } else { begin[i] };
                if !(0..size).contains(&at) {
                    return Err(OpError::invalid(format!(
                        "slice index {} of dimension {d} out of bounds.",
                        begin[i]
                    )));
                }
                view.start += at * length;
                d += 1;
                continue;
            }
            let (low, high) = if step > 0 { (0, size) } else { (-1, size - 1) };
            let inside =
                |at: i64| (if at < 0 { at.saturating_add(size) } else { at }).clamp(low, high);
            let (first, last) = if step > 0 { (low, high) } else { (high, low) };
            let from = if has(self.begin, i) { first } else { inside(begin[i]) };
            let to = if has(self.end, i) { last } else { inside(end[i]) };
            let span = if step > 0 { to - from } else { from - to };
            let count = span.max(0).unsigned_abs().div_ceil(step.unsigned_abs()) as usize;
            if count > 0 {
                view.start += from * length;
            }
            // The stride of a single element may be anything; a huge one must not overflow.
            let stride = if count > 1 { step * length } else { length };
            view.dims.push((count, stride));
            result.push(count);
            d += 1;
        }
        for d in d..shape.len() {
            view.dims.push((shape[d], lengths[d] as i64));
            result.push(shape[d]);
        }
        Ok((view, result))
    }
}

fn strided_slice(node: &Node<'_>) -> Result<Kernel, OpError> {
    let masks = Masks::of(node)?;
    Ok(Kernel::new(move |call| {
        let value = call.tensor(0)?;
        let (begin, end, step) = bounds(call, 1)?;
        let (view, shape) = masks.view(value.shape(), [&begin, &end, &step])?;
        let out =
            all_types!(value.dtype(), T => Tensor::new(shape, view.read(value.slice::<T>()?))?);
        call.set(0, out);
        Ok(())
    }))
}

type Bounds = (Vec<i64>, Vec<i64>, Vec<i64>);

fn bounds(call: &Call<'_>, first: usize) -> Result<Bounds, OpError> {
    let numbers = |i| call.tensor(first + i)?.integers();
    Ok((numbers(0)?, numbers(1)?, numbers(2)?))
}

fn strided_slice_grad(node: &Node<'_>) -> Result<Kernel, OpError> {
    let masks = Masks::of(node)?;
    Ok(Kernel::new(move |call| {
        let shape = super::broadcast::extents(&call.tensor(0)?)?;
        let (begin, end, step) = bounds(call, 1)?;
        let dy = call.tensor(4)?;
        tensor_elements(dy.dtype(), &shape)?;
        let (view, shown) = masks.view(&shape, [&begin, &end, &step])?;
        if shown.iter().product::<usize>() != dy.len() {
            return Err(OpError::invalid(format!(
                "shape of dy was {} instead of {}",
                text(dy.shape()),
                text(&shown)
            )));
        }
        let mut out = Tensor::zeros(dy.dtype(), shape)?;
        all_types!(dy.dtype(), T => {
            let values = out.slice_mut::<T>()?;
            view.places().zip(dy.slice::<T>()?).for_each(|(at, dy)| values[at] = dy.clone());
        });
        call.set(0, out);
        Ok(())
    }))
}

fn slice(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let value = call.tensor(0)?;
        let (begin, size) = (call.tensor(1)?.integers()?, call.tensor(2)?.integers()?);
        let shape = value.shape();
        if begin.len() != shape.len() || size.len() != shape.len() {
            return Err(OpError::invalid("begin and size must have one number a dimension"));
        }
        let mut view = View { start: 0, dims: Vec::new() };
        for (i, length) in strides(shape).into_iter().enumerate() {
            let extent = shape[i] as i64;
            let size = if size[i] == -1 { extent - begin[i].clamp(0, extent) } else { size[i] };
            let end = begin[i].checked_add(size);
            if begin[i] < 0 || size < 0 || end.is_none_or(|end| end > extent) {
                return Err(OpError::invalid(format!(
                    "Expected size[{i}] in [0, {}], but got {size}",
                    extent - begin[i].clamp(0, extent)
                )));
            }
            view.start += begin[i] * length as i64;
            view.dims.push((size as usize, length as i64));
        }
        let to: Vec<usize> = view.dims.iter().map(|dim| dim.0).collect();
        let out = all_types!(value.dtype(), T => Tensor::new(to, view.read(value.slice::<T>()?))?);
        call.set(0, out);
        Ok(())
    }))
}

fn reverse(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (value, axes) = (call.tensor(0)?, call.tensor(1)?.integers()?);
        let shape = value.shape();
        let mut view = View { start: 0, dims: Vec::new() };
        view.dims.extend(shape.iter().zip(strides(shape)).map(|(&dim, s)| (dim, s as i64)));
        for at in axes {
            let (extent, stride) = &mut view.dims[axis(at, shape.len())?];
            view.start += *stride * (*extent as i64 - 1).max(0);
            *stride = -*stride;
        }
        let out = all_types!(value.dtype(), T => {
            Tensor::new(shape.clone(), view.read(value.slice::<T>()?))?
        });
        call.set(0, out);
        Ok(())
    }))
}

fn transpose(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (value, order) = (call.tensor(0)?, call.tensor(1)?.integers()?);
        let (shape, lengths) = (value.shape(), strides(value.shape()));
        let axes: Result<Vec<usize>, _> = order.iter().map(|&at| axis(at, shape.len())).collect();
        let axes = axes?;
        if axes.len() != shape.len() || (0..shape.len()).any(|at| !axes.contains(&at)) {
            return Err(OpError::invalid(format!(
                "perm {order:?} is no order of the {} dimensions",
                shape.len()
            )));
        }
        let dims: Vec<_> = axes.iter().map(|&at| (shape[at], lengths[at] as i64)).collect();
        let to: Vec<usize> = dims.iter().map(|dim| dim.0).collect();
        let view = View { start: 0, dims };
        let out = all_types!(value.dtype(), T => Tensor::new(to, view.read(value.slice::<T>()?))?);
        call.set(0, out);
        Ok(())
    }))
}

/// Extents before, at and after an axis.
pub(super) fn around(shape: &[usize], at: usize) -> (usize, usize, usize) {
    (shape[..at].iter().product(), shape[at], shape[at + 1..].iter().product())
}

/// Tensors side by side along an axis; their other extents must agree.
pub(super) fn joined(parts: &[Tensor], at: usize) -> Result<Tensor, OpError> {
    let first = parts.first().ok_or_else(|| OpError::invalid("nothing to concatenate"))?;
    let mut shape = first.shape().to_vec();
    shape[at] = 0;
    for (i, part) in parts.iter().enumerate() {
        let own = part.shape();
        let fits = own.len() == shape.len()
            && (0..shape.len()).all(|d| d == at || own[d] == first.shape()[d]);
        if !fits || part.dtype() != first.dtype() {
            return Err(OpError::invalid(format!(
                "ConcatOp : Dimensions of inputs should match: shape[0] = {} vs. shape[{i}] = {}",
                text(first.shape()),
                text(own)
            )));
        }
        shape[at] = shape[at].saturating_add(own[at]);
    }
    let (outer, _, inner) = around(&shape, at);
    let count = tensor_elements(first.dtype(), &shape)?;
    all_types!(first.dtype(), T => {
        let slices: Result<Vec<(&[T], usize)>, OpError> =
            parts.iter().map(|part| Ok((part.slice::<T>()?, part.shape()[at] * inner))).collect();
        let slices = slices?;
        let mut out: Vec<T> = Vec::with_capacity(count);
        for row in 0..outer {
            slices.iter().for_each(|(s, run)| out.extend_from_slice(&s[row * run..(row + 1) * run]));
        }
        Tensor::new(shape, out)
    })
}

fn concat(node: &Node<'_>) -> Result<Kernel, OpError> {
    let axis_first = node.op() == "Concat";
    Ok(Kernel::new(move |call| {
        let count = call.inputs().saturating_sub(1);
        let (at, first) = if axis_first { (0, 1) } else { (count, 0) };
        let at = one_integer(call, at)?;
        let parts: Result<Vec<Tensor>, _> =
            (first..first + count).map(|i| call.tensor(i)).collect();
        let parts = parts?;
        let rank = parts.first().map_or(0, |part| part.shape().len());
        let out = joined(&parts, axis(at, rank)?)?;
        call.set(0, out);
        Ok(())
    }))
}

fn pack(node: &Node<'_>) -> Result<Kernel, OpError> {
    let at = node.int("axis", 0)?;
    Ok(Kernel::new(move |call| {
        let parts: Result<Vec<Tensor>, OpError> = (0..call.inputs())
            .map(|i| {
                let part = call.tensor(i)?;
                let mut dims = part.shape().to_vec();
                dims.insert(axis(at, dims.len() + 1)?, 1);
                part.reshaped(dims)
            })
            .collect();
        let parts = parts?;
        let rank = parts.first().map_or(0, |part| part.shape().len());
        let out = joined(&parts, axis(at, rank)?)?;
        call.set(0, out);
        Ok(())
    }))
}

/// Parts of `sizes` along an axis.
fn cut(value: &Tensor, at: usize, sizes: &[usize]) -> Result<Vec<Tensor>, OpError> {
    let (outer, whole, inner) = around(value.shape(), at);
    let mut first = 0;
    let mut parts = Vec::with_capacity(sizes.len());
    for &size in sizes {
        let mut shape = value.shape().to_vec();
        shape[at] = size;
        let rows = (0..outer).map(|row| (row * whole + first) * inner);
        parts.push(all_types!(value.dtype(), T => {
            let from = value.slice::<T>()?;
            Tensor::new(shape, rows.flat_map(|at| &from[at..at + size * inner]).cloned().collect::<Vec<T>>())?
        }));
        first += size;
    }
    Ok(parts)
}

/// Each part is a tensor of its own, much larger than an element: a small graph must not ask for too many.
fn few(parts: usize) -> Result<(), OpError> {
    match parts {
        0..=MOST_PARTS => Ok(()),
        _ => {
            Err(OpError::exhausted(format!("{parts} rows: at most {MOST_PARTS} are made tensors")))
        }
    }
}

/// The rows of a tensor, without their first extent.
pub(super) fn rows(value: &Tensor) -> Result<Vec<Tensor>, OpError> {
    let count = value.shape().first().copied().unwrap_or(0);
    few(count)?;
    let row = value.shape().get(1..).unwrap_or_default();
    cut(value, 0, &vec![1; count])?.into_iter().map(|part| part.reshaped(row)).collect()
}

fn unpack(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (at, count) = (node.int("axis", 0)?, node.int("num", 0)?);
    Ok(Kernel::new(move |call| {
        let value = call.tensor(0)?;
        let at = axis(at, value.shape().len())?;
        let extent = value.shape()[at];
        if extent as i64 != count {
            return Err(OpError::invalid(format!(
                "Input shape axis {at} must equal {count}, got shape {}",
                text(value.shape())
            )));
        }
        few(extent)?;
        for (i, part) in cut(&value, at, &vec![1; extent])?.into_iter().enumerate() {
            let mut dims = part.shape().to_vec();
            dims.remove(at);
            call.set(i, part.reshaped(dims)?);
        }
        Ok(())
    }))
}

fn split(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (sized, count) = (node.op() == "SplitV", node.int("num_split", 1)?);
    let count = usize::try_from(count).ok().filter(|count| (1..1 << 20).contains(count));
    let count = count.ok_or_else(|| node.wrong("num_split"))?;
    Ok(Kernel::new(move |call| {
        let (value, at) = match sized {
            true => (call.tensor(0)?, one_integer(call, 2)?),
            false => (call.tensor(1)?, one_integer(call, 0)?),
        };
        let at = axis(at, value.shape().len())?;
        let extent = value.shape()[at];
        let wrong = || {
            OpError::invalid(format!(
                "Number of ways to split should evenly divide the split dimension, but got split_dim {at} (size = {extent}) and num_split {count}"
            ))
        };
        let sizes = match sized {
            false if extent % count != 0 => return Err(wrong()),
            false => vec![extent / count; count],
            true => {
                let given = call.tensor(1)?.integers()?;
                let known: i64 =
                    given.iter().filter(|s| **s >= 0).fold(0, |n, s| n.saturating_add(*s));
                let rest = extent as i64 - known;
                let sizes = given.iter().map(|&s| if s == -1 { rest } else { s });
                let sizes: Result<Vec<usize>, _> = sizes.map(usize::try_from).collect();
                let sizes = sizes.map_err(|_| wrong())?;
                let sum = sizes.iter().fold(0usize, |n, s| n.saturating_add(*s));
                if sum != extent || sizes.len() != count {
                    return Err(wrong());
                }
                sizes
            }
        };
        let parts = cut(&value, at, &sizes)?;
        parts.into_iter().enumerate().for_each(|(i, part)| call.set(i, part));
        Ok(())
    }))
}
