//! [`Members`]: which tasks are here, which are gone, and whether the run is over.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::lent::Lent;
use crate::cluster::TaskId;

/// Why a task is not here any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Departure {
    /// Its work is done.
    Done,
    /// Its connection ended without a word.
    Lost,
}

/// Why the whole run is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The task that failed.
    pub task: String,
    /// Its words.
    pub reason: String,
    /// Its exit code.
    pub code: u8,
}

/// One task as this one sees it.
#[derive(Clone, Debug)]
struct Member {
    incarnation: u64,
    /// Whether its end would be noticed.
    watched: bool,
    departure: Option<Departure>,
}

#[derive(Debug, Default)]
struct State {
    members: BTreeMap<TaskId, Member>,
    failure: Option<Failure>,
}

/// The tasks that have joined this one. A `std::sync::Mutex`, since it is never held across a wait.
pub struct Members {
    state: Mutex<State>,
    /// Memory of tasks on this host.
    pub(super) lent: Lent,
    /// Counts changes; whoever waits for one subscribes.
    changes: watch::Sender<u64>,
}

impl Default for Members {
    fn default() -> Self {
        Self { state: Mutex::default(), lent: Lent::default(), changes: watch::Sender::new(0) }
    }
}

impl Members {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|n| *n += 1);
    }

    /// To be told of changes.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// A task comes, or comes again after it was lost. `false` when another life of it is here.
    pub fn join(&self, task: TaskId, incarnation: u64) -> bool {
        let mut state = self.lock();
        let here = state.members.get(&task);
        if here.is_some_and(|m| m.departure.is_none() && m.incarnation != incarnation) {
            return false;
        }
        state.members.insert(task, Member { incarnation, watched: false, departure: None });
        drop(state);
        self.changed();
        true
    }

    /// From now on its end is noticed.
    pub(super) fn watch(&self, task: &TaskId, incarnation: u64) {
        let mut state = self.lock();
        let member = state.members.get_mut(task).filter(|m| m.incarnation == incarnation);
        member.into_iter().for_each(|member| member.watched = true);
    }

    /// Whether this life of a task is watched, or over.
    pub(super) fn is_watched(&self, task: &TaskId, incarnation: u64) -> bool {
        let state = self.lock();
        let member = state.members.get(task).filter(|m| m.incarnation == incarnation);
        member.is_none_or(|member| member.watched)
    }

    /// A task goes. An older life's end does not touch a newer one.
    pub fn leave(&self, task: &TaskId, incarnation: u64, departure: Departure) {
        let mut state = self.lock();
        match state.members.get_mut(task) {
            Some(member) if member.incarnation == incarnation && member.departure.is_none() => {
                member.departure = Some(departure);
            }
            _ => return,
        }
        drop(state);
        self.changed();
    }

    /// The run is over for everybody; the first failure is the one that counts.
    pub fn fail(&self, failure: Failure) {
        self.lock().failure.get_or_insert(failure);
        self.changed();
    }

    /// Why the run is over, if it is.
    pub fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    /// Whether this life of a task is here now.
    pub(super) fn is_here(&self, task: &TaskId, incarnation: u64) -> bool {
        let state = self.lock();
        let member = state.members.get(task).filter(|m| m.incarnation == incarnation);
        member.is_some_and(|member| member.departure.is_none())
    }

    /// The tasks that are here now.
    pub fn present(&self) -> Vec<TaskId> {
        let state = self.lock();
        let here = state.members.iter().filter(|(_, m)| m.departure.is_none());
        here.map(|(task, _)| task.clone()).collect()
    }

    /// Those of `tasks` that have never come.
    pub(super) fn missing(&self, tasks: &[TaskId]) -> Vec<TaskId> {
        let state = self.lock();
        tasks.iter().filter(|task| !state.members.contains_key(task)).cloned().collect()
    }

    /// How a task left; `None` while it is here or before it came.
    pub fn departure(&self, task: &TaskId) -> Option<Departure> {
        self.lock().members.get(task).and_then(|m| m.departure.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_claimant_is_refused_until_the_first_is_gone() {
        let members = Members::default();
        let task: TaskId = "worker:0".parse().unwrap();
        assert!(members.join(task.clone(), 1) && members.join(task.clone(), 1));
        assert!(!members.join(task.clone(), 2));
        members.leave(&task, 1, Departure::Lost);
        assert_eq!(members.departure(&task), Some(Departure::Lost));
        assert!(members.join(task.clone(), 2));
        members.leave(&task, 1, Departure::Lost);
        assert_eq!(members.present(), [task]);
    }

    #[test]
    fn the_first_failure_counts() {
        let members = Members::default();
        let failure =
            |reason: &str| Failure { task: "worker:1".into(), reason: reason.into(), code: 6 };
        members.fail(failure("first"));
        members.fail(failure("second"));
        assert_eq!(members.failure().unwrap().reason, "first");
    }
}
