//! Runs a [`Program`]: a node when its inputs are there, whatever the order.
//!
//! Everything runs on the caller's thread but kernels that wait: while others can run, those have threads of their own. What
//! comes from other tasks and threads arrives in an inbox.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::cancel::lock;
use super::ops::Kernel;
use super::peers::{Guard, Peers};
use super::pool;
use super::program::{Action, Edge, Program};
use super::proto::RecvTensorRequest;
use super::rendezvous::{Arrival, Step};
use super::{Call, Code, Context, OpError, Resources, Tensor, Value, codec};

/// What a step runs on.
#[derive(Clone)]
pub(super) struct Site {
    pub(super) resources: Arc<Resources>,
    pub(super) job: Arc<str>,
    pub(super) peers: Arc<dyn Peers>,
}

/// What arrives from elsewhere: the outputs of a node, or the end of the step.
type Message = Result<(u32, Vec<Option<Value>>), OpError>;

#[derive(Default)]
struct Inbox {
    messages: Mutex<Vec<Message>>,
    came: Condvar,
}

impl Inbox {
    fn put(&self, message: Message) {
        lock(&self.messages).push(message);
        self.came.notify_one();
    }

    fn wait(&self) -> Vec<Message> {
        let waited = self.came.wait_while(lock(&self.messages), |messages| messages.is_empty());
        std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner))
    }
}

/// Runs one step of a program; the values are those of [`Program::fetches`], by place.
///
/// # Errors
/// The first that a node has, with its name, or the reason why the step was cancelled.
pub(super) fn run(
    program: &Arc<Program>,
    site: &Site,
    step: &Arc<Step>,
    id: i64,
    feeds: Vec<Option<Tensor>>,
) -> Result<Vec<Tensor>, OpError> {
    let mut run = Run {
        site,
        step,
        id,
        feeds,
        inbox: Arc::default(),
        values: vec![None; program.readers.len()],
        readers: program.readers.clone(),
        pending: program.items.iter().map(|item| item.pending).collect(),
        dead: vec![false; program.items.len()],
        merges: vec![Merge::default(); program.items.len()],
        ready: program.sources.clone(),
        waiting: Vec::new(),
        outstanding: 0,
        watched: false,
        guards: Vec::new(),
        inputs: Vec::new(),
        fetched: vec![None; program.fetches.len()],
        program,
    };
    run.go()?;
    let dead = || OpError::invalid("Retval[0] does not have value: its branch was not taken");
    run.fetched.into_iter().map(|value| value.ok_or_else(dead)?.tensor()).collect()
}

/// What has come to a `Merge`.
#[derive(Clone, Default)]
struct Merge {
    live: Option<u32>,
    controls: u32,
    fired: bool,
}

struct Run<'a> {
    program: &'a Arc<Program>,
    site: &'a Site,
    step: &'a Arc<Step>,
    id: i64,
    feeds: Vec<Option<Tensor>>,
    inbox: Arc<Inbox>,
    /// By slot; taken by the last reader.
    values: Vec<Option<Value>>,
    readers: Vec<u32>,
    pending: Vec<u32>,
    /// Nodes with an input that was not taken.
    dead: Vec<bool>,
    merges: Vec<Merge>,
    ready: Vec<u32>,
    /// Ready, but they may wait for other steps.
    waiting: Vec<u32>,
    /// Messages that are to come.
    outstanding: usize,
    /// Whether a cancellation reaches the inbox.
    watched: bool,
    /// Calls to other tasks; those that are not done end with the step.
    guards: Vec<Guard>,
    inputs: Vec<Option<Value>>,
    fetched: Vec<Option<Value>>,
}

impl<'a> Run<'a> {
    fn go(&mut self) -> Result<(), OpError> {
        loop {
            while let Some(node) = self.ready.pop() {
                self.node(node).map_err(|error| self.at(node, error))?;
            }
            match self.waiting.len() {
                0 if self.outstanding == 0 => return Ok(()),
                // Nothing else could run meanwhile.
                1 if self.outstanding == 0 => {
                    let node = self.waiting.swap_remove(0);
                    self.kernel(node).map_err(|error| self.at(node, error))?;
                    continue;
                }
                _ => {}
            }
            self.watch();
            for node in std::mem::take(&mut self.waiting) {
                self.elsewhere(node);
            }
            for message in self.inbox.wait() {
                let (node, outputs) = message?;
                self.outstanding -= 1;
                let slots = self.program.items[node as usize].slots.clone();
                for (value, output) in self.values[slots].iter_mut().zip(outputs) {
                    *value = output;
                }
                self.finish(node, false);
            }
        }
    }

