//! Runs a [`Program`]: a node when its inputs are there, whatever the order.
//!
//! Small nodes run where the step is polled, which is where the network is served. What comes from other tasks, steps and threads
//! arrives in its inbox.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::call::{Attempt, Found};
use super::cancel::Bell;
use super::inbox::Inbox;
use super::ops::Kernel;
use super::peers::{Guard, Peers};
use super::program::{Action, Edge, Item, Program};
use super::proto::{RecvTensorRequest, RecvTensorResponse};
use super::rendezvous::{Arrival, Step};
use super::weight::{SMALL, Weight};
use super::{Call, Code, Context, OpError, Resources, Tensor, Value, codec};
use crate::cluster::TaskId;

/// What a step runs on.
#[derive(Clone)]
pub(super) struct Site {
    pub(super) resources: Arc<Resources>,
    pub(super) job: Arc<str>,
    pub(super) peers: Arc<dyn Peers>,
}

/// What arrives from elsewhere.
pub(super) enum Message {
    /// A tensor of another task or device, for the node that waits for it.
    Came(u32, Arrival),
    /// The node may try again.
    Rang(u32),
    /// An error that ends the step.
    Failed(OpError),
    /// The step was cancelled.
    Cancelled,
    /// The state is back, and nothing is ready or the step has failed.
    Back(Box<State>, Result<(), OpError>),
}

/// Elements that are touched at one go where the network is served, and what a node counts beside its own.
const BUDGET: usize = 64 * SMALL;
const NODE: usize = 16;

/// What has come to a `Merge`.
#[derive(Clone, Default)]
struct Merge {
    live: Option<u32>,
    controls: u32,
    fired: bool,
}

/// A step that goes on.
pub(super) struct State {
    program: Arc<Program>,
    site: Site,
    step: Arc<Step>,
    id: i64,
    feeds: Vec<Option<Tensor>>,
    inbox: Arc<Inbox<Message>>,
    /// By slot; taken by the last reader.
    values: Vec<Option<Value>>,
    readers: Vec<u32>,
    pending: Vec<u32>,
    /// Nodes with an input that was not taken.
    dead: Vec<bool>,
    merges: Vec<Merge>,
    ready: Vec<u32>,
    /// Nodes that wait for other steps.
    waiting: Vec<Waiting>,
    /// Nodes whose wait is over, but not their work.
    found: Vec<(u32, Found)>,
    /// Nodes that are not done until a message comes.
    pub(super) outstanding: usize,
    /// Calls to other tasks; those that are not done end with the step.
    guards: Vec<Guard>,
    inputs: Vec<Option<Value>>,
    fetched: Vec<Option<Value>>,
}

/// A node that waits for other steps.
struct Waiting {
    node: u32,
    /// As long as it is kept the node is told.
    bell: Arc<Bell>,
    attempt: Attempt,
}

impl State {
    pub(super) fn new(
        program: Arc<Program>,
        site: Site,
        step: Arc<Step>,
        id: i64,
        feeds: Vec<Option<Tensor>>,
        inbox: Arc<Inbox<Message>>,
    ) -> Self {
        Self {
            site,
            step,
            id,
            feeds,
            inbox,
            values: vec![None; program.readers.len()],
            readers: program.readers.clone(),
            pending: program.items.iter().map(|item| item.pending).collect(),
            dead: vec![false; program.items.len()],
            merges: vec![Merge::default(); program.items.len()],
            ready: program.sources.clone(),
            waiting: Vec::new(),
            found: Vec::new(),
            outstanding: 0,
            guards: Vec::new(),
            inputs: Vec::new(),
            fetched: vec![None; program.fetches.len()],
            program,
        }
    }

    /// Runs what is ready, or only what is done soon; false where more is left.
    pub(super) fn go(&mut self, soon: bool) -> Result<bool, OpError> {
        let mut left = BUDGET;
        while let Some(node) = self.ready.pop() {
            if soon {
                match self.weight(node).and_then(|elements| left.checked_sub(NODE + elements)) {
                    Some(rest) => left = rest,
                    None => {
                        self.ready.push(node);
                        return Ok(false);
                    }
                }
            }
            self.step.cancellation.check()?;
            self.node(node).map_err(|error| self.at(node, error))?;
        }
        Ok(true)
    }

    /// The elements that a node touches; `None` where they are many, or nobody knows.
    fn weight(&self, node: u32) -> Option<usize> {
        let item = &self.program.items[node as usize];
        let found = self.found.iter().find(|(own, _)| *own == node);
        let slots = self.program.inputs[item.inputs.clone()].iter();
        let inputs = slots.map(|&slot| self.values[slot as usize].as_ref());
        let elements = match (&item.action, found) {
            (_, Some((_, found))) => found.elements,
            (Action::Kernel(kernel), None) if kernel.blocks => return None,
            (Action::Kernel(_), None) => item.weight.elements(inputs)?,
            // A variable is read when its value leaves.
            _ => Weight::Inputs.elements(inputs).map(|_| 0)?,
        };
        (elements <= SMALL).then_some(elements)
    }

