//! [`Trace`]: when what was done, for a picture of a step.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::clock::Clock;

/// Something that took time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// What.
    pub name: String,
    /// Where: spans of one lane do not overlap, unless one holds the other.
    pub lane: String,
    /// When it began, since the Unix epoch.
    pub start: Duration,
    /// How long it took.
    pub took: Duration,
}

/// Collects spans while it is open. Steps that are not traced cost a look at one number.
pub struct Trace {
    clock: Arc<dyn Clock>,
    /// Steps still to be traced.
    left: AtomicU64,
    spans: Mutex<Vec<Span>>,
}

impl Trace {
    /// Of the next `steps` steps.
    pub fn new(clock: Arc<dyn Clock>, steps: u64) -> Self {
        Self { clock, left: AtomicU64::new(steps), spans: Mutex::default() }
    }

    /// Whether spans are wanted.
    pub fn is_open(&self) -> bool {
        self.left.load(Ordering::Relaxed) > 0
    }

    /// A step is over; `true` when it was the last one.
    pub fn step(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        left == 1
    }

    /// Now, to be handed to [`Trace::span`]; `None` while closed.
    pub fn start(&self) -> Option<Duration> {
        self.is_open().then(|| self.clock.wall())
    }

    /// What began at `start` ends now.
    pub fn span(&self, start: Option<Duration>, lane: &str, name: impl FnOnce() -> String) {
        let Some(start) = start else { return };
        let took = self.clock.wall().saturating_sub(start);
        self.add(Span { name: name(), lane: lane.to_owned(), start, took });
    }

    /// Something that was timed elsewhere.
    pub fn add(&self, span: Span) {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }

    /// The spans so far, by lane and time.
    pub fn spans(&self) -> Vec<Span> {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone();
        spans.sort_by(|a, b| (&a.lane, a.start, b.took).cmp(&(&b.lane, b.start, a.took)));
        spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::clock::ManualClock;

    #[test]
    fn only_the_steps_that_were_asked_for() {
        let clock = Arc::new(ManualClock::default());
        let trace = Trace::new(clock.clone(), 2);
        for step in 0..4 {
            let start = trace.start();
            clock.advance(Duration::from_micros(10));
            trace.span(start, "step", || format!("step {step}"));
            assert_eq!(trace.step(), step == 1);
        }
        let spans = trace.spans();
        assert_eq!(spans.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["step 0", "step 1"]);
        assert_eq!((spans[1].start.as_micros(), spans[1].took.as_micros()), (10, 10));
    }
}
