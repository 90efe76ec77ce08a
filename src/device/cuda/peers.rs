//! [`peer`]: how two GPUs of a machine reach each other, and [`card_id`]: whether they are two.

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_P2PAttribute};

use super::probe;
use crate::device::Slab;

/// What the driver says of the way from one GPU to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Whether one reads the other's memory; else copies go through the host.
    pub access: bool,
    /// The driver's rank of the link, 0 being the fastest of the machine.
    pub rank: i32,
    /// Whether atomic operations work across it, as over NVLink.
    pub atomics: bool,
}

/// The card a slab lies on, the same name in all processes of a machine and another on all other cards; `None` on the host.
pub fn card_id(slab: &Slab) -> Option<String> {
    slab.as_cuda().and_then(|memory| memory.driver().card_id())
}

/// The way from one visible GPU to another; `None` where the driver does not say.
pub fn peer(from: u32, to: u32) -> Option<Peer> {
    probe::quietly(|| {
        let [from, to] = [from, to].map(|i| result::device::get(i as i32).ok());
        let (from, to) = (from?, to?);
        let mut access = 0;
        // SAFETY: both devices came from the driver; writes one number.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut access, from, to) };
        asked.result().ok()?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: as above.
            let asked = unsafe { sys::cuDeviceGetP2PAttribute(&mut value, attribute, from, to) };
            asked.result().ok().map(|()| value)
        };
        let rank = attribute(CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?;
        let atomics =
            attribute(CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)?;
        Some(Peer { access: access != 0, rank, atomics: atomics != 0 })
    })
    .ok()
    .flatten()
}

/// Which of these GPUs reach each other, in words; `None` for fewer than two.
pub fn topology(gpus: &[u32]) -> Option<String> {
    let mut gpus = gpus.to_vec();
    gpus.sort_unstable();
    gpus.dedup();
    let pairs =
        || gpus.iter().enumerate().flat_map(|(i, &a)| gpus[i + 1..].iter().map(move |&b| (a, b)));
    let reach = |&(a, b): &(u32, u32)| {
        [(a, b), (b, a)].iter().all(|&(a, b)| peer(a, b).is_some_and(|peer| peer.access))
    };
    let linked: Vec<(u32, u32)> = pairs().filter(reach).collect();
    Some(match (gpus.len(), linked.len()) {
        (0 | 1, _) => return None,
        (_, 0) => "none, copies between GPUs go through the host".to_owned(),
        (n, links) if links == n * (n - 1) / 2 => format!("between all {n}"),
        _ => {
            let words: Vec<String> = linked.iter().map(|(a, b)| format!("{a}-{b}")).collect();
            format!("between {} only, others through the host", words.join(", "))
        }
    })
}
