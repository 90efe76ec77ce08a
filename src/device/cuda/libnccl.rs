//! [`Nccl`]: the functions of `libnccl.so.2`, found at run time.
//!
//! Not by cudarc: it never tries that name, which is the only one that most packages of NCCL install, and an enum of result
//! codes cannot hold one that a newer library made up. Here a code stays a number.

use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::Library;

use crate::device::DeviceError;

/// `ncclSuccess`.
pub(super) const SUCCESS: i32 = 0;
/// `ncclInProgress`: the answer of a communicator that does not block.
pub(super) const IN_PROGRESS: i32 = 7;
/// `ncclFloat32`.
pub(super) const FLOAT32: i32 = 7;
/// `ncclSum`.
pub(super) const SUM: i32 = 0;

/// The oldest version that can be told not to block: 2.14.
const OLDEST: i32 = 21_400;

/// A communicator of the library.
pub(super) type Comm = *mut c_void;

/// `ncclUniqueId`: what all ranks of a communicator must know.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` as of version 2.14; newer ones fill in what they know beyond.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
}

impl Config {
    /// Calls return at once, and tell by `ncclCommGetAsyncError` when they are done.
    pub(super) fn that_does_not_block() -> Self {
        let (magic, version) = (0xcafe_beef, OLDEST as u32);
        Self { size: size_of::<Self>(), magic, version, blocking: 0 }
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
    last_error = b"ncclGetLastError\0"(Comm) -> *const c_char;
    unique_id = b"ncclGetUniqueId\0"(*mut UniqueId) -> i32;
    init_rank = b"ncclCommInitRankConfig\0"(*mut Comm, i32, UniqueId, i32, *mut Config) -> i32;
    async_error = b"ncclCommGetAsyncError\0"(Comm, *mut i32) -> i32;
    finalize = b"ncclCommFinalize\0"(Comm) -> i32;
    destroy = b"ncclCommDestroy\0"(Comm) -> i32;
    abort = b"ncclCommAbort\0"(Comm) -> i32;
    group_start = b"ncclGroupStart\0"() -> i32;
    group_end = b"ncclGroupEnd\0"() -> i32;
    all_reduce = b"ncclAllReduce\0"(
        *const c_void, *mut c_void, usize, i32, i32, Comm, *mut c_void
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
    let mut id = UniqueId([0; 128]);
    // SAFETY: fills the 128 bytes.
    let code = unsafe { (nccl.unique_id)(&mut id) };
    nccl.check("starting", code)?;
    Ok(id)
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
