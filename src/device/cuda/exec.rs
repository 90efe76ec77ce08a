//! [`Executor`]: runs a program on a GPU: at first launch by launch, then as one recorded step that is replayed.

use std::cell::Cell;
use std::sync::Arc;

use super::driver::{Graph, Memory, Pinned, Ptr};
use super::events::Event;
use super::fit::Fit;
use super::input::Input;
use super::kernels::Grid;
use super::launch::Memories;
use super::pieces::{Piece, pieces};
use super::plan::{Libraries, Plan};
use super::scalars::Scalars;
use super::{Engine, Precision};
use crate::device::{DRAW, DeviceError, Done, Executable, Feeds, Slab};
use crate::graph::{Place, Program};
use crate::tensor::Shape;
use crate::util::trace::{Span, Trace};

/// Floats between the parts of its memory are multiples of this.
const ALIGN: usize = 64;
/// Recorded steps that are kept: one per slab of gradients that a tower writes to.
const GRAPHS: usize = 64;

/// A program with its memory on a GPU.
pub(super) struct Executor {
    // Dropped first: what is recorded uses the memory below.
    graphs: Vec<Recorded>,
    program: Program,
    plan: Plan,
    /// The whole step, and the step cut for who sums gradients early.
    whole: Piece,
    pieces: Vec<Piece>,
    engine: Arc<Engine>,
    /// Feeds, arena, workspace and counters, one behind the other.
    memory: Memory,
    feeds: Vec<Ptr>,
    /// Where the first feed's short form lies.
    draws: Ptr,
    arena: Ptr,
    workspace: Ptr,
    counters: Ptr,
    input: Input,
    scalars: Scalars,
    fit: Fit,
    /// Where variables that lie on the host go.
    variables: Option<Staging>,
    /// Where gradients come from that shall lie on the host.
    gradients: Option<Staging>,
    /// Whether a run may still be under way.
    running: Cell<bool>,
    /// Where operations are drawn, and in which lane.
    trace: Option<(Arc<Trace>, String)>,
}

/// A slab's copy on the GPU, with the memory of the host that it is copied from or to.
struct Staging {
    host: Pinned,
    device: Memory,
}

/// What a recording of a step holds for.
#[derive(Clone, Copy, PartialEq)]
struct Form {
    variables: Ptr,
    gradients: Ptr,
    /// Whether gradients are copied to the host.
    to_host: bool,
    /// Whether the first feed comes in its short form.
    is_short: bool,
    /// Whether it is cut into pieces.
    in_pieces: bool,
}

/// A recorded step, for the slabs that it was recorded with.
struct Recorded {
    form: Form,
    /// One per piece; none after the first run, which warms up the libraries.
    graphs: Vec<Graph>,
}

impl Executor {
    pub(super) fn new(program: Program, engine: Arc<Engine>) -> Result<Self, DeviceError> {
        let libraries = Libraries {
            blas: engine.blas.clone(),
            dnn: engine.dnn.clone(),
            bf16: engine.precision == Precision::Bf16,
        };
        let plan = Plan::new(&program, &libraries)?;
        let mut total = 0;
        let mut part = |floats: usize| {
            let offset = total;
            total += floats.next_multiple_of(ALIGN);
            offset
        };
        let feeds: Vec<usize> = program.feeds.iter().map(|shape| part(shape.elements())).collect();
        let fed: usize = program.feeds.iter().map(|shape| shape.elements()).sum();
        let batch = program.feeds.first().and_then(|shape| shape.first()).copied().unwrap_or(1);
        let draws = part(short_len(&program));
        let [arena, workspace, counters] =
            [plan.arena, plan.workspace, plan.counters].map(&mut part);
        let fit = Fit {
            batch,
            room: engine.driver.free(),
            growing: 4 * (total + fed) as u64,
            fixed: 8 * program.table.slab_len() as u64,
        };
        let memory = engine.driver.alloc(total).map_err(|e| fit.advise(e))?;
        let start = memory.start();
        let input = Input::new(&engine.driver, fed).map_err(|e| fit.advise(e))?;
        let scalars = Scalars::new(&engine.driver, plan.scalars)?;
        Ok(Self {
            graphs: Vec::new(),
            feeds: feeds.iter().map(|offset| start.at(*offset)).collect(),
            draws: start.at(draws),
            arena: start.at(arena),
            workspace: start.at(workspace),
            counters: start.at(counters),
            program,
            whole: Piece { launches: 0..plan.launches.len(), ranges: Vec::new() },
            pieces: pieces(&plan.launches),
            plan,
            engine,
            memory,
            input,
            scalars,
            fit,
            variables: None,
            gradients: None,
            running: Cell::new(false),
            trace: None,
        })
    }

