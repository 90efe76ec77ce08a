//! CUDA: found at run time, never needed.
//!
//! Reading order: `probe.rs` says what is there, `driver.rs` owns context, stream and memory, `kernels.rs` compiles
//! `kernels/*.cu` and launches them. A program becomes tasks (`task.rs`), which are fused (`fuse.rs`), given algorithms and memory
//! (`plan.rs`, with `gemm.rs` and `conv.rs` for the libraries and `scratch.rs` for own kernels), enqueued (`launch.rs`), and run as
//! one recorded step (`exec.rs`). `libnccl.rs` finds NCCL, and `nccl.rs` sums over several GPUs by it.

mod conv;
mod driver;
mod events;
mod exec;
mod fit;
mod fuse;
mod gemm;
mod input;
mod kernels;
mod launch;
mod libnccl;
mod nccl;
mod peers;
mod pieces;
mod plan;
mod probe;
mod scalars;
mod scratch;
mod task;

pub use driver::Memory;
pub use kernels::keep_kernels_in;
pub use libnccl::{UniqueId, look_for_nccl_in, nccl_lack, unique_id};
pub use nccl::{CommGroup, Summand};
pub use peers::{Peer, card_id, peer, topology};
pub use probe::{Gpu, Library, NoGpus, Probe, probe};

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use self::conv::Dnn;
use self::driver::{Driver, Ptr};
use self::exec::Executor;
use self::gemm::Blas;
use self::kernels::{Grid, Kernels, RuleArg};
use super::{Device, DeviceError, Executable, Slab, Update, UpdateSlabs};
use crate::cluster::{DeviceKind, DeviceName};
use crate::graph::Program;
use crate::optim::STATISTIC_SHARE;
use crate::util::stats;

/// How sums of products are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// In f32 throughout.
    #[default]
    F32,
    /// Factors are rounded to 11 bits of precision on the way into the tensor cores, sums are f32.
    Tf32,
    /// Likewise to the 8 bits of bf16.
    Bf16,
}

/// What everything on one GPU shares.
struct Engine {
    driver: Arc<Driver>,
    kernels: Kernels,
    blas: Arc<Blas>,
    /// None where there is no cuDNN: then own kernels convolve.
    dnn: Option<Arc<Dnn>>,
    precision: Precision,
    /// What is distorted here.
    pictures: OnceLock<Pictures>,
}

/// Pictures in the memory of a GPU.
struct Pictures {
    memory: Memory,
    count: usize,
}

/// A GPU: one tower's.
pub struct CudaDevice {
    name: DeviceName,
    words: String,
    engine: Arc<Engine>,
    /// Where gradients of the host go for an update.
    staging: Mutex<Option<Slab>>,
}

impl CudaDevice {
    /// `/device:GPU:<ordinal>`, the GPU of this number among those the driver lets this process see.
    ///
    /// # Errors
    /// [`DeviceError::Absent`] for a missing GPU, driver or library, [`DeviceError::Kernels`] for kernels that fail to build,
    /// [`DeviceError::Gpu`] for what else the driver or a library says.
    pub fn new(ordinal: u32, precision: Precision) -> Result<Self, DeviceError> {
        let name = DeviceName::local(DeviceKind::Gpu, ordinal);
        let absent = |reason: String| DeviceError::Absent { asked: name.to_string(), reason };
        if let Some(reason) = probe().lack(&[ordinal]) {
            return Err(absent(reason));
        }
        let open = || Engine::open(ordinal as usize, name.to_string(), precision);
        let engine = probe::quietly(open).map_err(absent)??;
        let (card, memory) = engine.driver.card()?;
        let convolutions = match engine.dnn {
            Some(_) => String::new(),
            None if precision == Precision::Bf16 => ", own convolutions in bf16".to_owned(),
            None => ", own convolutions: libcudnn.so.9 was not found".to_owned(),
        };
        let words = format!("{card}, {}{convolutions}", stats::bytes(memory as u64));
        Ok(Self { name, words, engine: Arc::new(engine), staging: Mutex::default() })
    }

    fn on_device(&self, slab: &Slab) -> Result<Ptr, DeviceError> {
        let memory = slab.as_cuda().filter(|memory| memory.is_on(&self.engine.driver));
        memory.map(|memory| memory.start()).ok_or_else(|| {
            let reason = "a slab is not in this GPU's memory".to_owned();
            DeviceError::Mismatch { device: self.name.to_string(), reason }
        })
    }
}

