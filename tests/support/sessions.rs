//! TensorFlow's values for the operations of sessions (`interop/session_ops.py` wrote them), and a GPU that is none.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use bytes::Bytes;
use prost::Message;
use serde_json::Value as Json;
use tftrain::cluster::DeviceName;
use tftrain::device::cpu::CpuDevice;
use tftrain::device::{Device, DeviceError, Executable, Slab, Update, UpdateSlabs};
use tftrain::graph::Program;
use tftrain::session::ops::Kernel;
use tftrain::session::{
    Bell, Call, Cancellation, Context, DType, Data, Gpu, Node, OpError, Resources, Tensor, Value,
    proto,
};

/// Differences that rounding explains: TensorFlow adds in another order, with other exponentials.
const TOLERANCE: f64 = 2e-5;

fn read(json: &Json) -> Tensor {
    let shape: Vec<usize> = json["shape"]
        .as_array()
        .unwrap()
        .iter()
        .map(|dim| dim.as_u64().unwrap() as usize)
        .collect();
    let values = json["values"].as_array().unwrap();
    let real = |v: &Json| v.as_f64().unwrap_or_else(|| v.as_str().unwrap().parse().unwrap());
    let whole = |v: &Json| v.as_i64().unwrap();
    // Bytes as characters of Latin-1.
    let text =
        |v: &Json| v.as_str().unwrap().chars().map(|c| u32::from(c) as u8).collect::<Bytes>();
    match DType::from_wire(json["dtype"].as_i64().unwrap() as i32).unwrap() {
        DType::F32 => Tensor::new(shape, values.iter().map(|v| real(v) as f32).collect()),
        DType::F64 => Tensor::new(shape, values.iter().map(real).collect()),
        DType::I32 => Tensor::new(shape, values.iter().map(|v| whole(v) as i32).collect()),
        DType::I64 => Tensor::new(shape, values.iter().map(whole).collect()),
        DType::U8 => Tensor::new(shape, values.iter().map(|v| whole(v) as u8).collect()),
        DType::Bool => Tensor::new(shape, values.iter().map(|v| v.as_bool().unwrap()).collect()),
        DType::Str => Tensor::new(shape, values.iter().map(text).collect()),
    }
    .unwrap()
}

/// The recorded cases: node, inputs, and the rest.
pub(crate) fn cases() -> Vec<(proto::NodeDef, Vec<Tensor>, Json)> {
    let Json::Array(cases) = super::golden("session_ops.json") else { panic!("a list of cases") };
    let decode = |case: Json| {
        let hex = case["node"].as_str().unwrap();
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        let inputs = case["inputs"].as_array().unwrap().iter().map(read).collect();
        (proto::NodeDef::decode(bytes.as_slice()).unwrap(), inputs, case)
    };
    cases.into_iter().map(decode).collect()
}

fn reals(tensor: &Tensor) -> Option<Vec<f64>> {
    match tensor.data() {
        Data::F32(v) => Some(v.iter().map(|x| f64::from(*x)).collect()),
        Data::F64(v) => Some(v.to_vec()),
        _ => None,
    }
}

fn close(ours: &Tensor, theirs: &Tensor) -> bool {
    if ours.shape() != theirs.shape() || ours.dtype() != theirs.dtype() {
        return false;
    }
    match (reals(ours), reals(theirs)) {
        (Some(ours), Some(theirs)) => ours.iter().zip(&theirs).all(|(x, y)| {
            x == y || x.is_nan() && y.is_nan() || (x - y).abs() <= TOLERANCE * y.abs().max(1.0)
        }),
        _ => ours == theirs,
    }
}

