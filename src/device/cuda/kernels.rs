//! [`Kernels`]: `kernels/*.cu`, compiled for a GPU at first use and kept on disk, and a typed launch of each.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use cudarc::driver::{result, sys};
use cudarc::nvrtc;
use sha2::{Digest, Sha256};

use super::driver::{Driver, Ptr};
use super::probe;
use crate::device::DeviceError;
use crate::graph::{LrnParams, Window};

/// All kernels as one text, the shared part first.
const SOURCE: &str = concat!(
    include_str!("../../../kernels/common.cuh"),
    include_str!("../../../kernels/elementwise.cu"),
    include_str!("../../../kernels/reduce.cu"),
    include_str!("../../../kernels/pool.cu"),
    include_str!("../../../kernels/norm.cu"),
    include_str!("../../../kernels/softmax.cu"),
    include_str!("../../../kernels/update.cu"),
    include_str!("../../../kernels/depthwise.cu"),
    include_str!("../../../kernels/conv.cu"),
    include_str!("../../../kernels/augment.cu"),
);

/// Where compiled kernels are kept.
static CACHE: OnceLock<PathBuf> = OnceLock::new();

/// Keeps compiled kernels in `folder` from now on. Only the first call counts.
pub fn keep_kernels_in(folder: PathBuf) {
    let _ = CACHE.set(folder);
}

/// The blocks of a launch, and the threads of each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: [usize; 3],
    pub(super) threads: [u32; 2],
}

impl Grid {
    /// For kernels that share out `n` elements over all threads.
    pub(super) fn each(n: usize) -> Self {
        Self::blocks([n.div_ceil(256).clamp(1, 1 << 14), 1, 1])
    }

    /// Blocks of 256 threads.
    pub(super) fn blocks(blocks: [usize; 3]) -> Self {
        Self { blocks, threads: [256, 1] }
    }

    /// Blocks of 32 x 8 threads.
    pub(super) fn tiles(blocks: [usize; 3]) -> Self {
        Self { blocks, threads: [32, 8] }
    }
}

/// `Window` in `common.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct WindowArg([[i32; 2]; 5]);

impl From<&Window> for WindowArg {
    fn from(w: &Window) -> Self {
        Self([w.kernel, w.stride, w.pad, w.input, w.output].map(|pair| pair.map(|x| x as i32)))
    }
}

/// `Conv` in `conv.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ConvArg {
    pub(super) window: WindowArg,
    /// Pictures, channels of the input, channels of the output.
    pub(super) sizes: [i32; 3],
}

/// `Lrn` in `norm.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct LrnArg {
    pub(super) radius: i32,
    bias: f32,
    alpha: f32,
    beta: f32,
}

impl LrnArg {
    /// With the radius that matters for rows of `channels`.
    pub(super) fn new(p: &LrnParams, channels: usize) -> Self {
        let radius = p.radius.min(channels) as i32;
        Self { radius, bias: p.bias, alpha: p.alpha, beta: p.beta }
    }
}

/// `Rule` in `update.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RuleArg {
    pub(super) rate: f32,
    pub(super) momentum: f32,
    pub(super) clip: f32,
    pub(super) average_decay: f32,
    pub(super) statistic_share: f32,
    pub(super) nesterov: i32,
}

/// Declares each kernel once: its handle and a launch with the types of its arguments.
macro_rules! kernels {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        #[derive(Clone, Copy)]
        struct Functions {
            $($name: sys::CUfunction,)*
        }

        impl Functions {
            fn find(module: sys::CUmodule) -> Result<Self, result::DriverError> {
                let find = |name: &CStr| {
                    // SAFETY: the module is loaded.
                    unsafe { result::module::get_function(module, name.to_owned()) }
                };
                $(let $name = find(
                    CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes())
                        .unwrap_or_default(),
                )?;)*
                Ok(Self { $($name,)* })
            }
        }

        #[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
        impl Kernels {
            $(pub(super) fn $name(&self, grid: Grid, $($arg: $type),*) -> Result<(), DeviceError> {
                self.launch(stringify!($name), self.functions.$name, grid, &mut [$(argument(&$arg)),*])
            })*
        }

        /// Each kernel with the types of its arguments, for the test that compares them with the source.
        #[cfg(test)]
        const SIGNATURES: &[(&str, &[&str])] = &[$((stringify!($name), &[$(stringify!($type)),*])),*];
    };
}