impl Engine {
    fn open(ordinal: usize, name: String, precision: Precision) -> Result<Self, DeviceError> {
        let driver = Driver::open(ordinal, name)?;
        let kernels = Kernels::load(driver.clone())?;
        let blas = Arc::new(Blas::open(driver.clone(), precision)?);
        let dnn = match probe::has(probe::CUDNN) && precision != Precision::Bf16 {
            true => Some(Arc::new(Dnn::open(driver.clone(), precision)?)),
            false => None,
        };
        Ok(Self { driver, kernels, blas, dnn, precision, pictures: OnceLock::new() })
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &DeviceName {
        &self.name
    }

    fn describe(&self) -> String {
        self.words.clone()
    }

    fn alloc(&self, len: usize) -> Result<Slab, DeviceError> {
        Ok(Slab::cuda(self.engine.driver.alloc(len)?, len))
    }

    fn fetches_ahead(&self) -> bool {
        true
    }

    fn keep_pictures(&self, pictures: &[&[u8]], share: f64) -> Result<bool, DeviceError> {
        /// Copied at a time.
        const PIECE: usize = 1000;
        let (driver, each) = (&self.engine.driver, pictures.first().map_or(0, |one| one.len()));
        let bytes = each * pictures.len();
        driver.bind()?;
        if each % 4 != 0 || bytes == 0 || bytes as f64 >= share * driver.free() as f64 {
            return Ok(false);
        }
        let memory = driver.alloc(bytes / 4)?;
        let mut at = memory.start();
        for piece in pictures.chunks(PIECE) {
            let piece = piece.concat();
            driver.upload_bytes(&piece, at)?;
            driver.synchronize()?;
            at = at.at(piece.len() / 4);
        }
        // Whoever was first.
        let _ = self.engine.pictures.set(Pictures { memory, count: pictures.len() });
        Ok(true)
    }

    fn load(&self, program: Program) -> Result<Box<dyn Executable>, DeviceError> {
        let engine = self.engine.clone();
        let asked = self.name.to_string();
        let loaded = probe::quietly(|| Executor::new(program, engine))
            .map_err(|reason| DeviceError::Absent { asked, reason })?;
        Ok(Box::new(loaded?))
    }

    /// Slabs other than the first may be changed.
    fn sum(&self, slabs: &mut [Slab], scale: f32) -> Result<(), DeviceError> {
        self.engine.driver.bind()?;
        let Some(len) = slabs.first().map(Slab::len) else { return Ok(()) };
        // Eight at a time are three levels of the tree; then the sums of eights, which stand in each eighth slab.
        let mut distance = 1;
        loop {
            let last = slabs.len() <= 8 * distance;
            for first in (0..slabs.len()).step_by(8 * distance) {
                let mut operands = [Ptr::NULL; 8];
                let mut count = 0;
                for slab in slabs[first..].iter().step_by(distance).take(8) {
                    operands[count] = self.on_device(slab)?;
                    count += 1;
                }
                let scale = if last { scale } else { 1.0 };
                if count > 1 || scale != 1.0 {
                    let (grid, out) = (Grid::each(len), operands[0]);
                    self.engine.kernels.tree_sum(
                        grid,
                        operands,
                        count as i32,
                        scale,
                        out,
                        len as i32,
                    )?;
                }
            }
            if last {
                return Ok(());
            }
            distance *= 8;
        }
    }

    fn update(&self, update: Update, slabs: UpdateSlabs<'_>) -> Result<(), DeviceError> {
        self.engine.driver.bind()?;
        let len = slabs.params.len();
        let params = self.on_device(slabs.params)?;
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let grads = match slabs.grads.as_host() {
            Some(_) => {
                let staged = match &mut *staging {
                    Some(staged) if staged.len() == len => staged,
                    other => other.insert(self.alloc(len)?),
                };
                staged.copy_from(slabs.grads)?;
                self.on_device(staged)?
            }
            None => self.on_device(slabs.grads)?,
        };
        let optional =
            |slab: Option<&mut Slab>| slab.map_or(Ok(Ptr::NULL), |slab| self.on_device(slab));
        let (slots, averages) = (optional(slabs.slots)?, optional(slabs.averages)?);
        let rule = RuleArg {
            rate: update.rate,
            momentum: update.rule.momentum.unwrap_or(0.0),
            clip: update.rule.clip.unwrap_or(f32::INFINITY),
            average_decay: update.average_decay,
            statistic_share: STATISTIC_SHARE,
            nesterov: i32::from(update.rule.nesterov),
        };
        let kernels = &self.engine.kernels;
        let (trained, n) = (update.trained.min(len) as i32, len as i32);
        kernels.update(Grid::each(len), params, grads, slots, averages, rule, trained, n)
    }
}
