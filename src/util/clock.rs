//! Time as a value that is handed in: the system's clock, and one that tests set by hand.

use std::sync::Mutex;
use std::time::Duration;

/// Tells the time. Everything in the crate that needs it holds one of these.
pub trait Clock: Send + Sync {
    /// Time since the Unix epoch, for stamps that people read.
    fn wall(&self) -> Duration;
    /// Time since an arbitrary moment; never goes back. For measuring.
    fn monotonic(&self) -> Duration;
}

/// The machine's clocks.
#[derive(Debug)]
pub struct SystemClock {
    start: std::time::Instant,
}

impl Default for SystemClock {
    #[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    fn default() -> Self {
        Self { start: std::time::Instant::now() }
    }
}

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    fn wall(&self) -> Duration {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }
}

/// A clock that stands still until it is moved.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: Mutex<Duration>,
}

impl ManualClock {
    /// Moves both clocks forward.
    pub fn advance(&self, by: Duration) {
        *self.now.lock().expect("no holder of this lock panics") += by;
    }
}

impl Clock for ManualClock {
    fn wall(&self) -> Duration {
        *self.now.lock().expect("no holder of this lock panics")
    }

    fn monotonic(&self) -> Duration {
        self.wall()
    }
}
