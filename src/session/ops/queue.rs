//! Queues and conditional accumulators: what steps of several clients wait at for each other.

use std::collections::VecDeque;
use std::sync::Arc;

use super::array::one_integer;
use super::broadcast::text;
use super::number::reals;
use super::parts::joined;
use super::{Kernel, OpDef};
use crate::session::codec::shape_text;
use crate::session::proto::TensorShapeProto;
use crate::session::{Bell, Call, DType, Found, Handle, Monitor, Node, OpError, Tensor, Value};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("FIFOQueueV2", queue).handle(),
    OpDef::new("QueueEnqueueV2", enqueue),
    OpDef::new("QueueEnqueueManyV2", enqueue),
    OpDef::new("QueueDequeueV2", dequeue),
    OpDef::new("QueueDequeueManyV2", dequeue_many),
    OpDef::new("QueueDequeueUpToV2", dequeue_many),
    OpDef::new("QueueCloseV2", close),
    OpDef::new("QueueSizeV2", size),
    OpDef::new("QueueIsClosedV2", is_closed),
    OpDef::new("ResourceConditionalAccumulator", accumulator).handle(),
    OpDef::new("ResourceAccumulatorSetGlobalStep", set_global_step),
    OpDef::new("ResourceAccumulatorApplyGradient", apply_gradient),
    OpDef::new("ResourceAccumulatorTakeGradient", take_gradient),
    OpDef::new("ResourceAccumulatorNumAccumulated", accumulated),
];

/// Tuples of tensors, first in, first out.
struct Queue {
    name: String,
    dtypes: Vec<DType>,
    /// Of the components; none where elements may have any shape.
    shapes: Vec<TensorShapeProto>,
    capacity: usize,
    state: Monitor<Waiting>,
}

#[derive(Default)]
struct Waiting {
    elements: VecDeque<Vec<Tensor>>,
    closed: bool,
    /// Whoever waits to enqueue shall give up.
    refused: bool,
}

impl Queue {
    /// An element fits the queue.
    fn check(&self, element: &[Tensor]) -> Result<(), OpError> {
        if element.len() != self.dtypes.len()
            || element.iter().zip(&self.dtypes).any(|(tensor, dtype)| tensor.dtype() != *dtype)
        {
            return Err(OpError::invalid(format!(
                "queue {} holds tuples of {:?}, not of {:?}",
                self.name,
                self.dtypes,
                element.iter().map(Tensor::dtype).collect::<Vec<_>>()
            )));
        }
        for (i, (tensor, shape)) in element.iter().zip(&self.shapes).enumerate() {
            let dims = shape.dim.iter().map(|dim| usize::try_from(dim.size).ok());
            let fits = shape.dim.len() == tensor.shape().len()
                && dims
                    .zip(tensor.shape().iter())
                    .all(|(own, dim)| own.is_none_or(|own| own == *dim));
            if !fits && !shape.unknown_rank {
                return Err(OpError::invalid(format!(
                    "Shape mismatch in tuple component {i}. Expected {}, got {}",
                    shape_text(shape),
                    text(tensor.shape())
                )));
            }
        }
        Ok(())
    }