    /// What the client fetches.
    pub(super) fn results(self) -> Result<Vec<Tensor>, OpError> {
        let dead = || OpError::invalid("Retval[0] does not have value: its branch was not taken");
        self.fetched.into_iter().map(|value| value.ok_or_else(dead)?.tensor()).collect()
    }

    /// Names the node of an error; the step's own end has none.
    fn at(&self, node: u32, error: OpError) -> OpError {
        match self.step.cancellation.check() {
            Err(cancelled) if cancelled == error => error,
            _ => error.at(&self.program.items[node as usize].name),
        }
    }

    /// Takes a message up.
    pub(super) fn hear(&mut self, message: Message) -> Result<(), OpError> {
        match message {
            Message::Came(node, arrival) => {
                self.outstanding -= 1;
                self.give(node, arrival.into_iter().collect());
            }
            Message::Rang(node) => {
                if let Some(place) = self.waiting.iter().position(|waiting| waiting.node == node) {
                    let waiting = self.waiting.swap_remove(place);
                    self.attempt(waiting).map_err(|error| self.at(node, error))?;
                }
            }
            Message::Failed(error) => return Err(error),
            // The run has seen to these.
            Message::Cancelled | Message::Back(..) => {}
        }
        Ok(())
    }

    /// The outputs of a node that had to wait.
    fn give(&mut self, node: u32, outputs: Vec<Tensor>) {
        let slots = self.program.items[node as usize].slots.clone();
        for (value, output) in self.values[slots].iter_mut().zip(outputs) {
            *value = Some(Value::Tensor(output));
        }
        self.finish(node, false);
    }

    /// Looks for what a node waits for.
    fn attempt(&mut self, mut waiting: Waiting) -> Result<(), OpError> {
        match (waiting.attempt)(&waiting.bell) {
            None => self.waiting.push(waiting),
            Some(found) => {
                self.outstanding -= 1;
                self.found.push((waiting.node, found?));
                self.ready.push(waiting.node);
            }
        }
        Ok(())
    }

    /// Runs a node whose inputs are there.
    fn node(&mut self, node: u32) -> Result<(), OpError> {
        if let Some(place) = self.found.iter().position(|(own, _)| *own == node) {
            let found = self.found.swap_remove(place).1;
            let outputs = guarded(found.outputs)?;
            self.give(node, outputs);
            return Ok(());
        }
        let program = self.program.clone();
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
            Action::Receive(key, from) => self.receive(node, item, key, from.as_ref()),
            Action::Kernel(kernel) => {
                self.gather(node);
                let outputs = &mut self.values[item.slots.clone()];
                match compute(kernel, &self.site, &mut self.inputs, outputs)? {
                    None => self.finish(node, false),
                    Some(attempt) => {
                        let inbox = self.inbox.clone();
                        let bell = Bell::new(move || inbox.put(Message::Rang(node)));
                        self.outstanding += 1;
                        self.attempt(Waiting { node, bell, attempt })?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Asks for what comes from another device or task.
    fn receive(&mut self, node: u32, item: &Item, key: &Arc<str>, from: Option<&TaskId>) {
        self.outstanding += 1;
        let (inbox, name) = (self.inbox.clone(), item.name.clone());
        let arrive = move |result: Result<Arrival, OpError>| {
            inbox.put(match result {
                Ok(arrival) => Message::Came(node, arrival),
                Err(error) => Message::Failed(error.at(&name)),
            });
        };
        let Some(task) = from else {
            return self.step.rendezvous.receive(key.clone(), Box::new(arrive));
        };
        let request = RecvTensorRequest {
            step_id: self.id,
            rendezvous_key: key.to_string(),
            request_id: super::unique() as i64,
        };
        let done = move |answer: Result<RecvTensorResponse, OpError>| {
            // A task that fails tells the master itself; one that is gone does not.
            let answer = answer.map_err(|error| match error.code {
                Code::Unavailable => error,
                _ => error.derived(),
            });
            arrive(answer.and_then(|answer| match answer.is_dead {
                true => Ok(None),
                false => codec::decode(&answer.tensor.unwrap_or_default()).map(Some),
            }));
        };
        self.guards.push(self.site.peers.recv_tensor(task, request, Box::new(done)));
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

    /// Tells those that wait for a node.
    fn finish(&mut self, node: u32, is_dead: bool) {
        let program = self.program.clone();
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

/// Runs a kernel; the value is what it waits for.
fn compute(
    kernel: &Kernel,
    site: &Site,
    inputs: &mut [Option<Value>],
    outputs: &mut [Option<Value>],
) -> Result<Option<Attempt>, OpError> {
    let context = Context { resources: &site.resources, job: &site.job };
    guarded(|| {
        let mut call = Call::new(&context, inputs, outputs);
        (kernel.run)(&mut call)?;
        Ok(call.waits_for())
    })
}

/// A panic is an error of the step, not of the server.
fn guarded<T>(work: impl FnOnce() -> Result<T, OpError>) -> Result<T, OpError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(OpError::internal("the kernel failed; its task's log says why")))
}
