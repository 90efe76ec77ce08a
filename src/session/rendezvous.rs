//! [`Rendezvous`]: where the tensors of one step meet those who wait for them, on this task or another.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use super::cancel::{Cancellation, lock};
use super::{OpError, Tensor};

/// What comes over an edge between tasks: a tensor, or the word that the branch was not taken.
pub type Arrival = Option<Tensor>;

/// Who waits for one.
type Waiter = Box<dyn FnOnce(Result<Arrival, OpError>) + Send>;

enum Slot {
    Ready(Arrival),
    Waiting(Waiter),
}

#[derive(Default)]
struct Table {
    slots: HashMap<Arc<str>, Slot>,
    error: Option<OpError>,
}

/// The tensors of one step on one task by key, each sent once and received once, in either order.
#[derive(Default)]
pub struct Rendezvous {
    table: Mutex<Table>,
}

impl Rendezvous {
    /// Hands a tensor over. What is sent twice without being received is an error of the graph.
    pub fn send(&self, key: &Arc<str>, arrival: Arrival) -> Result<(), OpError> {
        let waiter = {
            let mut table = lock(&self.table);
            match table.slots.entry(key.clone()) {
                Entry::Vacant(place) => {
                    place.insert(Slot::Ready(arrival));
                    return Ok(());
                }
                Entry::Occupied(place) => match place.remove() {
                    Slot::Waiting(waiter) => waiter,
                    Slot::Ready(_) => {
                        return Err(OpError::aborted(format!("Duplicated send: {key}")));
                    }
                },
            }
        };
        waiter(Ok(arrival));
        Ok(())
    }

    /// Calls `waiter` once with what comes, at once where it is there or the step has failed.
    pub fn receive(&self, key: Arc<str>, waiter: Waiter) {
        let result = {
            let mut table = lock(&self.table);
            if let Some(error) = table.error.clone() {
                Err(error)
            } else {
                match table.slots.entry(key) {
                    Entry::Vacant(place) => {
                        place.insert(Slot::Waiting(waiter));
                        return;
                    }
                    Entry::Occupied(place) if matches!(place.get(), Slot::Waiting(_)) => {
                        Err(OpError::aborted(format!("Duplicated recv: {}", place.key())))
                    }
                    Entry::Occupied(place) => match place.remove() {
                        Slot::Ready(arrival) => Ok(arrival),
                        Slot::Waiting(_) => return,
                    },
                }
            }
        };
        waiter(result);
    }

    /// Forgets who waits for this key; whether nothing at all is left.
    pub fn forget(&self, key: &str) -> bool {
        let mut table = lock(&self.table);
        if matches!(table.slots.get(key), Some(Slot::Waiting(_))) {
            table.slots.remove(key);
        }
        table.slots.is_empty()
    }

    /// Whether all that was sent has been received.
    pub fn is_empty(&self) -> bool {
        lock(&self.table).slots.is_empty()
    }

    /// Fails all who wait, and all who come.
    pub fn abort(&self, error: &OpError) {
        let slots = {
            let mut table = lock(&self.table);
            table.error.get_or_insert_with(|| error.clone());
            std::mem::take(&mut table.slots)
        };
        for slot in slots.into_values() {
            if let Slot::Waiting(waiter) = slot {
                waiter(Err(error.clone()));
            }
        }
    }
}

/// One step as one task sees it.
#[derive(Default)]
pub struct Step {
    /// Its tensors between tasks.
    pub rendezvous: Rendezvous,
    /// Whether it goes on.
    pub cancellation: Cancellation,
}

impl Step {
    /// Ends the step and all who wait in it.
    pub fn cancel(&self, error: OpError) {
        self.cancellation.cancel(error.clone());
        self.rendezvous.abort(&error);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn either_may_come_first_and_failure_reaches_both() {
        let meeting = Rendezvous::default();
        let (told, tell) = mpsc::channel();
        let waiter = || {
            let told = told.clone();
            Box::new(move |result: Result<Arrival, OpError>| told.send(result).unwrap())
        };
        let key: Arc<str> = "a".into();
        meeting.receive(key.clone(), waiter());
        meeting.send(&key, Some(Tensor::scalar(1f32))).unwrap();
        assert_eq!(tell.recv().unwrap().unwrap(), Some(Tensor::scalar(1f32)));
        meeting.send(&key, None).unwrap();
        assert!(meeting.send(&key, None).unwrap_err().message.starts_with("Duplicated send"));
        meeting.receive("b".into(), waiter());
        meeting.abort(&OpError::aborted("over"));
        assert_eq!(tell.recv().unwrap().unwrap_err(), OpError::aborted("over"));
        meeting.receive("c".into(), waiter());
        assert_eq!(tell.recv().unwrap().unwrap_err(), OpError::aborted("over"));
        assert!(meeting.forget("c"));
    }
}
