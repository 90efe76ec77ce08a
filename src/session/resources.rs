//! What outlives a step: [`Variable`]s, and whatever else operations keep on a task by name.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, TryLockError};

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

    /// The number of elements; `None` while somebody updates them.
    pub(super) fn elements(&self) -> Option<usize> {
        let value = match self.value.try_lock() {
            Ok(value) => value,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(value.as_ref().map_or(0, Tensor::len))
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

impl Variable {
    /// Changes several variables at once. Locks are taken by address, so that two updates never wait for each other.
    ///
    /// # Errors
    /// A variable has no value or is there twice, and what `change` says.
    pub fn update_all<R>(
        variables: &[Arc<Self>],
        change: impl FnOnce(&mut [&mut Tensor]) -> Result<R, OpError>,
    ) -> Result<R, OpError> {
        let mut order: Vec<usize> = (0..variables.len()).collect();
        order.sort_by_key(|&i| Arc::as_ptr(&variables[i]));
        if order.windows(2).any(|w| Arc::ptr_eq(&variables[w[0]], &variables[w[1]])) {
            return Err(OpError::invalid("a variable and its slots must be different variables"));
        }
        let mut guards: Vec<_> = order.iter().map(|&i| (i, lock(&variables[i].value))).collect();
        guards.sort_by_key(|guard| guard.0);
        let values: Result<Vec<&mut Tensor>, OpError> = guards
            .iter_mut()
            .zip(variables)
            .map(|((_, guard), variable)| guard.as_mut().ok_or_else(|| variable.uninitialized()))
            .collect();
        change(&mut values?)
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

/// Container, name and kind: as in TensorFlow, a queue and a variable of one name do not meet.
type Key = (String, String, TypeId);

/// The resources of one task, by container and name; they outlive sessions until somebody resets their container.
#[derive(Default)]
pub struct Resources {
    things: Mutex<HashMap<Key, Arc<dyn Any + Send + Sync>>>,
}

impl Resources {
    /// What of this kind has this name in a container (the default one has an empty name), made where there is nothing yet.
    ///
    /// # Errors
    /// What `make` says.
    pub fn find_or<T: Any + Send + Sync>(
        &self,
        container: &str,
        name: &str,
        make: impl FnOnce() -> Result<T, OpError>,
    ) -> Result<Arc<T>, OpError> {
        let mut things = lock(&self.things);
        let key = (container.to_owned(), name.to_owned(), TypeId::of::<T>());
        let thing = match things.get(&key) {
            Some(thing) => thing.clone(),
            None => {
                let thing: Arc<dyn Any + Send + Sync> = Arc::new(make()?);
                things.insert(key, thing.clone());
                thing
            }
        };
        thing.downcast().map_err(|_| {
            OpError::internal(format!("resource {name} is not of the kind that it is kept under"))
        })
    }

    /// Forgets what has this name, of any kind and in any container; whether there was something.
    pub fn remove(&self, name: &str) -> bool {
        let mut things = lock(&self.things);
        let before = things.len();
        things.retain(|(_, own, _), _| own != name);
        things.len() < before
    }

    /// Forgets those of these containers, or of the default one where none is named.
    pub fn clear(&self, containers: &[String]) {
        let gone = |container: &String| match containers {
            [] => container.is_empty(),
            some => some.contains(container),
        };
        lock(&self.things).retain(|(container, ..), _| !gone(container));
    }
}
