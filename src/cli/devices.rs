//! `tftrain devices`.

use std::path::PathBuf;

use anyhow::Result;

use super::exit::Usage;
use super::output::print;
use crate::cluster::{DeviceKind, DeviceName};
use crate::device::cpu::{Isa, IsaLimit};
use crate::device::cuda;
use crate::util::{cores, stats};

/// Keeps compiled kernels in the user's cache folder, as `XDG_CACHE_HOME` says, from now on.
pub(super) fn keep_kernels() {
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or(folder("HOME").map(|home| home.join(".cache")));
    if let Some(cache) = cache {
        cuda::keep_kernels_in(cache.join("tftrain"));
    }
}

/// Looks for NCCL where CUDA is, as `CUDA_HOME` and `CUDA_PATH` say, too.
pub(super) fn look_for_nccl() {
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    let folders = homes.flat_map(|home| ["lib64", "lib"].map(|lib| PathBuf::from(&home).join(lib)));
    cuda::look_for_nccl_in(folders.filter(|folder| folder.is_absolute()).collect());
}

/// Names the instruction set that CPU kernels use at most, to see what another machine would do.
const MAX_CPU_ISA: &str = "TFTRAIN_MAX_CPU_ISA";

/// Limits CPU kernels as the environment says.
#[allow(clippy::disallowed_methods, reason = "the one place where it is looked up")]
pub(super) fn limit_instructions() -> Result<(), Usage> {
    let Some(asked) = std::env::var_os(MAX_CPU_ISA) else { return Ok(()) };
    let asked = asked.to_string_lossy().to_lowercase();
    let known = IsaLimit::NAMES.iter().find(|(name, _)| *name == asked);
    let (_, limit) = known.ok_or_else(|| {
        let names = IsaLimit::NAMES.map(|(name, _)| name).join(", ");
        Usage(format!("{MAX_CPU_ISA} is {asked:?}, and can be one of {names}"))
    })?;
    limit.set();
    Ok(())
}

/// Which GPUs reach each other, and how.
fn links(gpus: u32) -> String {
    let pairs = (0..gpus).flat_map(|from| (0..gpus).map(move |to| (from, to)));
    let line = |(from, to)| {
        let peer = cuda::peer(from, to)?;
        let words = match (peer.access, peer.atomics) {
            (false, _) => "no peer access, copies go through the host".to_owned(),
            (true, false) => format!("peer access, link of rank {}", peer.rank),
            (true, true) => format!("peer access with atomics, link of rank {}", peer.rank),
        };
        Some(format!("/device:GPU:{from} -> /device:GPU:{to}: {words}\n"))
    };
    pairs.filter(|(from, to)| from != to).filter_map(line).collect()
}

/// The devices by their full names, then the CUDA libraries.
pub(super) fn devices() -> Result<u8> {
    let cpu = DeviceName::local(DeviceKind::Cpu, 0);
    let mut text = format!("{cpu}  {} cores, {}\n", cores(), Isa::detect());
    let found = cuda::probe();
    match &found.gpus {
        Ok(gpus) => {
            for (i, gpu) in gpus.iter().enumerate() {
                let (major, minor) = gpu.compute_capability;
                text += &format!(
                    "{} -> device: {i}, name: {}, pci bus id: {}, compute capability: {major}.{minor}, memory: {}\n",
                    DeviceName::local(DeviceKind::Gpu, i as u32),
                    gpu.name,
                    gpu.pci_bus_id,
                    stats::bytes(gpu.memory)
                );
            }
            text += &links(gpus.len() as u32);
        }
        Err(none) => text += &format!("no GPU: {}\n", none.reason),
    }
    let words = |present| if present { "found" } else { "not found" };
    for library in &found.libraries {
        text += &format!("{}: {}\n", library.name, words(library.present));
    }
    print(&text)
}
