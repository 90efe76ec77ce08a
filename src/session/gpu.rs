//! [`Gpu`]: a GPU of a task. What a node computes there is a program of the trainer's graph, loaded when its shapes first come.

use std::sync::Mutex;

use super::cancel::lock;
use super::{DType, OpError, tensor_elements};
use crate::device::cuda::{self, CudaDevice, Precision};
use crate::device::{Device, DeviceError, Executable, Feeds, Slab};
use crate::graph::{Fusions, Graph, GraphError, NodeId, Op, Program, infer};
use crate::tensor::Shape;
use crate::util::stats;

/// Programs that stay loaded at most, and the part of the card's memory that they may fill together. The least recently used go.
const KEPT: usize = 512;
const QUARTER: u64 = 4;

/// A calculation in the trainer's operations. Values are numbered: first what is fed, then what each step gives.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Formula {
    /// Operations with their operands.
    pub(super) steps: Vec<(Op, Vec<usize>)>,
    /// The values that are asked for, each that of a step.
    pub(super) results: Vec<usize>,
}

impl Formula {
    /// The extents of the results, where what is fed has these; none where they do not fit, and where a tensor is empty or huge, which
    /// no kernel expects.
    pub(super) fn shapes(&self, fed: &[Shape]) -> Option<Vec<Shape>> {
        let mut values = fed.to_vec();
        for (op, operands) in &self.steps {
            let inputs: Option<Vec<&Shape>> = operands.iter().map(|&i| values.get(i)).collect();
            values.push(infer(op, &inputs?).ok()?);
        }
        let usual = |shape: &Shape| tensor_elements(DType::F32, shape).is_ok_and(|n| n > 0);
        if !values.iter().all(usual) {
            return None;
        }
        self.results.iter().map(|&i| values.get(i).cloned()).collect()
    }

    fn program(&self, fed: &[Shape], fusions: Fusions) -> Result<Program, GraphError> {
        let mut graph = Graph::default();
        let mut values: Vec<NodeId> = Vec::new();
        let fed = fed.iter().map(|shape| (Op::Placeholder(shape.clone()), &[][..]));
        let steps = self.steps.iter().map(|(op, operands)| (op.clone(), &operands[..]));
        for (op, operands) in fed.chain(steps) {
            let name = format!("{}{}", op.name(), values.len());
            let inputs: Vec<NodeId> = operands.iter().map(|&i: &usize| values[i]).collect();
            values.push(graph.add(&name, op, &inputs)?);
        }
        let results: Vec<NodeId> = self.results.iter().map(|&i| values[i]).collect();
        Ok(Program::lower(&graph, &results, &[], fusions))
    }
}

/// How a device is opened.
type Open = Box<dyn Fn() -> Result<Box<dyn Device>, DeviceError> + Send + Sync>;

/// A GPU of a task. It is opened when the first kernel runs on it: who only keeps variables takes none of its memory.
pub struct Gpu {
    description: String,
    memory: u64,
    open: Open,
    /// One run at a time: the device does its work in one order.
    opened: Mutex<Option<Opened>>,
}

struct Opened {
    device: Box<dyn Device>,
    /// The latest used last.
    programs: Vec<Loaded>,
}

/// A formula on the device, for what has these extents.
struct Loaded {
    formula: Formula,
    fed: Vec<Shape>,
    program: Box<dyn Executable>,
    /// There are none.
    variables: Slab,
}

impl Gpu {
    /// A device that counts as a GPU: what clients are told of it, and its bytes of memory.
    pub fn new(
        description: String,
        memory: u64,
        open: impl Fn() -> Result<Box<dyn Device>, DeviceError> + Send + Sync + 'static,
    ) -> Self {
        Self { description, memory, open: Box::new(open), opened: Mutex::default() }
    }

