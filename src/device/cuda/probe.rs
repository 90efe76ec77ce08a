//! [`probe`]: which CUDA libraries and GPUs are there. Never panics, touches no GPU memory, takes milliseconds.

use std::panic::{AssertUnwindSafe, catch_unwind};

use std::sync::{Mutex, PoisonError};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute};

use super::libnccl;
use crate::device::DeviceError;

/// A library that GPU towers would load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Library {
    /// What it is for.
    pub name: &'static str,
    /// Whether the dynamic linker finds it.
    pub present: bool,
}

/// A GPU as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The card.
    pub name: String,
    /// As `0000:65:00.0`.
    pub pci_bus_id: String,
    /// Major and minor.
    pub compute_capability: (i32, i32),
    /// Bytes on the card.
    pub memory: u64,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The driver first, then those that are only looked for when it is there.
    pub libraries: Vec<Library>,
    /// Visible GPUs in the driver's order, or why there are none.
    pub gpus: Result<Vec<Gpu>, NoGpus>,
}

/// Why there are no GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoGpus {
    /// In words.
    pub reason: String,
    /// Whether a driver is there that does not work, which is more than none.
    pub broken: bool,
}

impl NoGpus {
    fn absent(reason: &str) -> Self {
        Self { reason: reason.to_owned(), broken: false }
    }

    fn broken(reason: String) -> Self {
        Self { reason, broken: true }
    }
}

/// The oldest driver that has every function of a step: that of CUDA 12.0.
const OLDEST: i32 = 12_000;

/// The compiler of kernels, by its name among the [`Probe::libraries`].
pub(super) const NVRTC: &str = "nvrtc";
/// Matrix products.
pub(super) const CUBLASLT: &str = "cublasLt";
/// Convolutions.
pub(super) const CUDNN: &str = "cudnn";

impl Probe {
    /// Why these GPUs cannot have towers; `None` where they can.
    pub fn lack(&self, gpus: &[u32]) -> Option<String> {
        let found = match &self.gpus {
            Ok(found) => found,
            Err(none) => return Some(format!("none is visible: {}", none.reason)),
        };
        if let Some(last) = gpus.iter().max().filter(|last| **last as usize >= found.len()) {
            return Some(match found.len() {
                1 => format!("1 is visible, GPU 0, and there is no GPU {last}"),
                n => format!("{n} are visible, GPU 0 to {}, and there is no GPU {last}", n - 1),
            });
        }
        let needed = |library: &&Library| library.name == CUBLASLT && !library.present;
        self.libraries.iter().find(needed).map(|library| not_found(library.name))
    }

    /// Why the GPUs of this machine cannot be used; `None` where they can, and where there are none.
    pub fn trouble(&self) -> Option<String> {
        match &self.gpus {
            Ok(_) => self.lack(&[]),
            Err(none) => none.broken.then(|| none.reason.clone()),
        }
    }
}

/// Looks for the driver, its GPUs and the other libraries.
pub fn probe() -> Probe {
    quietly(|| {
        let libraries = libraries();
        let gpus = match libraries[0].present {
            true => gpus(),
            false => Err(NoGpus::absent("no CUDA driver (libcuda.so.1 was not found)")),
        };
        Probe { libraries, gpus }
    })
    .unwrap_or_else(|lack| Probe { libraries: libraries(), gpus: Err(NoGpus::broken(lack)) })
}

/// Runs `work`, in which cudarc tells of a missing library or function by a panic; that is an answer here and no error.
pub(super) fn quietly<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    // The hook is the whole process's.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let done = catch_unwind(AssertUnwindSafe(work));
    std::panic::set_hook(hook);
    done.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text =
            text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a function is missing");
        format!("a CUDA library is not the one that is needed: {text}")
    })
}

/// The CUDA version that the driver was made for, as 1000 major + 10 minor.
pub(super) fn driver_version() -> Option<i32> {
    let mut version = 0;
    // SAFETY: writes one number.
    let asked = unsafe { sys::cuDriverGetVersion(&mut version) };
    asked.result().ok().map(|()| version)
}