    fn mismatch(&self, reason: String) -> DeviceError {
        DeviceError::Mismatch { device: self.engine.driver.name().to_owned(), reason }
    }

    /// Waits for the last run, if need be.
    fn settle(&self) -> Result<(), DeviceError> {
        if self.running.get() {
            self.engine.driver.synchronize()?;
            self.running.set(false);
        }
        Ok(())
    }

    /// Whether feeds are as long as the program says, the first perhaps in its short form.
    fn check(&self, feeds: &[&[f32]]) -> Result<(), DeviceError> {
        let expected = &self.program.feeds;
        let short = |i| i == 0 && self.engine.pictures.get().is_some();
        let fits = |(i, (feed, shape)): (usize, (&&[f32], &Shape))| {
            feed.len() == shape.elements() || short(i) && feed.len() == short_len(&self.program)
        };
        if feeds.len() == expected.len() && feeds.iter().zip(expected).enumerate().all(fits) {
            return Ok(());
        }
        let lengths: Vec<usize> = feeds.iter().map(|feed| feed.len()).collect();
        Err(self.mismatch(format!("feeds of {lengths:?} floats for {expected:?}")))
    }

    /// Enqueues that the batch goes where the program reads it; says whether it is in its short form.
    fn take_input(&self) -> Result<bool, DeviceError> {
        let is_short = self.engine.pictures.get().is_some()
            && self.input.begins_with(short_len(&self.program))
            && self.program.feeds[0].elements() != short_len(&self.program);
        let mut places = self.feeds.clone();
        if is_short {
            places[0] = self.draws;
        }
        self.input.take(&places)?;
        Ok(is_short)
    }

    /// Where the variables lie on the GPU; those of the host are put where it takes them from.
    fn place_variables(&mut self, slab: &Slab) -> Result<Ptr, DeviceError> {
        let len = self.program.table.slab_len();
        if slab.len() != len {
            return Err(self.mismatch(format!("variables of {} floats for {len}", slab.len())));
        }
        let driver = &self.engine.driver;
        match (slab.as_cuda(), slab.as_host()) {
            (Some(memory), _) if memory.is_on(driver) => Ok(memory.start()),
            (_, Some(floats)) => {
                // The run before may still read what is about to be overwritten.
                self.settle()?;
                let staging = staged(&mut self.variables, &self.engine, &self.fit, len)?;
                staging.host.floats_mut().copy_from_slice(floats);
                Ok(staging.device.start())
            }
            _ => Err(self.mismatch("the variables lie on another device".to_owned())),
        }
    }

    /// Where the gradients will lie on the GPU, and whether they go to the host from there.
    fn place_gradients(&mut self, slab: Option<&Slab>) -> Result<(Ptr, bool), DeviceError> {
        let len = self.program.table.slab_len();
        let Some(slab) = slab else {
            let launches = &self.plan.launches;
            let mut outputs = launches.iter().flat_map(|launch| &launch.outputs);
            return match outputs.any(|(view, _)| view.place == Place::Gradients) {
                true => Err(self.mismatch("there is no slab for the gradients".to_owned())),
                false => Ok((Ptr::NULL, false)),
            };
        };
        if slab.len() != len {
            return Err(self.mismatch(format!("gradients of {} floats for {len}", slab.len())));
        }
        match slab.as_cuda() {
            Some(memory) if memory.is_on(&self.engine.driver) => Ok((memory.start(), false)),
            Some(_) => Err(self.mismatch("the gradients lie on another device".to_owned())),
            None => {
                let staging = staged(&mut self.gradients, &self.engine, &self.fit, len)?;
                Ok((staging.device.start(), true))
            }
        }
    }