    /// Puts in what there is room for; nothing is left once it is done.
    fn put(
        &self,
        bell: &Arc<Bell>,
        elements: &mut VecDeque<Vec<Tensor>>,
    ) -> Option<Result<(), OpError>> {
        loop {
            let all = self.state.attempt(bell, |state| {
                if state.closed && (state.refused || !elements.is_empty()) {
                    let text = format!("FIFOQueue '_0_{}' is closed.", self.name);
                    return Some(Err(OpError::cancelled(text)));
                }
                let room = self.capacity.saturating_sub(state.elements.len()).min(elements.len());
                if room == 0 && !elements.is_empty() {
                    return None;
                }
                state.elements.extend(elements.drain(..room));
                Some(Ok(elements.is_empty()))
            })?;
            match all {
                Ok(false) => {}
                Ok(true) => return Some(Ok(())),
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// Takes `count` elements, or what there is where `fewer` will do once the queue is closed.
    fn take(
        &self,
        bell: &Arc<Bell>,
        count: usize,
        fewer: bool,
    ) -> Option<Result<Vec<Vec<Tensor>>, OpError>> {
        self.state.attempt(bell, |state| {
            let there = state.elements.len();
            if there < count && !state.closed {
                return None;
            }
            if there < count && (!fewer || there == 0) {
                return Some(Err(OpError::out_of_range(format!(
                    "FIFOQueue '_0_{}' is closed and has insufficient elements (requested {count}, current size {there})",
                    self.name
                ))));
            }
            Some(Ok(state.elements.drain(..count.min(there)).collect()))
        })
    }

    /// Elements as one tensor a component.
    fn batch(&self, elements: &[Vec<Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let component = |(i, dtype): (usize, &DType)| {
            let row = |element: &Vec<Tensor>| {
                let shape = [&[1], &**element[i].shape()].concat();
                element[i].clone().reshaped(shape)
            };
            let rows: Result<Vec<Tensor>, OpError> = elements.iter().map(row).collect();
            let rows = rows?;
            if rows.is_empty() { Tensor::zeros(*dtype, [0]) } else { joined(&rows, 0) }
        };
        self.dtypes.iter().enumerate().map(component).collect()
    }
}

fn queue(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (container, name) = (node.text("container")?.to_owned(), node.shared_name()?.to_owned());
    let (dtypes, shapes) = (node.dtypes("component_types")?, node.shapes("shapes")?.to_vec());
    // Negative: without a limit.
    let capacity = usize::try_from(node.int("capacity", -1)?).unwrap_or(usize::MAX);
    Ok(Kernel::new(move |call| {
        let queue = call.resources().find_or(&container, &name, || {
            Ok(Queue {
                name: name.clone(),
                dtypes: dtypes.clone(),
                shapes: shapes.clone(),
                capacity,
                state: Monitor::default(),
            })
        })?;
        if queue.dtypes != dtypes {
            return Err(OpError::invalid(format!(
                "Shared queue '{name}' has component types {:?} but requested component types were {dtypes:?}",
                queue.dtypes
            )));
        }
        call.set_value(0, Value::Resource(Handle::new(&name, queue)));
        Ok(())
    }))
}

fn enqueue(node: &Node<'_>) -> Result<Kernel, OpError> {
    let many = node.op() == "QueueEnqueueManyV2";
    Ok(Kernel::new(move |call| {
        let queue = call.resource::<Queue>(0)?;
        let parts: Result<Vec<Tensor>, OpError> =
            (1..call.inputs()).map(|i| call.tensor(i)).collect();
        let parts = parts?;
        if !many {
            return enter(call, queue, vec![parts]);
        }
        let count = parts.first().and_then(|part| part.shape().first().copied());
        let count =
            count.ok_or_else(|| OpError::invalid("enqueue_many needs tensors with rows"))?;
        if parts.iter().any(|part| part.shape().first() != Some(&count)) {
            return Err(OpError::invalid(
                "the components of enqueue_many have not equally many rows",
            ));
        }
        let rows: Result<Vec<Vec<Tensor>>, OpError> =
            parts.iter().map(super::parts::rows).collect();
        let rows = rows?;
        let mut elements = vec![Vec::with_capacity(parts.len()); count];
        for column in rows {
            elements.iter_mut().zip(column).for_each(|(element, row)| element.push(row));
        }
        enter(call, queue, elements)
    }))
}

/// Waits until these elements are in.
fn enter(
    call: &mut Call<'_>,
    queue: Arc<Queue>,
    elements: Vec<Vec<Tensor>>,
) -> Result<(), OpError> {
    elements.iter().try_for_each(|element| queue.check(element))?;
    let mut elements: VecDeque<_> = elements.into();
    call.wait(move |bell| {
        let put = queue.put(bell, &mut elements)?;
        Some(put.map(|()| Found::new(Vec::new())))
    });
    Ok(())
}

fn dequeue(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let queue = call.resource::<Queue>(0)?;
        call.wait(move |bell| {
            let taken = queue.take(bell, 1, false)?;
            Some(taken.map(|elements| Found::new(elements.concat())))
        });
        Ok(())
    }))
}

fn dequeue_many(node: &Node<'_>) -> Result<Kernel, OpError> {
    let fewer = node.op() == "QueueDequeueUpToV2";
    Ok(Kernel::new(move |call| {
        let queue = call.resource::<Queue>(0)?;
        let count = usize::try_from(one_integer(call, 1)?)
            .map_err(|_| OpError::invalid("n must be >= 0"))?;
        if count > queue.capacity {
            return Err(OpError::invalid(format!(
                "requested {count} elements of a queue that holds {}",
                queue.capacity
            )));
        }
        call.wait(move |bell| {
            let taken = queue.take(bell, count, fewer)?;
            let queue = queue.clone();
            Some(taken.map(|elements| Found {
                elements: elements.iter().flatten().map(Tensor::len).sum(),
                outputs: Box::new(move || queue.batch(&elements)),
            }))
        });
        Ok(())
    }))
}

fn close(node: &Node<'_>) -> Result<Kernel, OpError> {
    let refuse = node.bool("cancel_pending_enqueues", false)?;
    Ok(Kernel::new(move |call| {
        call.resource::<Queue>(0)?.state.change(|state| {
            state.closed = true;
            state.refused |= refuse;
        });
        Ok(())
    }))
}

fn size(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let size = call.resource::<Queue>(0)?.state.look(|state| state.elements.len() as i32);
        call.set(0, Tensor::scalar(size));
        Ok(())
    }))
}

