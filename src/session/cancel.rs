//! [`Cancellation`]: how a step is ended from outside, and [`Monitor`]: how its kernels wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::OpError;

/// How often who waits looks for a cancellation.
const GLANCE: Duration = Duration::from_millis(20);

/// The lock of a mutex; no holder leaves it half changed.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called once when a step is cancelled.
type Callback = Box<dyn FnOnce(&OpError) + Send>;

#[derive(Default)]
struct State {
    error: Option<OpError>,
    callbacks: Vec<Callback>,
}

/// Whether a step goes on. The first reason to end it counts.
#[derive(Default)]
pub struct Cancellation {
    raised: AtomicBool,
    state: Mutex<State>,
}

impl Cancellation {
    /// Ends the step for this reason.
    pub fn cancel(&self, error: OpError) {
        let callbacks = {
            let mut state = lock(&self.state);
            if state.error.is_some() {
                return;
            }
            state.error = Some(error.clone());
            self.raised.store(true, Ordering::Release);
            std::mem::take(&mut state.callbacks)
        };
        for callback in callbacks {
            callback(&error);
        }
    }

    /// An error once the step is to end.
    pub fn check(&self) -> Result<(), OpError> {
        if !self.raised.load(Ordering::Acquire) {
            return Ok(());
        }
        lock(&self.state).error.clone().map_or(Ok(()), Err)
    }

    /// Calls `callback` when the step is cancelled, at once where it is already.
    pub fn on_cancel(&self, callback: impl FnOnce(&OpError) + Send + 'static) {
        let mut state = lock(&self.state);
        match state.error.clone() {
            None => state.callbacks.push(Box::new(callback)),
            Some(error) => {
                drop(state);
                callback(&error);
            }
        }
    }
}

/// A value that kernels of several steps change and wait for.
#[derive(Default)]
pub struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    /// Around a value.
    pub fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    /// Changes the value and wakes who waits.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut lock(&self.value));
        self.changed.notify_all();
        result
    }

    /// Tries after every change, until `attempt` gives a result or the step is cancelled; a result is a change too.
    pub fn wait<R>(
        &self,
        cancellation: &Cancellation,
        mut attempt: impl FnMut(&mut T) -> Option<Result<R, OpError>>,
    ) -> Result<R, OpError> {
        let mut value = lock(&self.value);
        loop {
            cancellation.check()?;
            if let Some(result) = attempt(&mut value) {
                drop(value);
                self.changed.notify_all();
                return result;
            }
            let waited = self.changed.wait_timeout(value, GLANCE);
            value = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