    /// Names the node of an error; the step's own end has none.
    fn at(&self, node: u32, error: OpError) -> OpError {
        match self.step.cancellation.check() {
            Err(cancelled) if cancelled == error => error,
            _ => error.at(&self.program.items[node as usize].name),
        }
    }

    fn watch(&mut self) {
        if !self.watched {
            self.watched = true;
            let inbox = self.inbox.clone();
            self.step.cancellation.on_cancel(move |error| inbox.put(Err(error.clone())));
        }
    }

    /// Runs a node whose inputs are there.
    fn node(&mut self, node: u32) -> Result<(), OpError> {
        let program: &'a Program = self.program;
        let item = &program.items[node as usize];
        let is_dead = self.dead[node as usize];
        let first = item.slots.start;
        match &item.action {
            Action::Send(key) => {
                let tensor = match is_dead {
                    true => None,
                    false => Some(self.input(item.inputs.start)?.tensor()?),
                };
                self.step.rendezvous.send(key, tensor)?;
                self.finish(node, is_dead);
            }
            Action::Fetch(place) => {
                self.fetched[*place] = match is_dead {
                    true => None,
                    false => Some(self.input(item.inputs.start)?),
                };
                self.finish(node, is_dead);
            }
            Action::Merge => {
                if let Some(live) = self.merges[node as usize].live {
                    let value = self.input(item.inputs.start + live as usize)?;
                    if item.slots.len() > 1 {
                        self.values[first + 1] = Some(Value::Tensor(Tensor::scalar(live as i32)));
                    }
                    if !item.slots.is_empty() {
                        self.values[first] = Some(value);
                    }
                }
                self.finish(node, self.merges[node as usize].live.is_none());
            }
            _ if is_dead => self.finish(node, true),
            Action::Nothing => self.finish(node, false),
            Action::Const(tensor) => {
                if let Some(place) = self.values.get_mut(first).filter(|_| !item.slots.is_empty()) {
                    *place = Some(Value::Tensor(tensor.clone()));
                }
                self.finish(node, false);
            }
            Action::Feed(place) => {
                let fed = self.feeds.get(*place).cloned().flatten();
                let fed = fed.ok_or_else(|| OpError::invalid("a tensor to be fed is missing"))?;
                if !item.slots.is_empty() {
                    self.values[first] = Some(Value::Tensor(fed));
                }
                self.finish(node, false);
            }
            Action::Switch => {
                let taken: bool = self.input(item.inputs.start + 1)?.tensor()?.item()?;
                let value = self.input(item.inputs.start)?;
                let place = first + usize::from(taken);
                if place < item.slots.end {
                    self.values[place] = Some(value);
                }
                self.finish(node, false);
            }
            Action::Receive(key, from) => {
                self.watch();
                self.outstanding += 1;
                let inbox = self.inbox.clone();
                let name = item.name.clone();
                let arrive = move |result: Result<Arrival, OpError>| {
                    let message = result.map(|tensor| (node, vec![tensor.map(Value::Tensor)]));
                    inbox.put(message.map_err(|error| error.at(&name)));
                };
                match from {
                    None => self.step.rendezvous.receive(key.clone(), Box::new(arrive)),
                    Some(task) => {
                        let request = RecvTensorRequest {
                            step_id: self.id,
                            rendezvous_key: key.to_string(),
                            request_id: super::unique() as i64,
                        };
                        let done = Box::new(
                            move |answer: Result<super::proto::RecvTensorResponse, OpError>| {
                                // A task that fails tells the master itself; one that is gone does not.
                                let answer = answer.map_err(|error| match error.code {
                                    Code::Unavailable => error,
                                    _ => error.derived(),
                                });
                                arrive(answer.and_then(|answer| match answer.is_dead {
                                    true => Ok(None),
                                    false => {
                                        codec::decode(&answer.tensor.unwrap_or_default()).map(Some)
                                    }
                                }));
                            },
                        );
                        self.guards.push(self.site.peers.recv_tensor(task, request, done));
                    }
                }
            }
            Action::Kernel(kernel) if kernel.blocks => self.waiting.push(node),
            Action::Kernel(_) => self.kernel(node)?,
        }
        Ok(())
    }

