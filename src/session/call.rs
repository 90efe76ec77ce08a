//! [`Call`]: one run of a kernel, with its inputs and outputs.

use std::sync::Arc;

use super::cancel::Bell;
use super::resources::{Handle, Resources, Variable};
use super::{OpError, Tensor};

/// What an edge carries.
#[derive(Clone)]
pub enum Value {
    /// A tensor.
    Tensor(Tensor),
    /// A variable by reference: it is read when a kernel asks for the tensor, so that updates before then show.
    Ref(Arc<Variable>),
    /// A resource.
    Resource(Handle),
}

impl Value {
    /// The tensor; a reference is read.
    ///
    /// # Errors
    /// FAILED_PRECONDITION for a variable without a value, INVALID_ARGUMENT for a resource.
    pub fn tensor(&self) -> Result<Tensor, OpError> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::Ref(variable) => variable.read(),
            Self::Resource(handle) => Err(OpError::invalid(format!(
                "resource {} stands where a tensor is expected; resources cannot be fetched, fed or sent to other tasks",
                handle.name
            ))),
        }
    }
}

impl Value {
    /// The number of elements behind it; `None` while somebody changes them.
    pub(super) fn elements(&self) -> Option<usize> {
        match self {
            Self::Tensor(tensor) => Some(tensor.len()),
            Self::Ref(variable) => variable.elements(),
            Self::Resource(handle) => match handle.get::<Variable>() {
                Ok(variable) => variable.elements(),
                // Queues and the like hand tensors over.
                Err(_) => Some(0),
            },
        }
    }
}

/// What a kernel waited for: it gives the outputs, and says how many elements that touches.
pub struct Found {
    /// Elements that are touched.
    pub elements: usize,
    /// Gives the outputs.
    pub outputs: Box<dyn FnOnce() -> Result<Vec<Tensor>, OpError> + Send>,
}

impl Found {
    /// Outputs that are there.
    pub fn new(outputs: Vec<Tensor>) -> Self {
        Self { elements: 0, outputs: Box::new(move || Ok(outputs)) }
    }
}

/// A look for what a kernel waits for. Where it is not there yet the bell has been left with who will bring it.
pub type Attempt = Box<dyn FnMut(&Arc<Bell>) -> Option<Result<Found, OpError>> + Send>;

/// What a kernel may see of its step and its task.
pub struct Context<'a> {
    /// The task's resources.
    pub resources: &'a Resources,
    /// The job of this task, as texts of errors name it.
    pub job: &'a str,
}

/// One run of a kernel.
pub struct Call<'a> {
    context: &'a Context<'a>,
    inputs: &'a mut [Option<Value>],
    outputs: &'a mut [Option<Value>],
    attempt: Option<Attempt>,
}

impl<'a> Call<'a> {
    /// A run on these inputs; outputs that nobody reads have no place.
    pub fn new(
        context: &'a Context<'a>,
        inputs: &'a mut [Option<Value>],
        outputs: &'a mut [Option<Value>],
    ) -> Self {
        Self { context, inputs, outputs, attempt: None }
    }

    /// The task's resources.
    pub fn resources(&self) -> &'a Resources {
        self.context.resources
    }

    /// The job of this task.
    pub fn job(&self) -> &'a str {
        self.context.job
    }

    /// The number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// An input as it came.
    pub fn value(&self, index: usize) -> Result<&Value, OpError> {
        let missing = || OpError::invalid(format!("input {index} is missing"));
        self.inputs.get(index).and_then(Option::as_ref).ok_or_else(missing)
    }

    /// An input as a tensor.
    pub fn tensor(&self, index: usize) -> Result<Tensor, OpError> {
        self.value(index)?.tensor()
    }

    /// An input as a tensor that may be changed without a copy where nobody else reads it. It is gone then.
    pub fn take(&mut self, index: usize) -> Result<Tensor, OpError> {
        match self.inputs.get_mut(index).and_then(Option::take) {
            Some(Value::Tensor(tensor)) => Ok(tensor),
            Some(other) => other.tensor(),
            None => Err(OpError::invalid(format!("input {index} is missing"))),
        }
    }

    /// An input that is a variable: a reference, or the resource of one.
    pub fn variable(&self, index: usize) -> Result<Arc<Variable>, OpError> {
        match self.value(index)? {
            Value::Ref(variable) => Ok(variable.clone()),
            Value::Resource(handle) => handle.get(),
            Value::Tensor(_) => {
                Err(OpError::invalid(format!("input {index} is no reference to a variable")))
            }
        }
    }

    /// An input that is a resource of this kind.
    pub fn resource<T: std::any::Any + Send + Sync>(
        &self,
        index: usize,
    ) -> Result<Arc<T>, OpError> {
        match self.value(index)? {
            Value::Resource(handle) => handle.get(),
            _ => Err(OpError::invalid(format!("input {index} is no resource"))),
        }
    }

    /// Whether anybody reads this output.
    pub fn wanted(&self, index: usize) -> bool {
        index < self.outputs.len()
    }

    /// Gives an output.
    pub fn set(&mut self, index: usize, tensor: Tensor) {
        self.set_value(index, Value::Tensor(tensor));
    }

    /// Gives an output that is no tensor.
    pub fn set_value(&mut self, index: usize, value: Value) {
        if let Some(place) = self.outputs.get_mut(index) {
            *place = Some(value);
        }
    }

    /// Lets the node wait: its outputs come from an attempt that succeeds, now or after its bell has rung.
    pub fn wait(
        &mut self,
        attempt: impl FnMut(&Arc<Bell>) -> Option<Result<Found, OpError>> + Send + 'static,
    ) {
        self.attempt = Some(Box::new(attempt));
    }

    /// What the node waits for.
    pub fn waits_for(self) -> Option<Attempt> {
        self.attempt
    }
}
