//! What outlives a step: [`Variable`]s, and whatever else operations keep on a task by name.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::cancel::lock;
use super::{DType, OpError, Tensor};

/// A variable of a task. Sessions share it, and steps update it in place.
pub struct Variable {
    name: String,
    dtype: DType,
    value: Mutex<Option<Tensor>>,
}

impl Variable {
    /// A variable without a value.
    pub fn new(name: &str, dtype: DType) -> Self {
        Self { name: name.to_owned(), dtype, value: Mutex::new(None) }
    }

    /// As errors name it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The value, where it has one. Elements are shared until somebody updates the variable.
    pub fn get(&self) -> Option<Tensor> {
        lock(&self.value).clone()
    }

    /// The value.
    ///
    /// # Errors
    /// FAILED_PRECONDITION where it has none.
    pub fn read(&self) -> Result<Tensor, OpError> {
        self.get().ok_or_else(|| self.uninitialized())
    }

    fn uninitialized(&self) -> OpError {
        OpError::precondition(format!("Attempting to use uninitialized value {}", self.name))
    }

    fn check(&self, dtype: DType) -> Result<(), OpError> {
        if dtype == self.dtype {
            return Ok(());
        }
        let Self { name, dtype: own, .. } = self;
        Err(OpError::invalid(format!("variable {name} is of type {own}, not {dtype}")))
    }

    /// Gives it a value, of any shape.
    ///
    /// # Errors
    /// The value is of another type.
    pub fn set(&self, value: Tensor) -> Result<(), OpError> {
        self.check(value.dtype())?;
        *lock(&self.value) = Some(value);
        Ok(())
    }

    /// Changes the value where it lies, while nobody else sees it.
    ///
    /// # Errors
    /// FAILED_PRECONDITION where it has no value, and what `change` says.
    pub fn update<R>(
        &self,
        change: impl FnOnce(&mut Tensor) -> Result<R, OpError>,
    ) -> Result<R, OpError> {
        let mut value = lock(&self.value);
        change(value.as_mut().ok_or_else(|| self.uninitialized())?)
    }
}

/// A thing of a task that operations are handed by reference: a resource variable, a queue, an accumulator.
#[derive(Clone)]
pub struct Handle {
    /// The name that the graph gives it.
    pub name: Arc<str>,
    thing: Arc<dyn Any + Send + Sync>,
}

impl Handle {
    /// A handle of `thing`.
    pub fn new<T: Any + Send + Sync>(name: &str, thing: Arc<T>) -> Self {
        Self { name: name.into(), thing }
    }

    /// The thing.
    ///
    /// # Errors
    /// It is of another kind.
    pub fn get<T: Any + Send + Sync>(&self) -> Result<Arc<T>, OpError> {
        let wrong = || OpError::invalid(format!("resource {} is of another kind", self.name));
        self.thing.clone().downcast().map_err(|_| wrong())
    }
}

/// The resources of one task, by container and name; they outlive sessions until somebody resets their container.
#[derive(Default)]
pub struct Resources {
    things: Mutex<HashMap<(String, String), Arc<dyn Any + Send + Sync>>>,
}

impl Resources {
    /// What has this name in a container (the default one has an empty name), made where there is nothing yet.
    ///
    /// # Errors
    /// What has the name is of another kind, and what `make` says.
    pub fn find_or<T: Any + Send + Sync>(
        &self,
        container: &str,
        name: &str,
        make: impl FnOnce() -> Result<T, OpError>,
    ) -> Result<Arc<T>, OpError> {
        let mut things = lock(&self.things);
        let key = (container.to_owned(), name.to_owned());
        let thing = match things.get(&key) {
            Some(thing) => thing.clone(),
            None => {
                let thing: Arc<dyn Any + Send + Sync> = Arc::new(make()?);
                things.insert(key, thing.clone());
                thing
            }
        };
        thing.downcast().map_err(|_| {
            OpError::invalid(format!(
                "the task has a resource {name} of another kind: another graph made it; reset its container or rename it"
            ))
        })
    }

    /// Forgets one resource; whether there was one.
    pub fn remove(&self, container: &str, name: &str) -> bool {
        lock(&self.things).remove(&(container.to_owned(), name.to_owned())).is_some()
    }

    /// Forgets those of these containers, or of the default one where none is named.
    pub fn clear(&self, containers: &[String]) {
        let gone = |container: &String| match containers {
            [] => container.is_empty(),
            some => some.contains(container),
        };
        lock(&self.things).retain(|(container, _), _| !gone(container));
    }
}
