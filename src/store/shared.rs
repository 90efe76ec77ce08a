//! [`SharedStore`]: one store for towers that do not wait for each other.

use std::sync::{Arc, Mutex, MutexGuard};

use super::{Applied, Contribution, LocalStore, Pulled, State, StoreError, VariableStore};
use crate::device::{Device, Slab};

/// A tower's view of variables that other towers update meanwhile.
///
/// Each pull copies the variables under the lock, so a tower always computes on a consistent set; each apply is one
/// update of its own. A `Mutex`, since both copies and updates are short beside a step.
pub struct SharedStore {
    shared: Arc<Mutex<LocalStore>>,
    replica: Slab,
    /// Updates beyond this are dropped, so that a run ends at exactly this step.
    max_steps: u64,
}

impl SharedStore {
    /// One view per tower; `devices` hold the towers' copies.
    pub fn split(
        store: LocalStore,
        len: usize,
        max_steps: u64,
        devices: &[Arc<dyn Device>],
    ) -> Result<Vec<Self>, StoreError> {
        let shared = Arc::new(Mutex::new(store));
        let mut views = Vec::new();
        for device in devices {
            views.push(Self { shared: shared.clone(), replica: device.alloc(len)?, max_steps });
        }
        Ok(views)
    }
}

fn lock(shared: &Mutex<LocalStore>) -> Result<MutexGuard<'_, LocalStore>, StoreError> {
    shared.lock().map_err(|_| StoreError::Poisoned)
}

impl VariableStore for SharedStore {
    fn pull(&mut self) -> Result<Pulled<'_>, StoreError> {
        let mut store = lock(&self.shared)?;
        self.replica.copy_from(store.pull()?.replica(0))?;
        drop(store);
        Ok(Pulled::of(std::slice::from_ref(&self.replica)))
    }

    fn apply(&mut self, mean: &[Slab], share: Contribution) -> Result<Applied, StoreError> {
        let mut store = lock(&self.shared)?;
        if store.global_step() >= self.max_steps {
            return Ok(Applied { global_step: store.global_step(), rate: 0.0, loss: None });
        }
        store.apply(mean, share)
    }

    fn global_step(&self) -> u64 {
        // A poisoned store ends the run at the next pull.
        lock(&self.shared).map_or(self.max_steps, |store| store.global_step())
    }

    fn snapshot(&mut self) -> Result<State, StoreError> {
        lock(&self.shared)?.snapshot()
    }

    fn restore(&mut self, from: &State) -> Result<(), StoreError> {
        lock(&self.shared)?.restore(from)
    }
}