/// Runs a kernel on a task's resources; outputs that it leaves open are left out.
pub(crate) fn step(
    resources: &Resources,
    cancellation: &Cancellation,
    kernel: &Kernel,
    mut inputs: Vec<Option<Value>>,
    outputs: usize,
) -> Result<Vec<Value>, OpError> {
    let context = Context { resources, job: "ps" };
    let mut results = vec![None; outputs];
    let mut call = Call::new(&context, &mut inputs, &mut results);
    (kernel.run)(&mut call)?;
    let Some(mut attempt) = call.waits_for() else {
        return Ok(results.into_iter().flatten().collect());
    };
    let (ring, rung) = mpsc::channel();
    let cancelled = ring.clone();
    cancellation.on_cancel(move |_| _ = cancelled.send(()));
    let bell = Bell::new(move || _ = ring.send(()));
    loop {
        cancellation.check()?;
        if let Some(found) = attempt(&bell) {
            return Ok((found?.outputs)()?.into_iter().map(Value::Tensor).collect());
        }
        rung.recv().unwrap();
    }
}

/// Runs a kernel on tensors.
pub(crate) fn compute(
    kernel: &Kernel,
    inputs: Vec<Tensor>,
    outputs: usize,
) -> Result<Vec<Tensor>, OpError> {
    let inputs = inputs.into_iter().map(|tensor| Some(Value::Tensor(tensor))).collect();
    let values = step(&Resources::default(), &Cancellation::default(), kernel, inputs, outputs)?;
    values.into_iter().map(|value| value.tensor()).collect()
}

/// Demands TensorFlow's values and errors of these kernels; none for cases that are left out.
pub(crate) fn agree_with_tensorflow(kernel: impl Fn(&Node<'_>) -> Option<Result<Kernel, OpError>>) {
    let mut faults = Vec::new();
    for (i, (node, inputs, case)) in cases().into_iter().enumerate() {
        let Some(kernel) = kernel(&Node::new(&node)) else { continue };
        let run = |inputs, outputs| kernel.and_then(|kernel| compute(&kernel, inputs, outputs));
        let shown = format!("case {i}: {} of {inputs:?}", node.op);
        match (case["outputs"].as_array(), case["error"].as_i64()) {
            (Some(outputs), _) => match run(inputs, outputs.len()) {
                Err(error) => faults.push(format!("{shown}: {error}")),
                Ok(ours) => {
                    let theirs: Vec<Tensor> = outputs.iter().map(read).collect();
                    let equal = ours.len() == theirs.len()
                        && ours.iter().zip(&theirs).all(|(a, b)| close(a, b));
                    if !equal {
                        faults
                            .push(format!("{shown}:\n  ours {ours:?}\n  TensorFlow's {theirs:?}"));
                    }
                }
            },
            (None, code) => match run(inputs, 1) {
                Err(error) if Some(error.code as i64) == code => {}
                other => faults.push(format!("{shown}: {other:?} instead of error {code:?}")),
            },
        }
    }
    assert!(faults.is_empty(), "{} faults\n{}", faults.len(), faults.join("\n"));
}

/// A CPU that counts as a GPU, and how many programs it was given.
pub(crate) fn posing() -> (Gpu, Arc<AtomicUsize>) {
    let loads = Arc::new(AtomicUsize::new(0));
    let count = loads.clone();
    let open = move || {
        let (cpu, loads) = (CpuDevice::new(0, 1)?, count.clone());
        Ok(Box::new(Counting { cpu, loads }) as Box<dyn Device>)
    };
    (Gpu::new("device: 0, name: a CPU".to_owned(), 1 << 30, open), loads)
}

struct Counting {
    cpu: CpuDevice,
    loads: Arc<AtomicUsize>,
}

impl Device for Counting {
    fn name(&self) -> &DeviceName {
        self.cpu.name()
    }
    fn describe(&self) -> String {
        self.cpu.describe()
    }
    fn alloc(&self, len: usize) -> Result<Slab, DeviceError> {
        self.cpu.alloc(len)
    }
    fn load(&self, program: Program) -> Result<Box<dyn Executable>, DeviceError> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        self.cpu.load(program)
    }
    fn sum(&self, slabs: &mut [Slab], scale: f32) -> Result<(), DeviceError> {
        self.cpu.sum(slabs, scale)
    }
    fn update(&self, update: Update, slabs: UpdateSlabs<'_>) -> Result<(), DeviceError> {
        self.cpu.update(update, slabs)
    }
}
