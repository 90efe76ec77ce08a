//! [`probe`]: which CUDA libraries and GPUs are there. Never panics, touches no GPU memory, takes milliseconds.

use std::panic::{AssertUnwindSafe, catch_unwind};

use cudarc::driver::result;
use cudarc::driver::sys::CUdevice_attribute;

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
    pub gpus: Result<Vec<Gpu>, String>,
}

/// Looks for the driver, its GPUs and the other libraries.
pub fn probe() -> Probe {
    // cudarc tells of a missing library or symbol by a panic, which is an answer here and no error.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let libraries = libraries();
    let gpus = if libraries[0].present {
        catch_unwind(AssertUnwindSafe(gpus))
            .unwrap_or_else(|_| Err("the driver's library lacks a function".to_owned()))
    } else {
        Err("no CUDA driver (libcuda.so.1 was not found)".to_owned())
    };
    std::panic::set_hook(hook);
    Probe { libraries, gpus }
}

/// Whether the dynamic linker finds a library.
type IsThere = unsafe fn() -> bool;

fn libraries() -> Vec<Library> {
    let present = |is_there: IsThere| {
        // SAFETY: opens the library, which runs its initialisers, and closes it again; these are CUDA's own libraries.
        catch_unwind(|| unsafe { is_there() }).unwrap_or(false)
    };
    let looked_for: [(&'static str, IsThere); 5] = [
        ("cuda driver", cudarc::driver::sys::is_culib_present),
        ("nvrtc", cudarc::nvrtc::sys::is_culib_present),
        ("cublasLt", cudarc::cublaslt::sys::is_culib_present),
        ("cudnn", cudarc::cudnn::sys::is_culib_present),
        ("nccl", cudarc::nccl::sys::is_culib_present),
    ];
    looked_for.map(|(name, is_there)| Library { name, present: present(is_there) }).to_vec()
}

fn gpus() -> Result<Vec<Gpu>, String> {
    result::init().map_err(|e| format!("the CUDA driver does not start: {e}"))?;
    let count = result::device::get_count().map_err(|e| format!("the CUDA driver fails: {e}"))?;
    if count == 0 {
        return Err("the CUDA driver sees no device; is CUDA_VISIBLE_DEVICES set?".to_owned());
    }
    (0..count).map(|i| describe(i).map_err(|e| format!("GPU {i}: {e}"))).collect()
}

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
            assert!(found.gpus.unwrap_err().contains("libcuda.so.1"));
        }
        // The caller's panic hook is back: a panic still reaches it.
        assert!(std::panic::catch_unwind(|| assert!(probe().libraries.is_empty())).is_err());
    }
}
