//! [`Run`]: one step of a program as a future, and the thread that it moves to when it takes long.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::executor::{Message, Site, State};
use super::inbox::Inbox;
use super::program::Program;
use super::rendezvous::Step;
use super::{OpError, Tensor, pool};

/// One step of a program; the values are those of [`Program::fetches`], by place.
///
/// # Errors
/// The first that a node has, with its name, or the reason why the step was cancelled.
pub(super) struct Run {
    step: Arc<Step>,
    inbox: Arc<Inbox<Message>>,
    /// Not here while a thread has it.
    state: Option<Box<State>>,
    /// What came meanwhile.
    held: Vec<Message>,
    /// Whether a cancellation reaches the inbox.
    watched: bool,
}

impl Run {
    /// Nothing runs before it is polled.
    pub(super) fn new(
        program: Arc<Program>,
        site: Site,
        step: Arc<Step>,
        id: i64,
        feeds: Vec<Option<Tensor>>,
    ) -> Self {
        let inbox = Arc::<Inbox<Message>>::default();
        let state = State::new(program, site, step.clone(), id, feeds, inbox.clone());
        Self { step, inbox, state: Some(Box::new(state)), held: Vec::new(), watched: false }
    }

    fn go(&mut self, waking: &Context<'_>) -> Result<Option<Vec<Tensor>>, OpError> {
        for message in self.inbox.take(waking) {
            match message {
                Message::Back(state, result) => {
                    self.state = Some(state);
                    result?;
                }
                Message::Failed(error) => return Err(error),
                message => self.held.push(message),
            }
        }
        self.step.cancellation.check()?;
        if !std::mem::replace(&mut self.watched, true) {
            let inbox = self.inbox.clone();
            self.step.cancellation.on_cancel(move |_| inbox.put(Message::Cancelled));
        }
        let Some(mut state) = self.state.take() else { return Ok(None) };
        for message in self.held.drain(..) {
            state.hear(message)?;
        }
        if !state.go(true)? {
            let inbox = self.inbox.clone();
            pool::spawn(move || {
                let result = state.go(false).map(|_| ());
                inbox.put(Message::Back(state, result));
            });
            return Ok(None);
        }
        if state.outstanding == 0 {
            return state.results().map(Some);
        }
        self.state = Some(state);
        Ok(None)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

impl Future for Run {
    type Output = Result<Vec<Tensor>, OpError>;

    fn poll(mut self: Pin<&mut Self>, waking: &mut Context<'_>) -> Poll<Self::Output> {
        match self.go(waking) {
            Ok(None) => Poll::Pending,
            Ok(Some(results)) => Poll::Ready(Ok(results)),
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}
