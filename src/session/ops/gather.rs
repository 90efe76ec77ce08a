//! Operations that repeat, choose and distribute parts of tensors.

use std::collections::HashMap;
use std::hash::Hash;

use bytes::Bytes;

use super::array::{one_integer, whole};
use super::broadcast::{axis, extents, text};
use super::number::{Number, all_types, numbers};
use super::parts::{around, joined};
use super::{Kernel, OpDef};
use crate::session::{Call, DType, Node, OpError, Tensor, tensor_elements};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("ConcatOffset", concat_offset),
    OpDef::new("Tile", tile),
    OpDef::new("Pad", pad),
    OpDef::new("PadV2", pad),
    OpDef::new("Gather", gather),
    OpDef::new("GatherV2", gather),
    OpDef::new("ResourceGather", gather),
    OpDef::new("DynamicStitch", stitch),
    OpDef::new("ParallelDynamicStitch", stitch),
    OpDef::new("DynamicPartition", partition),
    OpDef::new("UnsortedSegmentSum", segment_sum),
    OpDef::new("Unique", unique),
];

/// Where each part begins in what a concatenation made of them.
fn concat_offset(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let at = one_integer(call, 0)?;
        let mut offset = 0i32;
        for i in 1..call.inputs() {
            let shape = call.tensor(i)?;
            let shape = shape.slice::<i32>()?;
            let at = axis(at, shape.len())?;
            let mut out = vec![0; shape.len()];
            out[at] = offset;
            offset = offset.wrapping_add(shape[at]);
            call.set(i - 1, Tensor::vector(out)?);
        }
        Ok(())
    }))
}

fn tile(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (mut value, times) = (call.take(0)?, extents(&call.tensor(1)?)?);
        if times.len() != value.shape().len() {
            return Err(OpError::invalid(format!(
                "Expected multiples argument to be a vector of length {} but got length {}",
                value.shape().len(),
                times.len()
            )));
        }
        let to = value.shape().iter().zip(times.iter()).map(|(dim, n)| dim.saturating_mul(*n));
        let to: Vec<usize> = to.collect();
        tensor_elements(value.dtype(), &to)?;
        if to.contains(&0) {
            call.set(0, Tensor::zeros(value.dtype(), to)?);
            return Ok(());
        }
        // Innermost first, so that what is copied last is long.
        for at in (0..times.len()).rev().filter(|&at| times[at] != 1) {
            let run: usize = value.shape()[at..].iter().product();
            let mut shape = value.shape().to_vec();
            shape[at] *= times[at];
            value = all_types!(value.dtype(), T => {
                let mut out: Vec<T> = Vec::with_capacity(value.len() * times[at]);
                for row in value.slice::<T>()?.chunks_exact(run) {
                    (0..times[at]).for_each(|_| out.extend_from_slice(row));
                }
                Tensor::new(shape, out)?
            });
        }
        call.set(0, value);
        Ok(())
    }))
}

fn pad(node: &Node<'_>) -> Result<Kernel, OpError> {
    let given = node.op() == "PadV2";
    Ok(Kernel::new(move |call| {
        let (value, widths) = (call.tensor(0)?, call.tensor(1)?);
        let rank = value.shape().len();
        if **widths.shape() != [rank, 2] {
            return Err(OpError::invalid(format!(
                "paddings must be a matrix of {rank} by 2, not {}",
                text(widths.shape())
            )));
        }
        let widths: Result<Vec<usize>, _> =
            widths.integers()?.into_iter().map(usize::try_from).collect();
        let widths = widths.map_err(|_| OpError::invalid("Paddings must be non-negative"))?;
        let mut out = value.clone();
        for at in 0..rank {
            let mut parts = Vec::with_capacity(3);
            for (side, width) in [widths[2 * at], widths[2 * at + 1]].into_iter().enumerate() {
                if side == 1 {
                    parts.push(out.clone());
                }
                let mut shape = out.shape().to_vec();
                shape[at] = width;
                parts.push(match given {
                    false => Tensor::zeros(out.dtype(), shape)?,
                    true => all_types!(out.dtype(), T => {
                        Tensor::full(shape, call.tensor(2)?.item::<T>()?)?
                    }),
                });
            }
            out = joined(&parts, at)?;
        }
        call.set(0, out);
        Ok(())
    }))
}

