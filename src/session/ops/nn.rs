//! Softmax, its losses, biases and ranks.

use super::array::one_integer;
use super::broadcast::text;
use super::number::{Real, numbers, reals};
use super::{Kernel, OpDef};
use crate::session::{Call, Node, OpError, Tensor};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Softmax", softmax),
    OpDef::new("LogSoftmax", softmax),
    OpDef::new("SparseSoftmaxCrossEntropyWithLogits", sparse_cross_entropy),
    OpDef::new("SoftmaxCrossEntropyWithLogits", cross_entropy),
    OpDef::new("BiasAdd", bias_add),
    OpDef::new("BiasAddV1", bias_add),
    OpDef::new("BiasAddGrad", bias_add_grad),
    OpDef::new("InTopK", in_top_k),
    OpDef::new("InTopKV2", in_top_k),
    OpDef::new("TopKV2", top_k),
];

/// The kernels know pictures with the channels last, and nothing else.
pub(super) fn channels_last(node: &Node<'_>) -> Result<(), OpError> {
    match node.text("data_format")? {
        "" | "NHWC" => Ok(()),
        other => Err(OpError::unimplemented(format!(
            "data_format {other} is not supported on CPU: use NHWC"
        ))),
    }
}

/// The extent of the rows of a matrix, or of anything seen as one.
fn columns(value: &Tensor) -> Result<usize, OpError> {
    match value.shape().last() {
        Some(&columns) => Ok(columns.max(1)),
        None => Err(OpError::invalid("logits must have >= 1 dimension, got []")),
    }
}

macro_rules! row_maximum {
    ($row:expr, $t:ty) => {
        $row.iter().fold(<$t>::NEG_INFINITY, |max, &x| if x > max { x } else { max })
    };
}

fn softmax(node: &Node<'_>) -> Result<Kernel, OpError> {
    let log = node.op() == "LogSoftmax";
    reals!(node.dtype("T")?, T => Ok(Kernel::new(move |call| {
        let mut value = call.take(0)?;
        let columns = columns(&value)?;
        for row in value.slice_mut::<T>()?.chunks_exact_mut(columns) {
            let max = row_maximum!(row, T);
            if log {
                let sum = row.iter().map(|x| (x - max).exp()).sum::<T>().ln();
                row.iter_mut().for_each(|x| *x = *x - max - sum);
                continue;
            }
            row.iter_mut().for_each(|x| *x = (*x - max).exp());
            let sum = row.iter().sum::<T>();
            row.iter_mut().for_each(|x| *x /= sum);
        }
        call.set(0, value);
        Ok(())
    })))
}

/// Loss and gradient of each row, for one right class each.
fn sparse_cross_entropy(node: &Node<'_>) -> Result<Kernel, OpError> {
    reals!(node.dtype("T")?, T => Ok(Kernel::new(|call| {
        let (mut logits, labels) = (call.take(0)?, call.tensor(1)?);
        let shape = logits.shape().clone();
        if shape.len() != 2 || **labels.shape() != shape[..1] {
            return Err(OpError::invalid(format!(
                "logits and labels must have the same first dimension, got logits shape {} and labels shape {}",
                text(&shape),
                text(labels.shape())
            )));
        }
        let classes = shape[1];
        if classes == 0 {
            return Err(OpError::invalid("Must have at least one class, but got logits shape [?,0]"));
        }
        let mut losses = Vec::with_capacity(labels.len());
        let rows = logits.slice_mut::<T>()?.chunks_exact_mut(classes);
        for (row, label) in rows.zip(labels.integers()?) {
            let class = usize::try_from(label).ok().filter(|class| *class < classes);
            let class = class.ok_or_else(|| {
                OpError::invalid(format!(
                    "Received a label value of {label} which is outside the valid range of [0, {classes}).  Label values: {}",
                    labels.integers().unwrap_or_default().iter().take(100).map(i64::to_string).collect::<Vec<_>>().join(" ")
                ))
            })?;
            let max = row_maximum!(row, T);
            row.iter_mut().for_each(|x| *x -= max);
            let right = row[class];
            row.iter_mut().for_each(|x| *x = x.exp());
            let sum = row.iter().sum::<T>();
            losses.push(Real::ln(sum) - right);
            row.iter_mut().for_each(|x| *x /= sum);
            row[class] -= 1.0;
        }
        call.set(0, Tensor::vector(losses)?);
        call.set(1, logits);
        Ok(())
    })))
}

