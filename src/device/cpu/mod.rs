//! Kernels for the CPU: plain functions over slices of `f32`, pictures in NHWC order.
//!
//! Every kernel gives the same bits on every instruction set and for every number of threads: work is split by
//! output element, or into a fixed number of chunks whose partial results are added in a fixed tree.
//! Kernels never allocate: scratch memory is handed in, and a `*_scratch` function tells how much.

pub mod bf16;
pub mod conv;
mod ctx;
pub mod depthwise;
pub mod elementwise;
mod epilogue;
mod exec;
pub mod gemm;
mod maxima;
pub mod norm;
mod pack;
mod peak;
pub mod pool;
mod products;
pub mod reduce;
mod simd;
pub mod softmax;
mod tile;
pub mod unpool;
pub mod update;
pub mod winograd;

pub use conv::ConvAlgorithm;
pub use ctx::Ctx;
pub use epilogue::Epilogue;
pub use peak::Peaks;
pub use products::Precision;
pub use simd::{Isa, IsaLimit};

use std::sync::Arc;

use self::exec::Interpreter;
use self::products::Products;
use super::{Device, DeviceError, Executable, Slab, Update, UpdateSlabs};
use crate::cluster::{DeviceKind, DeviceName};
use crate::graph::{Fusions, Program};
use crate::optim::STATISTIC_SHARE;
use crate::util::clock::Clock;

/// The processor, or a share of its cores: one tower's threads.
pub struct CpuDevice {
    name: DeviceName,
    ctx: Ctx,
    products: Products,
    /// Not there for one thread, which is the caller's.
    pool: Option<Arc<rayon::ThreadPool>>,
}

impl CpuDevice {
    /// `/device:CPU:<ordinal>` with `threads` threads of its own and the best instructions the processor has.
    pub fn new(ordinal: u32, threads: usize) -> Result<Self, DeviceError> {
        Self::with_isa(ordinal, threads, Isa::detect())
    }

    /// The same with chosen instructions, for tests.
    pub fn with_isa(ordinal: u32, threads: usize, isa: Isa) -> Result<Self, DeviceError> {
        let name = DeviceName::local(DeviceKind::Cpu, ordinal);
        let threads = threads.max(1);
        let pool = match threads {
            1 => None,
            _ => {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .thread_name(move |i| format!("cpu{ordinal}-{i}"))
                    .build();
                let fail = |e: rayon::ThreadPoolBuildError| DeviceError::Threads {
                    device: name.to_string(),
                    reason: e.to_string(),
                };
                Some(Arc::new(pool.map_err(fail)?))
            }
        };
        Ok(Self { name, ctx: Ctx { isa, threads }, products: Products::default(), pool })
    }

    /// The same with convolutions computed as `conv` says.
    pub fn with_conv(self, conv: ConvAlgorithm) -> Self {
        Self { products: Products { conv, ..self.products }, ..self }
    }

    /// The same with the operands of products and convolutions in `precision`.
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { products: Products { precision, ..self.products }, ..self }
    }

    /// Measures what its threads can do at most.
    pub fn peaks(&self, clock: &dyn Clock) -> Peaks {
        self.run(|| peak::measure(self.ctx, self.products.precision, clock))
    }

    fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    fn host<'a>(&self, slab: &'a Slab) -> Result<&'a [f32], DeviceError> {
        slab.as_host().ok_or_else(|| self.elsewhere())
    }

    fn host_mut<'a>(&self, slab: &'a mut Slab) -> Result<&'a mut [f32], DeviceError> {
        slab.as_host_mut().ok_or_else(|| self.elsewhere())
    }

    fn elsewhere(&self) -> DeviceError {
        let reason = "a slab is not in the host's memory".to_owned();
        DeviceError::Mismatch { device: self.name.to_string(), reason }
    }
}

impl Device for CpuDevice {
    fn name(&self) -> &DeviceName {
        &self.name
    }

    fn describe(&self) -> String {
        let plural = if self.ctx.threads == 1 { "" } else { "s" };
        let words = format!("{} thread{plural}, {}", self.ctx.threads, self.ctx.isa);
        match self.products.precision {
            Precision::F32 => words,
            Precision::Bf16(unit) => format!("{words}, {unit}"),
        }
    }

    fn alloc(&self, len: usize) -> Result<Slab, DeviceError> {
        let bytes = len * size_of::<f32>();
        Slab::host(len).ok_or(DeviceError::OutOfMemory { device: self.name.to_string(), bytes })
    }

    fn fusions(&self) -> Fusions {
        Fusions::Backward
    }

    fn load(&self, program: Program) -> Result<Box<dyn Executable>, DeviceError> {
        let name = self.name.to_string();
        Ok(Box::new(Interpreter::new(program, self.ctx, self.products, self.pool.clone(), name)?))
    }

    fn sum(&self, slabs: &mut [Slab], scale: f32) -> Result<(), DeviceError> {
        let Some((first, others)) = slabs.split_first_mut() else { return Ok(()) };
        let first = self.host_mut(first)?;
        for slab in &*others {
            self.host(slab)?;
        }
        let other = |i: usize| others[i].as_host().unwrap_or_default();
        self.run(|| reduce::tree_sum_into(self.ctx, first, others.len(), other, scale));
        Ok(())
    }

    fn update(&self, update: Update, slabs: UpdateSlabs<'_>) -> Result<(), DeviceError> {
        let rule = update::Rule {
            rate: update.rate,
            momentum: update.rule.momentum.unwrap_or(0.0),
            nesterov: update.rule.nesterov,
            clip: update.rule.clip,
            average_decay: slabs.averages.is_some().then_some(update.average_decay),
        };
        let params = self.host_mut(slabs.params)?;
        let grads = self.host(slabs.grads)?;
        let trained = update.trained.min(params.len()).min(grads.len());
        let (params, statistics) = params.split_at_mut(trained);
        let (grads, excess) = grads.split_at(trained);
        let cut = |slab| {
            let slab: &mut [f32] = self.host_mut(slab)?;
            let len = trained.min(slab.len());
            Ok::<_, DeviceError>(&mut slab[..len])
        };
        let slots = slabs.slots.map(cut).transpose()?;
        let averages = slabs.averages.map(cut).transpose()?;
        self.run(|| {
            update::apply(self.ctx, &rule, params, grads, slots, averages);
            update::sgd(self.ctx, STATISTIC_SHARE, excess, statistics);
        });
        Ok(())
    }
}