kernels! {
    fill(out: Ptr, value: f32, n: i32);
    broadcast(value: Ptr, out: Ptr, n: i32);
    scale(x: Ptr, out: Ptr, factor: f32, n: i32);
    scale_by(x: Ptr, factor: Ptr, out: Ptr, n: i32);
    add(a: Ptr, b: Ptr, out: Ptr, n: i32);
    sub(a: Ptr, b: Ptr, out: Ptr, n: i32);
    mul(a: Ptr, b: Ptr, out: Ptr, n: i32);
    square(x: Ptr, out: Ptr, n: i32);
    add_scaled(a: Ptr, x: Ptr, out: Ptr, factor: f32, n: i32);
    relu(x: Ptr, out: Ptr, n: i32);
    relu_grad(dy: Ptr, y: Ptr, dx: Ptr, n: i32);
    bias_add(x: Ptr, bias: Ptr, out: Ptr, channels: i32, relu: i32, n: i32);
    concat(a: Ptr, b: Ptr, out: Ptr, left: i32, right: i32, n: i32);
    slice(x: Ptr, out: Ptr, start: i32, len: i32, width: i32, n: i32);
    transpose(x: Ptr, out: Ptr, rows: i32, columns: i32);
    sum(x: Ptr, out: Ptr, squares: i32, factor: f32, n: i32, partials: Ptr, counter: Ptr);
    column_sums(x: Ptr, out: Ptr, rows: i32, columns: i32, partials: Ptr, counters: Ptr);
    relu_bias_grad(dy: Ptr, y: Ptr, dx: Ptr, dbias: Ptr, rows: i32, columns: i32, partials: Ptr, counters: Ptr);
    tree_sum(slabs: [Ptr; 8], count: i32, scale: f32, out: Ptr, n: i32);
    max_pool(x: Ptr, y: Ptr, w: WindowArg, c: i32, n: i32);
    max_pool_grad(x: Ptr, y: Ptr, dy: Ptr, dx: Ptr, w: WindowArg, c: i32, relu: i32, n: i32);
    avg_pool(x: Ptr, y: Ptr, w: WindowArg, c: i32, n: i32);
    avg_pool_grad(dy: Ptr, dx: Ptr, w: WindowArg, c: i32, n: i32);
    lrn(x: Ptr, y: Ptr, p: LrnArg, rows: i32, per_block: i32, c: i32);
    lrn_grad(x: Ptr, dy: Ptr, dx: Ptr, p: LrnArg, relu: i32, rows: i32, per_block: i32, c: i32);
    batch_norm_moments(x: Ptr, moments: Ptr, own_mean: Ptr, own_variance: Ptr, mean_excess: Ptr, variance_excess: Ptr, unbias: f32, rows: i32, c: i32, partials: Ptr, counters: Ptr);
    batch_norm(x: Ptr, moments: Ptr, scale: Ptr, offset: Ptr, y: Ptr, epsilon: f32, c: i32, n: i32);
    batch_norm_sums(x: Ptr, moments: Ptr, dy: Ptr, gradients: Ptr, dscale: Ptr, doffset: Ptr, epsilon: f32, rows: i32, c: i32, partials: Ptr, counters: Ptr);
    batch_norm_input_grad(x: Ptr, moments: Ptr, scale: Ptr, dy: Ptr, gradients: Ptr, dx: Ptr, epsilon: f32, rows: i32, c: i32, n: i32);
    cross_entropy(logits: Ptr, labels: Ptr, upstream: Ptr, constant: f32, losses: Ptr, dlogits: Ptr, mean: Ptr, rows: i32, classes: i32, counter: Ptr);
    update(params: Ptr, grads: Ptr, slots: Ptr, averages: Ptr, rule: RuleArg, trained: i32, n: i32);
    depthwise(x: Ptr, filter: Ptr, y: Ptr, w: WindowArg, channels: i32, multiplier: i32, n: i32);
    depthwise_input_grad(dy: Ptr, filter: Ptr, dx: Ptr, w: WindowArg, channels: i32, multiplier: i32, n: i32);
    depthwise_filter_grad(x: Ptr, dy: Ptr, dw: Ptr, w: WindowArg, channels: i32, multiplier: i32, rows: i32, partials: Ptr, counters: Ptr);
    conv(x: Ptr, filter: Ptr, bias: Ptr, y: Ptr, c: ConvArg, relu: i32);
    conv_bf16(x: Ptr, filter: Ptr, bias: Ptr, y: Ptr, c: ConvArg, relu: i32);
    conv_input_grad_bf16(dy: Ptr, filter: Ptr, dx: Ptr, c: ConvArg);
    conv_filter_grad_bf16(x: Ptr, dy: Ptr, dw: Ptr, c: ConvArg, per: i32, partials: Ptr, counters: Ptr);
    conv_input_grad(dy: Ptr, filter: Ptr, dx: Ptr, c: ConvArg);
    augment(pictures: Ptr, draws: Ptr, out: Ptr, count: i32);
    conv_filter_grad(x: Ptr, dy: Ptr, dw: Ptr, c: ConvArg, per: i32, partials: Ptr, counters: Ptr);
}