/// Loss and gradient of each row, for a distribution each.
fn cross_entropy(node: &Node<'_>) -> Result<Kernel, OpError> {
    reals!(node.dtype("T")?, T => Ok(Kernel::new(|call| {
        let (a, b) = (call.tensor(0)?, call.tensor(1)?);
        let shape = super::broadcast::shape(a.shape(), b.shape())?;
        if shape.len() != 2 {
            return Err(OpError::invalid(format!(
                "logits and labels must be either 2-dimensional, or broadcasted to be 2-dimensional, got {}",
                text(&shape)
            )));
        }
        let mut logits = super::broadcast::stretch::<T>(&a, &shape)?;
        let labels = super::broadcast::stretch::<T>(&b, &shape)?;
        let classes = shape[1].max(1);
        let mut losses = Vec::with_capacity(shape[0]);
        for (row, labels) in logits.chunks_exact_mut(classes).zip(labels.chunks_exact(classes)) {
            let max = row_maximum!(row, T);
            row.iter_mut().for_each(|x| *x -= max);
            let sum = row.iter().map(|x| x.exp()).sum::<T>();
            let log = Real::ln(sum);
            losses.push(row.iter().zip(labels).map(|(x, p)| p * (log - x)).sum::<T>());
            row.iter_mut().zip(labels).for_each(|(x, p)| *x = x.exp() / sum - p);
        }
        losses.resize(shape[0], 0.0);
        call.set(0, Tensor::vector(losses)?);
        call.set(1, Tensor::new(shape, logits)?);
        Ok(())
    })))
}

fn bias_add(node: &Node<'_>) -> Result<Kernel, OpError> {
    channels_last(node)?;
    numbers!(node.dtype("T")?, T => Ok(Kernel::new(|call| {
        use super::number::Number;
        let (mut value, bias) = (call.take(0)?, call.tensor(1)?);
        if bias.shape().len() != 1 || value.shape().last() != Some(&bias.len()) {
            return Err(OpError::invalid(format!(
                "Must provide as many biases as the last dimension of the input tensor: {} vs. {}",
                text(bias.shape()),
                text(value.shape())
            )));
        }
        let bias = bias.slice::<T>()?;
        for row in value.slice_mut::<T>()?.chunks_exact_mut(bias.len().max(1)) {
            row.iter_mut().zip(bias).for_each(|(x, b)| *x = x.add(*b));
        }
        call.set(0, value);
        Ok(())
    })))
}

fn bias_add_grad(node: &Node<'_>) -> Result<Kernel, OpError> {
    channels_last(node)?;
    numbers!(node.dtype("T")?, T => Ok(Kernel::new(|call| {
        use super::number::Number;
        let value = call.tensor(0)?;
        let Some(&columns) = value.shape().last() else {
            return Err(OpError::invalid("Input tensor must be at least 2D: []"));
        };
        let mut sums = vec![T::NO_SUM; columns];
        for row in value.slice::<T>()?.chunks_exact(columns.max(1)) {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum = T::sum(*sum, *x));
        }
        let sums = sums.into_iter().map(|sum| T::mean(sum, 1)).collect::<Vec<T>>();
        call.set(0, Tensor::vector(sums)?);
        Ok(())
    })))
}

fn in_top_k(node: &Node<'_>) -> Result<Kernel, OpError> {
    let given = if node.op() == "InTopK" { Some(node.int("k", 1)?) } else { None };
    Ok(Kernel::new(move |call| {
        let (predictions, targets) = (call.tensor(0)?, call.tensor(1)?.integers()?);
        let k = given.map_or_else(|| one_integer(call, 2), Ok)?;
        let &[rows, classes] = &**predictions.shape() else {
            return Err(OpError::invalid("predictions must be 2-dimensional"));
        };
        if rows != targets.len() {
            return Err(OpError::invalid(format!(
                "First dimension of predictions {rows} must match length of targets {}",
                targets.len()
            )));
        }
        let values = predictions.slice::<f32>()?;
        let hit = |(i, target): (usize, &i64)| {
            let row = &values[i * classes..(i + 1) * classes];
            let own = usize::try_from(*target).ok().and_then(|target| row.get(target));
            own.is_some_and(|own| {
                let more = row.iter().filter(|x| *x > own).count();
                row.iter().all(|x| x.is_finite()) && (more as i64) < k
            })
        };
        let out = targets.iter().enumerate().map(hit).collect::<Vec<bool>>();
        call.set(0, Tensor::vector(out)?);
        Ok(())
    }))
}

/// The greatest of each row and where they are; of equal ones the first comes first.
fn top_k(node: &Node<'_>) -> Result<Kernel, OpError> {
    numbers!(node.dtype("T")?, T => Ok(Kernel::new(|call: &mut Call<'_>| {
        let (value, k) = (call.tensor(0)?, one_integer(call, 1)?);
        let columns = columns(&value)?;
        let k = usize::try_from(k).ok().filter(|k| *k <= columns);
        let k = k.ok_or_else(|| OpError::invalid(format!("input must have at least k columns. Had {columns}")))?;
        let (mut best, mut places) = (Vec::new(), Vec::new());
        for row in value.slice::<T>()?.chunks_exact(columns) {
            let mut order: Vec<usize> = (0..columns).collect();
            order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap_or(std::cmp::Ordering::Equal));
            best.extend(order[..k].iter().map(|&i| row[i]));
            places.extend(order[..k].iter().map(|&i| i as i32));
        }
        let mut shape = value.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = k;
        }
        call.set(0, Tensor::new(shape.clone(), best)?);
        call.set(1, Tensor::new(shape, places)?);
        Ok(())
    })))
}