    /// The value of an input: its last reader takes it.
    fn input(&mut self, place: usize) -> Result<Value, OpError> {
        let missing = || OpError::internal("an input has no value: its node has fewer outputs");
        take(&self.program.inputs, &mut self.values, &mut self.readers, place).ok_or_else(missing)
    }

    fn gather(&mut self, node: u32) {
        let range = self.program.items[node as usize].inputs.clone();
        self.inputs.clear();
        for place in range {
            let value = take(&self.program.inputs, &mut self.values, &mut self.readers, place);
            self.inputs.push(value);
        }
    }

    fn kernel(&mut self, node: u32) -> Result<(), OpError> {
        self.gather(node);
        let program: &'a Program = self.program;
        let item = &program.items[node as usize];
        if let Action::Kernel(kernel) = &item.action {
            let outputs = &mut self.values[item.slots.clone()];
            compute(kernel, self.site, self.step, &mut self.inputs, outputs)?;
        }
        self.finish(node, false);
        Ok(())
    }

    /// Runs a kernel that may wait on a thread of its own.
    fn elsewhere(&mut self, node: u32) {
        self.gather(node);
        self.outstanding += 1;
        let mut inputs = std::mem::take(&mut self.inputs);
        let (program, step) = (Arc::clone(self.program), self.step.clone());
        let (site, inbox) = (self.site.clone(), self.inbox.clone());
        pool::spawn(move || {
            let item = &program.items[node as usize];
            let mut outputs = vec![None; item.slots.len()];
            let result = match &item.action {
                Action::Kernel(kernel) => compute(kernel, &site, &step, &mut inputs, &mut outputs),
                _ => Ok(()),
            };
            let cancelled = step.cancellation.check().err();
            inbox.put(match result {
                Ok(()) => Ok((node, outputs)),
                Err(error) if cancelled.as_ref() == Some(&error) => Err(error),
                Err(error) => Err(error.at(&item.name)),
            });
        });
    }

    /// Tells those that wait for a node.
    fn finish(&mut self, node: u32, is_dead: bool) {
        let program: &'a Program = self.program;
        for &Edge { to, slot, input } in &program.edges[program.items[node as usize].edges.clone()]
        {
            let lives = !is_dead && slot.is_none_or(|slot| self.values[slot as usize].is_some());
            let at = to as usize;
            self.pending[at] -= 1;
            let item = &program.items[at];
            if !matches!(item.action, Action::Merge) {
                self.dead[at] |= !lives;
                if self.pending[at] == 0 {
                    self.ready.push(to);
                }
                continue;
            }
            let merge = &mut self.merges[at];
            match slot {
                None => merge.controls += 1,
                Some(_) if lives && merge.live.is_none() && !merge.fired => {
                    merge.live = Some(input);
                }
                Some(_) => {}
            }
            let can_fire = merge.controls == item.controls && merge.live.is_some();
            if !merge.fired && (can_fire || self.pending[at] == 0) {
                merge.fired = true;
                self.ready.push(to);
            }
        }
    }
}

fn take(
    inputs: &[u32],
    values: &mut [Option<Value>],
    readers: &mut [u32],
    place: usize,
) -> Option<Value> {
    let slot = inputs[place] as usize;
    readers[slot] -= 1;
    if readers[slot] == 0 { values[slot].take() } else { values[slot].clone() }
}

/// Runs a kernel; its panic is an error of the step, not of the server.
fn compute(
    kernel: &Kernel,
    site: &Site,
    step: &Step,
    inputs: &mut [Option<Value>],
    outputs: &mut [Option<Value>],
) -> Result<(), OpError> {
    let context =
        Context { resources: &site.resources, cancellation: &step.cancellation, job: &site.job };
    let mut call = Call::new(&context, inputs, outputs);
    catch_unwind(AssertUnwindSafe(|| (kernel.run)(&mut call)))
        .unwrap_or_else(|_| Err(OpError::internal("the kernel failed; its task's log says why")))
}
