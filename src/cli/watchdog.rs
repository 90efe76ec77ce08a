//! [`Watchdog`]: says where a task stands when nothing has moved for a while.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::output::note;
use super::run::hostname;
use crate::util::clock::{Clock, SystemClock};

/// Watches until it is dropped.
pub(super) struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// After `timeout` seconds without a change of the number that `look` tells, its words are printed, with the task and
    /// the host; and again after as long. 0 watches nothing.
    pub(super) fn start(
        task: Option<String>,
        timeout: u64,
        look: impl Fn() -> (u64, String) + Send + 'static,
    ) -> Self {
        if timeout == 0 {
            return Self { stop: None, thread: None };
        }
        let (stop, stopped) = channel::<()>();
        let thread = std::thread::spawn(move || {
            let (timeout, clock) = (Duration::from_secs(timeout), SystemClock::default());
            let who = task.map_or_else(hostname, |task| format!("{task} on {}", hostname()));
            let (mut seen, mut since, mut told) = (look().0, Duration::ZERO, Duration::ZERO);
            while stopped.recv_timeout(timeout / 8) == Err(RecvTimeoutError::Timeout) {
                let ((moves, words), now) = (look(), clock.monotonic());
                if moves != seen {
                    (seen, since, told) = (moves, now, now);
                } else if now - told >= timeout {
                    told = now;
                    let secs = (now - since).as_secs();
                    note(&format!("{who}: nothing has moved for {secs} s: {words}"));
                }
            }
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It has nothing left to say.
            let _ = thread.join();
        }
    }
}
