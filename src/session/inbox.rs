//! [`Inbox`]: where a step hears from elsewhere, and [`block_on`]: how a caller without a runtime waits for one.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use super::cancel::lock;

/// Messages for one future, from any thread.
pub(super) struct Inbox<M>(Mutex<State<M>>);

struct State<M> {
    messages: Vec<M>,
    waker: Option<Waker>,
    closed: bool,
}

impl<M> Default for Inbox<M> {
    fn default() -> Self {
        Self(Mutex::new(State { messages: Vec::new(), waker: None, closed: false }))
    }
}

impl<M> Inbox<M> {
    /// Leaves a message and has the future polled.
    pub(super) fn put(&self, message: M) {
        let waker = {
            let mut state = lock(&self.0);
            if state.closed {
                return;
            }
            state.messages.push(message);
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Nobody reads it any more: what comes is dropped, so that no message keeps what keeps the inbox.
    pub(super) fn close(&self) {
        let dropped = {
            let mut state = lock(&self.0);
            state.closed = true;
            (std::mem::take(&mut state.messages), state.waker.take())
        };
        drop(dropped);
    }

    /// What has come; the next message has the future polled again.
    pub(super) fn take(&self, context: &Context<'_>) -> Vec<M> {
        let mut state = lock(&self.0);
        state.waker = Some(context.waker().clone());
        std::mem::take(&mut state.messages)
    }
}

/// Waits for a future on the calling thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Thread(std::thread::Thread);
    impl Wake for Thread {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Thread(std::thread::current())).into();
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        std::thread::park();
    }
}