/// Whether one of the [`Probe::libraries`] is there.
pub(super) fn has(name: &str) -> bool {
    libraries().iter().any(|library| library.name == name && library.present)
}

/// The error of a GPU that cannot be used for want of a library.
pub(super) fn missing(device: &str, name: &'static str) -> DeviceError {
    DeviceError::Absent { asked: device.to_owned(), reason: not_found(name) }
}

fn not_found(name: &str) -> String {
    format!(
        "the library {name} was not found: no lib{name}.so, .so.13 or .so.12, neither in LD_LIBRARY_PATH nor among the system's libraries; \
         install it, or add its folder to LD_LIBRARY_PATH"
    )
}

/// Whether the dynamic linker finds a library.
type IsThere = unsafe fn() -> bool;

fn libraries() -> Vec<Library> {
    let present = |is_there: IsThere| {
        // SAFETY: opens the library, which runs its initialisers, and closes it again; these are CUDA's own libraries.
        catch_unwind(|| unsafe { is_there() }).unwrap_or(false)
    };
    let looked_for: [(&'static str, IsThere); 4] = [
        ("cuda driver", cudarc::driver::sys::is_culib_present),
        (NVRTC, cudarc::nvrtc::sys::is_culib_present),
        (CUBLASLT, cudarc::cublaslt::sys::is_culib_present),
        (CUDNN, cudarc::cudnn::sys::is_culib_present),
    ];
    let mut found =
        looked_for.map(|(name, is_there)| Library { name, present: present(is_there) }).to_vec();
    found.push(Library { name: "nccl", present: libnccl::nccl().is_ok() });
    found
}

fn gpus() -> Result<Vec<Gpu>, NoGpus> {
    if let Some(version) = driver_version().filter(|version| *version < OLDEST) {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return Err(NoGpus::broken(format!(
            "the driver is for CUDA {major}.{minor}, and 12.0 is the oldest that will do; install driver 525 or newer"
        )));
    }
    match result::init() {
        Ok(()) => {}
        Err(result::DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => {
            return Err(NoGpus::absent(NO_DEVICE));
        }
        Err(e) => return Err(NoGpus::broken(format!("the CUDA driver does not start: {e}"))),
    }
    let count = result::device::get_count()
        .map_err(|e| NoGpus::broken(format!("the CUDA driver fails: {e}")))?;
    if count == 0 {
        return Err(NoGpus::absent(NO_DEVICE));
    }
    (0..count).map(|i| describe(i).map_err(|e| NoGpus::broken(format!("GPU {i}: {e}")))).collect()
}

const NO_DEVICE: &str = "the CUDA driver sees no device; is CUDA_VISIBLE_DEVICES set?";

fn describe(ordinal: i32) -> Result<Gpu, result::DriverError> {
    let device = result::device::get(ordinal)?;
    let attribute = |attribute| {
        // SAFETY: `device` came from the driver and the attribute is one of its own.
        unsafe { result::device::get_attribute(device, attribute) }
    };
    // SAFETY: as above.
    let memory = unsafe { result::device::total_mem(device) }? as u64;
    Ok(Gpu {
        name: result::device::get_name(device)?,
        pci_bus_id: format!(
            "{:04x}:{:02x}:{:02x}.0",
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
        ),
        compute_capability: (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        memory,
    })
}

#[cfg(test)]
mod tests {
    use super::probe;

    #[test]
    fn answers_without_a_panic_on_any_machine() {
        let found = probe();
        assert_eq!(found.libraries.len(), 5);
        if !found.libraries[0].present {
            assert!(found.gpus.unwrap_err().reason.contains("libcuda.so.1"));
        }
        // The caller's panic hook is back: a panic still reaches it.
        assert!(std::panic::catch_unwind(|| assert!(probe().libraries.is_empty())).is_err());
    }
}