fn gather(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (op, batch) = (node.op().to_owned(), node.int("batch_dims", 0)?);
    if batch != 0 {
        return Err(OpError::unimplemented("gather with batch_dims is not supported"));
    }
    Ok(Kernel::new(move |call| {
        let values = match op.as_str() {
            "ResourceGather" => call.variable(0)?.read()?,
            _ => call.tensor(0)?,
        };
        let indices = call.tensor(1)?;
        let at = if op == "GatherV2" { one_integer(call, 2)? } else { 0 };
        let at = axis(at, values.shape().len())?;
        let (outer, extent, inner) = around(values.shape(), at);
        let places: Result<Vec<usize>, OpError> = indices
            .integers()?
            .into_iter()
            .enumerate()
            .map(|(i, index)| {
                usize::try_from(index).ok().filter(|&index| index < extent).ok_or_else(|| {
                    OpError::invalid(format!("indices[{i}] = {index} is not in [0, {extent})"))
                })
            })
            .collect();
        let places = places?;
        let mut shape = values.shape()[..at].to_vec();
        shape.extend_from_slice(indices.shape());
        shape.extend_from_slice(&values.shape()[at + 1..]);
        let count = tensor_elements(values.dtype(), &shape)?;
        let out = all_types!(values.dtype(), T => {
            let from = values.slice::<T>()?;
            let mut out: Vec<T> = Vec::with_capacity(count);
            for row in 0..outer {
                for place in &places {
                    let first = (row * extent + place) * inner;
                    out.extend_from_slice(&from[first..first + inner]);
                }
            }
            Tensor::new(shape, out)?
        });
        call.set(0, out);
        Ok(())
    }))
}

/// Rows go where their indices say; of two that go to one place the later stays.
fn stitch(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let n = call.inputs() / 2;
        let mut pairs = Vec::with_capacity(n);
        let mut extent = 0;
        let mut row: Option<Vec<usize>> = None;
        for i in 0..n {
            let (indices, data) = (call.tensor(i)?, call.tensor(n + i)?);
            let tail = data.shape().strip_prefix(&**indices.shape()).ok_or_else(|| {
                OpError::invalid(format!(
                    "data[{i}].shape = {} does not start with indices[{i}].shape = {}",
                    text(data.shape()),
                    text(indices.shape())
                ))
            })?;
            if row.get_or_insert_with(|| tail.to_vec()) != tail {
                return Err(OpError::invalid("the rows of data differ in shape"));
            }
            let indices: Result<Vec<usize>, _> =
                indices.integers()?.into_iter().map(usize::try_from).collect();
            let indices = indices.map_err(|_| OpError::invalid("indices must be >= 0"))?;
            extent = indices.iter().fold(extent, |n: usize, i| n.max(i.saturating_add(1)));
            pairs.push((indices, data));
        }
        let row = row.ok_or_else(|| OpError::invalid("nothing to stitch"))?;
        let run: usize = row.iter().product();
        let dtype = pairs[0].1.dtype();
        let mut out = Tensor::zeros(dtype, [&[extent], row.as_slice()].concat())?;
        all_types!(dtype, T => {
            let to = out.slice_mut::<T>()?;
            for (indices, data) in &pairs {
                let from = data.slice::<T>()?;
                for (i, at) in indices.iter().enumerate() {
                    to[at * run..(at + 1) * run].clone_from_slice(&from[i * run..(i + 1) * run]);
                }
            }
        });
        call.set(0, out);
        Ok(())
    }))
}

