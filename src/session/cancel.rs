//! [`Cancellation`]: how a step is ended from outside, and [`Monitor`]: how its kernels wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::OpError;

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

/// How a node that waits is told to try again.
pub struct Bell(Box<dyn Fn() + Send + Sync>);

impl Bell {
    /// One that calls this.
    pub fn new(ring: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self(Box::new(ring)))
    }
}

/// A value that kernels of several steps change and wait for.
#[derive(Default)]
pub struct Monitor<T>(Mutex<Watched<T>>);

#[derive(Default)]
struct Watched<T> {
    value: T,
    /// Of nodes that wait, the first first; those of steps that are over are gone.
    bells: Vec<Weak<Bell>>,
}

impl<T> Watched<T> {
    fn leave(&mut self, bell: &Arc<Bell>) {
        // Who gave up leaves nothing behind for long.
        if self.bells.len() == self.bells.capacity() {
            self.bells.retain(|bell| bell.strong_count() > 0);
        }
        self.bells.push(Arc::downgrade(bell));
    }
}

impl<T> Monitor<T> {
    /// Changes the value and rings for those who wait.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let mut watched = lock(&self.0);
        let result = change(&mut watched.value);
        let bells = std::mem::take(&mut watched.bells);
        drop(watched);
        bells.iter().filter_map(Weak::upgrade).for_each(|bell| (bell.0)());
        result
    }

    /// Looks at the value.
    pub fn look<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&lock(&self.0).value)
    }

    /// Tries to change the value; where `attempt` gives nothing it has changed nothing, and the next change rings.
    pub fn attempt<R>(
        &self,
        bell: &Arc<Bell>,
        attempt: impl FnOnce(&mut T) -> Option<R>,
    ) -> Option<R> {
        let mut watched = lock(&self.0);
        let result = attempt(&mut watched.value);
        if result.is_none() {
            watched.leave(bell);
            return None;
        }
        drop(watched);
        self.change(|_| result)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_change_rings_once_for_each_who_waits() {
        let (monitor, rung) = (Monitor::<i32>::default(), Arc::new(AtomicUsize::new(0)));
        let bell = || {
            let rung = rung.clone();
            Bell::new(move || _ = rung.fetch_add(1, Ordering::Relaxed))
        };
        let take = |bell: &Arc<Bell>| monitor.attempt(bell, |n| (*n > 0).then(|| *n -= 1));
        let (first, second) = (bell(), bell());
        assert_eq!((take(&first), take(&second)), (None, None));
        monitor.change(|n| *n += 1);
        assert_eq!(rung.load(Ordering::Relaxed), 2);
        assert_eq!((take(&first), take(&second)), (Some(()), None));
        drop(second);
        monitor.change(|n| *n += 1);
        assert_eq!(rung.load(Ordering::Relaxed), 2, "it has given up");
    }

    #[test]
    fn who_gives_up_leaves_nothing_behind() {
        let monitor = Monitor::<()>::default();
        for _ in 0..1000 {
            assert!(monitor.attempt(&Bell::new(|| ()), |()| None::<()>).is_none());
        }
        assert!(lock(&monitor.0).bells.len() < 8);
    }
}
