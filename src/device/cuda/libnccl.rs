//! [`Nccl`]: the functions of `libnccl.so.2`, found at run time.
//!
//! Types are cudarc's. Its look-up never tries that name, which is the only one that most packages of NCCL install, and its enum
//! of result codes cannot hold one that a newer library made up: here functions are looked up again, and a code stays a number.

use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use cudarc::nccl::sys::{
    cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId,
};
use libloading::Library;

use crate::device::DeviceError;

pub(super) const SUCCESS: i32 = ncclResult_t::ncclSuccess as i32;
/// The answer of a communicator that does not block.
pub(super) const IN_PROGRESS: i32 = ncclResult_t::ncclInProgress as i32;

/// The oldest version that can be told not to block: 2.14.
const OLDEST: i32 = 21_400;

/// What all ranks of a communicator must know.
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

impl UniqueId {
    pub(super) fn raw(self) -> ncclUniqueId {
        ncclUniqueId { internal: self.0.map(|byte| byte as c_char) }
    }
}

/// Calls return at once, and tell by `ncclCommGetAsyncError` when they are done. It says that it is of version 2.14, so that
/// every library fills in what it knows beyond.
pub(super) fn does_not_block() -> ncclConfig_t {
    const OPEN: i32 = i32::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: OLDEST as u32,
        blocking: 0,
        cgaClusterSize: OPEN,
        minCTAs: OPEN,
        maxCTAs: OPEN,
        netName: std::ptr::null(),
        splitShare: OPEN,
        trafficClass: OPEN,
        commName: std::ptr::null(),
        collnetEnable: OPEN,
        CTAPolicy: OPEN,
        shrinkShare: OPEN,
        nvlsCTAs: OPEN,
        nChannelsPerNetPeer: OPEN,
        nvlinkCentricSched: OPEN,
        graphUsageMode: OPEN,
        numRmaCtx: OPEN,
        maxP2pPeers: OPEN,
    }
}

/// Declares the functions and how they are looked up.
macro_rules! functions {
    ($($field:ident = $symbol:literal($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of the library, as nccl.h declares them. It stays loaded: it has threads of its own.
        pub(super) struct Nccl {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            _library: Library,
        }

        impl Nccl {
            fn of(library: Library) -> Result<Self, String> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the type is that of the function in nccl.h; the library stays as long as the pointer.
                        *unsafe { library.get($symbol) }.map_err(|error| format!("NCCL {error}"))?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    version = b"ncclGetVersion\0"(*mut i32) -> i32;
    error_string = b"ncclGetErrorString\0"(i32) -> *const c_char;
    last_error = b"ncclGetLastError\0"(ncclComm_t) -> *const c_char;
    unique_id = b"ncclGetUniqueId\0"(*mut ncclUniqueId) -> i32;
    init_rank = b"ncclCommInitRankConfig\0"(*mut ncclComm_t, i32, ncclUniqueId, i32, *mut ncclConfig_t) -> i32;
    async_error = b"ncclCommGetAsyncError\0"(ncclComm_t, *mut i32) -> i32;
    finalize = b"ncclCommFinalize\0"(ncclComm_t) -> i32;
    destroy = b"ncclCommDestroy\0"(ncclComm_t) -> i32;
    abort = b"ncclCommAbort\0"(ncclComm_t) -> i32;
    group_start = b"ncclGroupStart\0"() -> i32;
    group_end = b"ncclGroupEnd\0"() -> i32;
    all_reduce = b"ncclAllReduce\0"(
        *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t
    ) -> i32;
}

/// Folders that are searched after those of the dynamic linker.
static FOLDERS: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Looks for NCCL in these folders too, after those of the dynamic linker. Only the first call counts, before
/// anything else is asked of NCCL.
pub fn look_for_nccl_in(folders: Vec<PathBuf>) {
    let _ = FOLDERS.set(folders);
}

/// The library, loaded at the first call.
///
/// # Errors
/// Where it was looked for, or what is wrong with it.
pub(super) fn nccl() -> Result<&'static Nccl, String> {
    static NCCL: OnceLock<Result<Nccl, String>> = OnceLock::new();
    NCCL.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Why NCCL cannot be used; `None` where it can.
pub fn nccl_lack() -> Option<String> {
    nccl().err()
}

/// What a communicator's ranks must know, made by one of them.
///
/// # Errors
/// [`DeviceError::Absent`] without NCCL, [`DeviceError::Gpu`] when it fails.
pub fn unique_id() -> Result<UniqueId, DeviceError> {
    let nccl = nccl().map_err(|reason| DeviceError::Absent { asked: "NCCL".to_owned(), reason })?;
    let mut id = UniqueId([0; 128]).raw();
    // SAFETY: fills the 128 bytes.
    let code = unsafe { (nccl.unique_id)(&mut id) };
    nccl.check("starting", code)?;
    Ok(UniqueId(id.internal.map(|byte| byte as u8)))
}

fn load() -> Result<Nccl, String> {
    const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
    let mut folders = FOLDERS.get().cloned().unwrap_or_default();
    let program = std::env::current_exe().ok();
    folders.extend(program.and_then(|file| file.parent().map(Into::into)));
    let paths = folders.iter().flat_map(|folder| NAMES.map(|name| folder.join(name)));
    let candidates = NAMES.iter().map(PathBuf::from).chain(paths.filter(|path| path.exists()));
    let mut spoilt = None;
    for path in candidates {
        // SAFETY: runs the library's initialisers; it is NVIDIA's, or what the user put in its place.
        match unsafe { Library::new(&path) } {
            Ok(library) => return checked(Nccl::of(library)?),
            Err(error) if path.is_absolute() => spoilt = Some(error),
            Err(_) => {}
        }
    }
    if let Some(error) = spoilt {
        return Err(format!("NCCL does not load: {error}"));
    }
    let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    Err(format!(
        "libnccl.so.2 was not found, neither in LD_LIBRARY_PATH nor among the system's libraries nor in {}; \
         install NCCL 2.14 or newer, or add its folder to LD_LIBRARY_PATH",
        folders.join(", ")
    ))
}

fn checked(nccl: Nccl) -> Result<Nccl, String> {
    let mut version = 0;
    // SAFETY: writes one number.
    let code = unsafe { (nccl.version)(&mut version) };
    if code == SUCCESS && version >= OLDEST {
        return Ok(nccl);
    }
    let (major, minor) = match version {
        // The scheme before 2.9.
        ..10_000 => (version / 1000, version % 1000 / 100),
        _ => (version / 10_000, version % 10_000 / 100),
    };
    Err(format!("this is NCCL {major}.{minor}, and 2.14 is the oldest that will do"))
}

impl Nccl {
    /// An error for a code that is neither success nor "in progress".
    pub(super) fn check(&self, what: &str, code: i32) -> Result<(), DeviceError> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.failure("NCCL", what, code)),
        }
    }

    /// A code in the library's words.
    pub(super) fn failure(&self, device: &str, what: &str, code: i32) -> DeviceError {
        let text = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: the library's texts end with a zero and are not changed while no other call is made.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned(),
        };
        // SAFETY: takes any number.
        let words = text(unsafe { (self.error_string)(code) });
        // SAFETY: the communicator is not used: the text is that of the last failure of all.
        let last = text(unsafe { (self.last_error)(std::ptr::null_mut()) });
        let detail = if last.is_empty() { String::new() } else { format!(": {last}") };
        let reason = format!("NCCL error {code}, {words}{detail}; NCCL_DEBUG=WARN tells more");
        DeviceError::Gpu { device: device.to_owned(), what: what.to_owned(), reason }
    }
}