    /// The pieces of a step.
    fn pieces(&self, form: Form) -> &[Piece] {
        match form.in_pieces {
            true => &self.pieces,
            false => std::slice::from_ref(&self.whole),
        }
    }

    /// Enqueues a piece of a step: copies in, launches, copies out. With `marks`, one is set before and after each launch.
    fn enqueue(&mut self, form: Form, n: usize, marks: &[Event]) -> Result<(), DeviceError> {
        let Form { variables, gradients, to_host, is_short, .. } = form;
        let (is_first, is_last) = (n == 0, n + 1 == self.pieces(form).len());
        let launches = self.pieces(form)[n].launches.clone();
        let driver = &self.engine.driver;
        if let Some(pictures) = self.engine.pictures.get().filter(|_| is_short && is_first) {
            let (count, of) = (self.program.feeds[0][0], pictures.count as i32);
            let (grid, from) = (Grid::blocks([count, 1, 1]), pictures.memory.start());
            self.engine.kernels.augment(grid, from, self.draws, self.feeds[0], of)?;
        }
        if let Some(staging) = self
            .variables
            .as_ref()
            .filter(|staging| is_first && staging.device.start() == variables)
        {
            driver.upload(staging.host.floats(), variables)?;
        }
        let (arena, workspace, counters) = (self.arena, self.workspace, self.counters);
        let feeds = &self.feeds;
        let memories = Memories { feeds, variables, gradients, arena, workspace, counters };
        let mut marks = marks.iter();
        let mut mark = || marks.next().map_or(Ok(()), |mark| mark.record(driver.stream()));
        mark()?;
        for launch in &self.plan.launches[launches] {
            launch.enqueue(&self.engine.kernels, &memories)?;
            mark()?;
        }
        if let Some(staging) = self.gradients.as_mut().filter(|_| to_host && is_last) {
            driver.download(gradients, staging.host.floats_mut())?;
        }
        Ok(())
    }

    /// Launches a step: recorded from its second run in this form on. `tell` hears of each piece that is on its way.
    fn launch(&mut self, form: Form, tell: &mut dyn FnMut(&Piece)) -> Result<(), DeviceError> {
        let known = self.graphs.iter().position(|recorded| recorded.form == form);
        let at = known.unwrap_or_else(|| {
            if self.graphs.len() == GRAPHS {
                self.graphs.remove(0);
            }
            self.graphs.push(Recorded { form, graphs: Vec::new() });
            self.graphs.len() - 1
        });
        for n in 0..self.pieces(form).len() {
            if known.is_none() {
                self.enqueue(form, n, &[])?;
            } else {
                if self.graphs[at].graphs.len() == n {
                    let driver = self.engine.driver.clone();
                    let graph = driver.capture(|| self.enqueue(form, n, &[]))?;
                    self.graphs[at].graphs.push(graph);
                }
                self.graphs[at].graphs[n].launch()?;
            }
            tell(&self.pieces(form)[n]);
            // Who was told may have used another GPU.
            self.engine.driver.bind()?;
        }
        Ok(())
    }

    /// Launches a step one by one, and draws when the GPU did what.
    fn launch_traced(&mut self, form: Form) -> Result<(), DeviceError> {
        let Some((trace, lane)) = self.trace.clone() else { return Ok(()) };
        let form = Form { in_pieces: false, ..form };
        let driver = self.engine.driver.clone();
        let marks = (0..=self.plan.launches.len()).map(|_| Event::timed(&driver));
        let marks = marks.collect::<Result<Vec<_>, _>>()?;
        driver.synchronize()?;
        let Some(start) = trace.start() else { return Ok(()) };
        self.enqueue(form, 0, &marks)?;
        driver.synchronize()?;
        for ((from, to), launch) in marks.iter().zip(&marks[1..]).zip(&self.plan.launches) {
            let start = start + marks[0].until(from)?;
            let (name, lane, took) = (launch.name.clone(), lane.clone(), from.until(to)?);
            trace.add(Span { name, lane, start, took });
        }
        Ok(())
    }
}

/// Floats of the first feed's short form; none where that is no pictures.
fn short_len(program: &Program) -> usize {
    match program.feeds.first().map(|shape| &shape[..]) {
        Some(&[pictures, _, _, _]) => DRAW * pictures,
        _ => 0,
    }
}