    /// A card: `number` among the task's GPUs, `ordinal` among those that this process sees.
    pub fn cuda(number: usize, ordinal: u32, card: &cuda::Gpu) -> Self {
        let (name, bus, (major, minor)) = (&card.name, &card.pci_bus_id, card.compute_capability);
        let description = format!(
            "device: {number}, name: {name}, pci bus id: {bus}, compute capability: {major}.{minor}"
        );
        Self::new(description, card.memory, move || {
            Ok(Box::new(CudaDevice::new(ordinal, Precision::F32)?))
        })
    }

    /// What clients are told of it.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Bytes on the card.
    pub fn memory(&self) -> u64 {
        self.memory
    }

    /// The results of a formula; `feeds` have the extents `fed`.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED where the card's memory is not enough, INTERNAL for what else fails.
    pub(super) fn run(
        &self,
        formula: &Formula,
        fed: &[Shape],
        feeds: &[&[f32]],
        results: &mut [Vec<f32>],
    ) -> Result<(), OpError> {
        let mut opened = lock(&self.opened);
        let opened = match &mut *opened {
            Some(opened) => opened,
            none => {
                let device = (self.open)().map_err(told)?;
                none.insert(Opened { device, programs: Vec::new() })
            }
        };
        let mut ran = opened.run(formula, fed, feeds, results);
        if matches!(&ran, Err(error) if lacks_memory(error)) && !opened.programs.is_empty() {
            opened.programs.clear();
            ran = opened.run(formula, fed, feeds, results);
        }
        opened.tidy(self.memory / QUARTER);
        ran.map_err(told)
    }
}

impl Opened {
    fn run(
        &mut self,
        formula: &Formula,
        fed: &[Shape],
        feeds: &[&[f32]],
        results: &mut [Vec<f32>],
    ) -> Result<(), DeviceError> {
        // Steps repeat themselves: what has not been used for longest is the likeliest, and stands first.
        let is = |loaded: &Loaded| loaded.fed == fed && loaded.formula == *formula;
        let mut loaded = match self.programs.iter().position(is) {
            Some(at) => self.programs.remove(at),
            None => self.load(formula, fed)?,
        };
        loaded.program.run(&loaded.variables, Feeds::only(feeds), None, &mut |_, _| ())?;
        for (i, result) in results.iter_mut().enumerate() {
            loaded.program.fetch(i, result)?;
        }
        self.programs.push(loaded);
        Ok(())
    }

    fn load(&self, formula: &Formula, fed: &[Shape]) -> Result<Loaded, DeviceError> {
        let program = formula.program(fed, self.device.fusions());
        let program = program.map_err(|error| DeviceError::Mismatch {
            device: self.device.name().to_string(),
            reason: error.to_string(),
        })?;
        let (program, variables) = (self.device.load(program)?, self.device.alloc(0)?);
        Ok(Loaded { formula: formula.clone(), fed: fed.to_vec(), program, variables })
    }

    /// Lets go what is too much.
    fn tidy(&mut self, room: u64) {
        let bytes = |loaded: &Loaded| loaded.program.bytes();
        let mut filled: u64 = self.programs.iter().map(bytes).sum();
        while self.programs.len() > KEPT || self.programs.len() > 1 && filled > room {
            filled -= bytes(&self.programs.remove(0));
        }
    }
}

fn lacks_memory(error: &DeviceError) -> bool {
    matches!(error, DeviceError::GpuMemory { .. } | DeviceError::OutOfMemory { .. })
}

/// As a session's client is told. Advice about batches is for those who train.
fn told(error: DeviceError) -> OpError {
    match error {
        DeviceError::GpuMemory { device, bytes, free, .. } => OpError::exhausted(format!(
            "OOM when allocating {} on {device}, which has {} free",
            stats::bytes(bytes),
            stats::bytes(free)
        )),
        DeviceError::OutOfMemory { device, bytes } => {
            let bytes = stats::bytes(bytes as u64);
            OpError::exhausted(format!("OOM when allocating {bytes} for {device}"))
        }
        error => OpError::internal(error),
    }
}
