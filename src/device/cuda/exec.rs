//! [`Executor`]: runs a program on a GPU: at first launch by launch, then as one recorded step that is replayed.

use std::cell::Cell;
use std::sync::Arc;

use super::Engine;
use super::driver::{Graph, Memory, Pinned, Ptr};
use super::launch::Memories;
use super::plan::{Libraries, Plan};
use crate::device::{DeviceError, Done, Executable, Slab};
use crate::graph::{Place, Program};
use crate::util::trace::Trace;

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
    engine: Arc<Engine>,
    /// Feeds, arena, workspace and counters, one behind the other.
    memory: Memory,
    feeds: Vec<Ptr>,
    arena: Ptr,
    workspace: Ptr,
    counters: Ptr,
    /// Feeds as they are copied from, then scalars as they are copied to.
    pinned: Pinned,
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

/// A recorded step, for the slabs that it was recorded with.
struct Recorded {
    slabs: (Ptr, Ptr),
    /// None after the first run, which warms up the libraries.
    graph: Option<Graph>,
}

impl Executor {
    pub(super) fn new(program: Program, engine: Arc<Engine>) -> Result<Self, DeviceError> {
        let libraries = Libraries { blas: engine.blas.clone(), dnn: engine.dnn.clone() };
        let plan = Plan::new(&program, &libraries)?;
        let mut total = 0;
        let mut part = |floats: usize| {
            let offset = total;
            total += floats.next_multiple_of(ALIGN);
            offset
        };
        let feeds: Vec<usize> = program.feeds.iter().map(|shape| part(shape.elements())).collect();
        let fed: usize = program.feeds.iter().map(|shape| shape.elements()).sum();
        let [arena, workspace, counters] =
            [plan.arena, plan.workspace, plan.counters].map(&mut part);
        let fit = Fit {
            batch: program.feeds.first().and_then(|shape| shape.first()).copied().unwrap_or(1),
            room: engine.driver.free(),
            growing: 4 * total as u64,
            fixed: 8 * program.table.slab_len() as u64,
        };
        let memory = engine.driver.alloc(total).map_err(|e| fit.advise(e))?;
        let start = memory.start();
        let pinned = engine.driver.pinned(fed + plan.scalars)?;
        Ok(Self {
            graphs: Vec::new(),
            feeds: feeds.iter().map(|offset| start.at(*offset)).collect(),
            arena: start.at(arena),
            workspace: start.at(workspace),
            counters: start.at(counters),
            program,
            plan,
            engine,
            memory,
            pinned,
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

    /// Copies feeds to where the GPU takes them from.
    fn feed(&mut self, feeds: &[&[f32]]) -> Result<(), DeviceError> {
        let expected = &self.program.feeds;
        let fed = feeds.len() == expected.len()
            && feeds.iter().zip(expected).all(|(feed, shape)| feed.len() == shape.elements());
        if !fed {
            let lengths: Vec<usize> = feeds.iter().map(|feed| feed.len()).collect();
            return Err(self.mismatch(format!("feeds of {lengths:?} floats for {expected:?}")));
        }
        let mut rest = self.pinned.floats_mut();
        for feed in feeds {
            let (own, others) = rest.split_at_mut(feed.len());
            own.copy_from_slice(feed);
            rest = others;
        }
        Ok(())
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

    /// Enqueues a whole step: copies in, launches, copies out.
    fn enqueue(
        &mut self,
        variables: Ptr,
        gradients: Ptr,
        to_host: bool,
        trace: Option<(&Trace, &str)>,
    ) -> Result<(), DeviceError> {
        let driver = &self.engine.driver;
        let mut fed = self.pinned.floats();
        for (shape, to) in self.program.feeds.iter().zip(&self.feeds) {
            let (own, rest) = fed.split_at(shape.elements());
            driver.upload(own, *to)?;
            fed = rest;
        }
        if let Some(staging) =
            self.variables.as_ref().filter(|staging| staging.device.start() == variables)
        {
            driver.upload(staging.host.floats(), variables)?;
        }
        let (arena, workspace, counters) = (self.arena, self.workspace, self.counters);
        let feeds = &self.feeds;
        let memories = Memories { feeds, variables, gradients, arena, workspace, counters };
        for launch in &self.plan.launches {
            let start = trace.and_then(|(trace, _)| trace.start());
            launch.enqueue(&self.engine.kernels, &memories)?;
            if let Some((trace, lane)) = trace {
                driver.synchronize()?;
                trace.span(start, lane, || launch.name.clone());
            }
        }
        if let Some(staging) = self.gradients.as_mut().filter(|_| to_host) {
            driver.download(gradients, staging.host.floats_mut())?;
        }
        let scalars = self.plan.scalars;
        if scalars > 0 {
            let fed: usize = self.program.feeds.iter().map(|shape| shape.elements()).sum();
            driver.download(arena, &mut self.pinned.floats_mut()[fed..][..scalars])?;
        }
        Ok(())
    }

    /// Launches a step: recorded from its second run with these slabs on.
    fn launch(&mut self, variables: Ptr, gradients: Ptr, to_host: bool) -> Result<(), DeviceError> {
        let open = self.trace.as_ref().filter(|(trace, _)| trace.is_open()).cloned();
        if let Some((trace, lane)) = open {
            return self.enqueue(variables, gradients, to_host, Some((&trace, &lane)));
        }
        let slabs = (variables, gradients);
        match self.graphs.iter().position(|recorded| recorded.slabs == slabs) {
            None => {
                if self.graphs.len() == GRAPHS {
                    self.graphs.remove(0);
                }
                self.graphs.push(Recorded { slabs, graph: None });
                self.enqueue(variables, gradients, to_host, None)
            }
            Some(i) => {
                if self.graphs[i].graph.is_none() {
                    let driver = self.engine.driver.clone();
                    let graph =
                        driver.capture(|| self.enqueue(variables, gradients, to_host, None))?;
                    self.graphs[i].graph = Some(graph);
                }
                self.graphs[i].graph.as_ref().map_or(Ok(()), Graph::launch)
            }
        }
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

/// What a batch needs beside what there is, in bytes.
struct Fit {
    batch: usize,
    /// Free before anything was taken.
    room: u64,
    /// What grows with the batch.
    growing: u64,
    /// Variables and gradients.
    fixed: u64,
}

impl Fit {
    /// Adds which batch would fit to an error about memory.
    fn advise(&self, error: DeviceError) -> DeviceError {
        let DeviceError::GpuMemory { device, bytes, free, .. } = error else { return error };
        let room = self.room.saturating_sub(self.fixed);
        let fits = self.batch as u64 * room / self.growing.max(1);
        let advice = match fits.min(self.batch as u64 - 1) {
            0 => "; not even a batch of one example fits".to_owned(),
            n => format!("; use --batch-size {n}, which would fit"),
        };
        DeviceError::GpuMemory { device, bytes, free, advice }
    }
}

impl Executable for Executor {
    /// Gradients that lie on the host are told of when all are there; those on the GPU are not told of.
    fn run(
        &mut self,
        variables: &Slab,
        feeds: &[&[f32]],
        gradients: Option<&mut Slab>,
        done: Done<'_>,
    ) -> Result<(), DeviceError> {
        self.engine.driver.bind()?;
        self.settle()?;
        self.feed(feeds)?;
        let variables_at = self.place_variables(variables)?;
        let (gradients_at, to_host) = self.place_gradients(gradients.as_deref())?;
        self.running.set(true);
        self.launch(variables_at, gradients_at, to_host)?;
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
        if view.offset + view.len <= self.plan.scalars {
            let scalars = self.pinned.floats().len() - self.plan.scalars;
            into.copy_from_slice(&self.pinned.floats()[scalars + view.offset..][..view.len]);
            return Ok(());
        }
        let offset = ((self.arena.0 - self.memory.start().0) / 4) as usize;
        self.memory.read(offset + view.offset, into)
    }

    fn trace(&mut self, trace: Arc<Trace>, lane: &str) {
        self.trace = Some((trace, lane.to_owned()));
    }

    fn program(&self) -> &Program {
        &self.program
    }
}