/// The staging memory of a slab, made when first needed.
fn staged<'a>(
    staging: &'a mut Option<Staging>,
    engine: &Engine,
    fit: &Fit,
    len: usize,
) -> Result<&'a mut Staging, DeviceError> {
    match staging {
        Some(staging) => Ok(staging),
        None => {
            let device = engine.driver.alloc(len).map_err(|e| fit.advise(e))?;
            Ok(staging.insert(Staging { host: engine.driver.pinned(len)?, device }))
        }
    }
}

impl Executable for Executor {
    fn run(
        &mut self,
        variables: &Slab,
        feeds: Feeds<'_>,
        gradients: Option<&mut Slab>,
        done: Done<'_>,
    ) -> Result<(), DeviceError> {
        self.engine.driver.bind()?;
        if !feeds.known {
            self.check(feeds.now)?;
            self.input.bring(feeds.now)?;
        }
        let variables_at = self.place_variables(variables)?;
        let (gradients_at, to_host) = self.place_gradients(gradients.as_deref())?;
        self.running.set(true);
        let form = Form {
            variables: variables_at,
            gradients: gradients_at,
            to_host,
            is_short: self.take_input()?,
            in_pieces: feeds.early && !to_host && gradients.is_some(),
        };
        let mut tell = |piece: &Piece| {
            piece.ranges.iter().for_each(|range| done(range.clone(), &[]));
        };
        match &self.trace {
            Some((trace, _)) if trace.is_open() => {
                self.launch_traced(form)?;
                self.pieces(form).iter().for_each(&mut tell);
            }
            _ => self.launch(form, &mut tell)?,
        }
        self.scalars.keep(&self.engine.driver, self.arena)?;
        if let Some(next) = feeds.next {
            self.check(next)?;
            self.input.bring(next)?;
        }
        let host = gradients.filter(|_| to_host).and_then(Slab::as_host_mut);
        let (Some(host), Some(staging)) = (host, &self.gradients) else { return Ok(()) };
        self.settle()?;
        let staged = staging.host.floats();
        for step in self.program.steps.iter().filter(|s| s.output.place == Place::Gradients) {
            let range = step.output.offset..step.output.offset + step.output.len;
            host[range.clone()].copy_from_slice(&staged[range.clone()]);
            done(range.clone(), &host[range]);
        }
        Ok(())
    }

    fn fetch(&self, index: usize, into: &mut [f32]) -> Result<(), DeviceError> {
        let view = self.plan.fetches.get(index).copied().flatten();
        let Some(view) = view.filter(|view| view.len == into.len()) else {
            return Err(self.mismatch(format!("no fetch {index} of {} floats", into.len())));
        };
        self.engine.driver.bind()?;
        self.settle()?;
        let offset = ((self.arena.0 - self.memory.start().0) / 4) as usize;
        self.memory.read(offset + view.offset, into)
    }

    fn scalars(&mut self, count: usize, into: &mut Vec<f32>) -> Result<(), DeviceError> {
        self.engine.driver.bind()?;
        self.settle()?;
        let fetches = self.plan.fetches.get(..count).unwrap_or_default();
        let places = fetches.iter().map(|view| view.filter(|v| v.offset < self.scalars.len()));
        let Some(places) = places.map(|view| view.map(|v| v.offset)).collect::<Option<Vec<_>>>()
        else {
            return Err(self.mismatch(format!("not all of the first {count} fetches are numbers")));
        };
        for row in self.scalars.take() {
            into.extend(places.iter().map(|place| row[*place]));
        }
        Ok(())
    }

    fn remembers(&self) -> usize {
        Scalars::ROWS
    }

    fn trace(&mut self, trace: Arc<Trace>, lane: &str) {
        self.trace = Some((trace, lane.to_owned()));
    }

    fn program(&self) -> &Program {
        &self.program
    }

    /// What feeds are brought to lies there twice.
    fn bytes(&self) -> u64 {
        let fed: usize = self.program.feeds.iter().map(|shape| shape.elements()).sum();
        4 * (self.memory.len() + fed) as u64
    }
}
