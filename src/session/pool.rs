//! Threads for steps that take long, kept for the next ones.

use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::cancel::lock;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Pool {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    jobs: Vec<Job>,
    idle: usize,
}

/// How long a thread without work stays.
const LINGER: Duration = Duration::from_secs(10);

/// Runs a job on a thread of its own.
pub(super) fn spawn(job: impl FnOnce() + Send + 'static) {
    static POOL: OnceLock<Pool> = OnceLock::new();
    let pool = POOL.get_or_init(Pool::default);
    let mut state = lock(&pool.state);
    state.jobs.push(Box::new(job));
    if state.idle >= state.jobs.len() {
        drop(state);
        pool.wake.notify_one();
        return;
    }
    drop(state);
    let thread = std::thread::Builder::new().name("step".to_owned());
    // Where the system has no more threads the job waits for one that comes back.
    if let Err(error) = thread.spawn(move || work(pool)) {
        tracing::warn!("no thread for a step that takes long: {error}");
    }
}

fn work(pool: &Pool) {
    loop {
        let job = {
            let mut state = lock(&pool.state);
            if state.jobs.is_empty() {
                state.idle += 1;
                let wait = pool.wake.wait_timeout_while(state, LINGER, |s| s.jobs.is_empty());
                state = wait.unwrap_or_else(PoisonError::into_inner).0;
                state.idle -= 1;
            }
            state.jobs.pop()
        };
        match job {
            Some(job) => job(),
            None => return,
        }
    }
}