fn is_closed(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let closed = call.resource::<Queue>(0)?.state.look(|state| state.closed);
        call.set(0, Tensor::scalar(closed));
        Ok(())
    }))
}

/// Gradients of several workers, until enough of them are there.
struct Accumulator {
    dtype: DType,
    mean: bool,
    state: Monitor<Gathered>,
}

#[derive(Default)]
struct Gathered {
    sum: Option<Tensor>,
    count: i32,
    /// Gradients of steps before this one are stale.
    step: i64,
}

fn accumulator(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (container, name) = (node.text("container")?.to_owned(), node.shared_name()?.to_owned());
    let (dtype, mean) = (node.dtype("dtype")?, node.text("reduction_type")? != "SUM");
    Ok(Kernel::new(move |call| {
        let accumulator = call.resources().find_or(&container, &name, || {
            Ok(Accumulator { dtype, mean, state: Monitor::default() })
        })?;
        call.set_value(0, Value::Resource(Handle::new(&name, accumulator)));
        Ok(())
    }))
}

fn set_global_step(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let step = one_integer(call, 1)?;
        call.resource::<Accumulator>(0)?.state.change(|state| state.step = step);
        Ok(())
    }))
}

fn apply_gradient(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (step, gradient) = (one_integer(call, 1)?, call.tensor(2)?);
        let accumulator = call.resource::<Accumulator>(0)?;
        if gradient.dtype() != accumulator.dtype {
            return Err(OpError::invalid(format!(
                "a gradient of type {} for an accumulator of type {}",
                gradient.dtype(),
                accumulator.dtype
            )));
        }
        accumulator.state.change(|state| {
            if step < state.step {
                return Ok(());
            }
            let sum = match state.sum.take() {
                None => gradient,
                Some(sum) if sum.shape() != gradient.shape() => {
                    let shapes = (text(sum.shape()), text(gradient.shape()));
                    state.sum = Some(sum);
                    return Err(OpError::invalid(format!(
                        "Shape mismatch: expected {}, got {}",
                        shapes.0, shapes.1
                    )));
                }
                Some(sum) => added(sum, &gradient)?,
            };
            state.sum = Some(sum);
            state.count += 1;
            Ok(())
        })
    }))
}

fn added(sum: Tensor, gradient: &Tensor) -> Result<Tensor, OpError> {
    reals!(sum.dtype(), T => super::broadcast::zip_into::<T>(sum, gradient, |a, b| a + b))
}

fn take_gradient(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let accumulator = call.resource::<Accumulator>(0)?;
        let wanted = one_integer(call, 1)?;
        if wanted < 1 {
            return Err(OpError::invalid(format!(
                "Argument num_required must be at least 1, not {wanted}"
            )));
        }
        call.wait(move |bell| {
            let (sum, count) = accumulator.state.attempt(bell, |state| {
                if i64::from(state.count) < wanted {
                    return None;
                }
                let taken = (state.sum.take()?, std::mem::take(&mut state.count));
                state.step += 1;
                Some(taken)
            })?;
            let divisor = if accumulator.mean { count } else { 1 };
            Some(Ok(Found {
                elements: sum.len(),
                outputs: Box::new(move || Ok(vec![divided(sum, divisor)?])),
            }))
        });
        Ok(())
    }))
}

fn divided(mut sum: Tensor, by: i32) -> Result<Tensor, OpError> {
    if by != 1 {
        reals!(sum.dtype(), T => {
            sum.slice_mut::<T>()?.iter_mut().for_each(|x| *x /= by as T);
            Ok(())
        })?;
    }
    Ok(sum)
}

fn accumulated(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call: &mut Call<'_>| {
        let count = call.resource::<Accumulator>(0)?.state.look(|state| state.count);
        call.set(0, Tensor::scalar(count));
        Ok(())
    }))
}