fn partition(node: &Node<'_>) -> Result<Kernel, OpError> {
    let count = node.int("num_partitions", 1)?;
    let count = usize::try_from(count).ok().filter(|n| (1..1 << 16).contains(n));
    let count = count.ok_or_else(|| node.wrong("num_partitions"))?;
    Ok(Kernel::new(move |call| {
        let (data, parts) = (call.tensor(0)?, call.tensor(1)?);
        let row = data.shape().strip_prefix(&**parts.shape()).ok_or_else(|| {
            OpError::invalid("the shape of data does not start with that of partitions")
        })?;
        let run: usize = row.iter().product();
        let mut chosen = vec![Vec::new(); count];
        for (i, part) in parts.integers()?.into_iter().enumerate() {
            let part = usize::try_from(part).ok().and_then(|part| chosen.get_mut(part));
            part.ok_or_else(|| {
                OpError::invalid(format!("partitions[{i}] is not in [0, {count})"))
            })?
            .push(i);
        }
        for (output, rows) in chosen.into_iter().enumerate() {
            let shape = [&[rows.len()], row].concat();
            let part = all_types!(data.dtype(), T => {
                let from = data.slice::<T>()?;
                let values = rows.iter().flat_map(|i| &from[i * run..(i + 1) * run]);
                Tensor::new(shape, values.cloned().collect::<Vec<T>>())?
            });
            call.set(output, part);
        }
        Ok(())
    }))
}

fn segment_sum(_: &Node<'_>) -> Result<Kernel, OpError> {
    fn add<T: Number>(call: &Call<'_>, data: &Tensor) -> Result<Tensor, OpError> {
        let (segments, count) = (call.tensor(1)?, one_integer(call, 2)?);
        let count =
            usize::try_from(count).map_err(|_| OpError::invalid("num_segments must be >= 0"))?;
        let row = data.shape().strip_prefix(&**segments.shape()).ok_or_else(|| {
            OpError::invalid("the shape of data does not start with that of segment_ids")
        })?;
        let run: usize = row.iter().product();
        let mut out = Tensor::zeros(T::DTYPE, [&[count], row].concat())?;
        let (to, from) = (out.slice_mut::<T>()?, data.slice::<T>()?);
        for (i, segment) in segments.integers()?.into_iter().enumerate() {
            // Negative ones are left out.
            let Ok(segment) = usize::try_from(segment) else { continue };
            if segment >= count {
                return Err(OpError::invalid(format!(
                    "segment_ids[{i}] = {segment} is not in [0, {count})"
                )));
            }
            let sums = &mut to[segment * run..(segment + 1) * run];
            let row = &from[i * run..(i + 1) * run];
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum = sum.add(*x));
        }
        Ok(out)
    }
    Ok(Kernel::new(|call| {
        let data = call.tensor(0)?;
        let out = numbers!(data.dtype(), T => add::<T>(call, &data))?;
        call.set(0, out);
        Ok(())
    }))
}

/// Each value once, in the order of first occurrence, and where each element is among them.
fn unique(node: &Node<'_>) -> Result<Kernel, OpError> {
    fn first<T: Clone + Eq + Hash>(values: impl Iterator<Item = T>) -> (Vec<T>, Vec<usize>) {
        let (mut seen, mut found, mut places) = (HashMap::new(), Vec::new(), Vec::new());
        for value in values {
            let next = found.len();
            let place = *seen.entry(value.clone()).or_insert(next);
            if place == next {
                found.push(value);
            }
            places.push(place);
        }
        (found, places)
    }
    let to = node.dtype_or("out_idx", DType::I32)?;
    Ok(Kernel::new(move |call| {
        let value = call.tensor(0)?;
        if value.shape().len() != 1 {
            return Err(OpError::invalid("unique expects a 1D vector."));
        }
        let (found, places) = match value.dtype() {
            DType::Str => {
                let (found, places) = first(value.slice::<Bytes>()?.iter().cloned());
                (Tensor::vector(found)?, places)
            }
            DType::I32 => {
                let (found, places) = first(value.slice::<i32>()?.iter().copied());
                (Tensor::vector(found)?, places)
            }
            _ => {
                let (found, places) = first(value.slice::<i64>()?.iter().copied());
                (Tensor::vector(found)?, places)
            }
        };
        call.set(0, found);
        call.set(1, whole(to, &[places.len()], places.into_iter())?);
        Ok(())
    }))
}