/// As the driver takes an argument: by its address.
fn argument<T: Copy>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// The kernels, loaded on one GPU.
pub(super) struct Kernels {
    driver: Arc<Driver>,
    module: sys::CUmodule,
    functions: Functions,
}

// SAFETY: handles of the driver may be used from any thread that has their context.
unsafe impl Send for Kernels {}
// SAFETY: likewise; launching changes nothing in them.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Takes the kernels from the cache, or compiles them for this GPU and keeps them there.
    pub(super) fn load(driver: Arc<Driver>) -> Result<Self, DeviceError> {
        driver.bind()?;
        let (major, minor) = driver.compute_capability()?;
        let architecture = format!("sm_{major}{minor}");
        let version = probe::driver_version().unwrap_or(0);
        let key = Sha256::digest(format!("{architecture} {version} {SOURCE}"));
        let name: String = key.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        let file = CACHE.get().map(|folder| folder.join(format!("kernels-{name}.cubin")));
        let kept = file.as_deref().and_then(|file| std::fs::read(file).ok());
        // A file that was cut off, or that a driver refuses, is made anew.
        let module = match kept.and_then(|image| load(&image).ok()) {
            Some(module) => module,
            None => {
                let image = compile(driver.name(), &architecture, version)?;
                if let Some(file) = file {
                    // A folder that cannot be written to costs some time at the next start, no more.
                    let _ = keep(&file, &image);
                }
                driver.check("loading its kernels", load(&image))?
            }
        };
        let functions = driver.check("finding its kernels", Functions::find(module))?;
        Ok(Self { driver, module, functions })
    }

    fn launch(
        &self,
        name: &str,
        function: sys::CUfunction,
        grid: Grid,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DeviceError> {
        let [x, y, z] = grid.blocks.map(|n| n as u32);
        let [width, height] = grid.threads;
        // SAFETY: the module is loaded, the arguments are of the types that the kernel takes (a test compares them with its
        // source) and are copied by the call; whose memory they point at, who enqueued this keeps until it is done.
        let launched = unsafe {
            result::launch_kernel(
                function,
                (x, y, z),
                (width, height, 1),
                0,
                self.driver.stream(),
                arguments,
            )
        };
        launched.map_err(|e| {
            super::driver::failure(self.driver.name(), &format!("launching {name}"), e)
        })
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _ = self.driver.bind();
        // SAFETY: loaded in `load`; who launches kernels holds this.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// Loads a compiled image.
fn load(image: &[u8]) -> Result<sys::CUmodule, result::DriverError> {
    // The driver reads a text up to its end.
    let image = [image, &[0]].concat();
    // SAFETY: an image that is none is refused by the driver.
    unsafe { result::module::load_data(image.as_ptr().cast()) }
}

/// Writes a file so that another process sees all of it or nothing.
fn keep(file: &Path, image: &[u8]) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let new = file.with_extension(format!("{}.new", std::process::id()));
    std::fs::write(&new, image)?;
    std::fs::rename(&new, file)
}

/// Compiles all kernels by NVRTC for one architecture.
fn compile(device: &str, architecture: &str, driver: i32) -> Result<Vec<u8>, DeviceError> {
    if !probe::has(probe::NVRTC) {
        return Err(probe::missing(device, probe::NVRTC));
    }
    let fail = |log: String| DeviceError::Kernels { device: device.to_owned(), log };
    let words = |e: nvrtc::result::NvrtcError| fail(format!("NVRTC says {e:?}"));
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes the two numbers.
    let told = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    told.result().map_err(words)?;
    if driver > 0 && major > driver / 1000 {
        return Err(DeviceError::Absent {
            asked: device.to_owned(),
            reason: format!(
                "the driver is for CUDA {}.{} and cannot load what NVRTC {major}.{minor} compiles; install a newer driver, or the NVRTC of CUDA {}",
                driver / 1000,
                driver % 1000 / 10,
                driver / 1000
            ),
        });
    }
    let source = CString::new(SOURCE).unwrap_or_default();
    let program = nvrtc::result::create_program(&source, Some(c"kernels.cu")).map_err(words)?;
    let options = [format!("--gpu-architecture={architecture}")];
    // SAFETY: the program was made above and is destroyed once, at the end.
    unsafe {
        let compiled = nvrtc::result::compile_program(program, &options);
        let image = match compiled {
            Ok(()) => cubin(program).map_err(words),
            Err(error) => {
                let log = nvrtc::result::get_program_log(program).unwrap_or_default();
                let log: Vec<u8> = log.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
                Err(fail(format!(
                    "{error:?} for {architecture}\n{}",
                    String::from_utf8_lossy(&log)
                )))
            }
        };
        let _ = nvrtc::result::destroy_program(program);
        image
    }
}

/// The machine code of a compiled program.
///
/// # Safety
/// The program was compiled and not destroyed.
unsafe fn cubin(program: nvrtc::sys::nvrtcProgram) -> Result<Vec<u8>, nvrtc::result::NvrtcError> {
    let mut len = 0;
    // SAFETY: the caller's promise; writes one number.
    unsafe { nvrtc::sys::nvrtcGetCUBINSize(program, &mut len) }.result()?;
    let mut image = vec![0u8; len];
    // SAFETY: as above; the buffer is as long as NVRTC said.
    unsafe { nvrtc::sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast::<c_char>()) }.result()?;
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The launches must agree with the source in number and kind of arguments, since nothing else checks that.
    #[test]
    fn signatures_agree_with_the_source() {
        let mut found = 0;
        for piece in SOURCE.split("extern \"C\" __global__ void").skip(1) {
            let head = piece.split('{').next().unwrap();
            let head = head.replace("__launch_bounds__(256)", "");
            let (name, arguments) = head.split_once('(').unwrap();
            let arguments = arguments.trim_end().trim_end_matches(')');
            let kinds: Vec<&str> = arguments
                .split(',')
                .map(|argument| match argument.trim().trim_start_matches("const ") {
                    a if a.contains('*') => "Ptr",
                    a if a.starts_with("int ") => "i32",
                    a if a.starts_with("float ") => "f32",
                    a if a.starts_with("Window ") => "WindowArg",
                    a if a.starts_with("Conv ") => "ConvArg",
                    a if a.starts_with("Lrn ") => "LrnArg",
                    a if a.starts_with("Rule ") => "RuleArg",
                    a if a.starts_with("Slabs ") => "[Ptr; 8]",
                    a => panic!("{a} in {head}"),
                })
                .collect();
            let declared = SIGNATURES.iter().find(|(n, _)| *n == name.trim()).unwrap();
            assert_eq!(declared.1, kinds, "{name}");
            found += 1;
        }
        assert_eq!(found, SIGNATURES.len());
    }
}
