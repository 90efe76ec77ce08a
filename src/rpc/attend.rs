//! [`attend`]: how long a task that serves others stays.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::members::{Departure, Failure, Members};
use crate::cluster::TaskId;

/// How often a signal is looked for.
const GLANCE: Duration = Duration::from_millis(50);

/// How long a serving task stays for the others after a failure.
const LINGER: Duration = Duration::from_secs(10);

/// How long the last ones may take to come back.
const COMEBACK: Duration = Duration::from_secs(5);

/// The exit code of a run whose tasks did not all come.
const MISSING: u8 = 4;

/// The exit code of a run that lost too many tasks.
pub(super) const PEER_LOST: u8 = 5;

/// Whom a task serves, and how it hears of them.
pub struct Attendance<'a> {
    /// This task.
    pub own: &'a TaskId,
    /// Those it serves; the chief is the first.
    pub served: &'a [TaskId],
    /// Whether it is of use only once all have come; else one is enough.
    pub all_needed: bool,
    /// The number of a signal that asks to stop; 0 while there is none.
    pub signal: &'a AtomicUsize,
    /// How long they are waited for at the start.
    pub rendezvous: Duration,
    /// Told in words who is missing, every few seconds, and who was lost or is back.
    pub note: &'a (dyn Fn(&str) + Sync),
}

/// Follows who comes and goes, until all who are served are done or the run has failed; a signal fails it, and so do those
/// who never come and are needed. `follow` is called after each change. After a failure it stays until they
/// are gone, so that they hear of it and the chief can save.
pub async fn attend(
    members: &Members,
    attendance: Attendance<'_>,
    mut follow: impl FnMut(),
) -> Option<Failure> {
    let Attendance { own, served, all_needed, signal, rendezvous, note } = attendance;
    let fail = |reason: String, code: u8| {
        members.fail(Failure { task: own.to_string(), reason, code });
    };
    let mut changes = members.subscribe();
    let start = tokio::time::Instant::now();
    let (mut told, mut left) = (start, None);
    let mut before: Vec<Option<Departure>> = vec![None; served.len()];
    let failure = loop {
        if let Some(failure) = members.failure() {
            break failure;
        }
        follow();
        let departures: Vec<_> = served.iter().map(|task| members.departure(task)).collect();
        if departures.iter().all(|departure| *departure == Some(Departure::Done)) {
            return None;
        }
        for ((task, before), now) in served.iter().zip(&mut before).zip(&departures) {
            match (&*before, now) {
                (None, Some(Departure::Lost)) => note(&format!("lost {task}")),
                (Some(Departure::Lost), None) => note(&format!("{task} is back")),
                _ => {}
            }
            before.clone_from(now);
        }
        if departures.iter().all(Option::is_some) {
            if left.get_or_insert_with(tokio::time::Instant::now).elapsed() >= COMEBACK {
                // The chief has saved when it is done.
                if departures[0] == Some(Departure::Done) {
                    return None;
                }
                fail(format!("{} is gone and did not come back", names(served)), PEER_LOST);
            }
        } else {
            left = None;
        }
        let missing = members.missing(served);
        let is_needed = all_needed || members.present().is_empty();
        if !missing.is_empty() && is_needed {
            if start.elapsed() >= rendezvous {
                let (names, secs) = (names(&missing), rendezvous.as_secs());
                fail(format!("{names} did not come within {secs} s"), MISSING);
            } else if told.elapsed() >= Duration::from_secs(3) {
                told = tokio::time::Instant::now();
                note(&format!("waiting for {}", names(&missing)));
            }
        }
        match signal.load(Ordering::Relaxed) {
            0 => {}
            number => fail(format!("interrupted by signal {number}"), 128 + number as u8),
        }
        // Changes wake at once; signals are looked for now and then.
        let _ = tokio::time::timeout(GLANCE, changes.changed()).await;
    };
    let last = tokio::time::Instant::now() + LINGER;
    while !members.present().is_empty() && tokio::time::Instant::now() < last {
        tokio::time::sleep(GLANCE).await;
    }
    Some(failure)
}

fn names(tasks: &[TaskId]) -> String {
    tasks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
