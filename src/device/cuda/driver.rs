//! [`Driver`]: a GPU's context and its one stream; the memory on both sides; and what can go wrong, in words.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, result::stream::StreamKind};

use crate::device::DeviceError;

/// An address in the memory of a GPU; what it points at is f32 unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Ptr(pub(super) u64);

impl Ptr {
    /// For an operand that is not there.
    pub(super) const NULL: Self = Self(0);

    /// So many floats further.
    pub(super) fn at(self, floats: usize) -> Self {
        Self(self.0 + 4 * floats as u64)
    }

    pub(super) fn raw(self) -> *mut std::ffi::c_void {
        self.0 as *mut _
    }
}

/// A GPU as this process uses it. Everything is done in the order of one stream.
pub(super) struct Driver {
    context: Arc<CudaContext>,
    stream: sys::CUstream,
    /// The device's full name, for errors.
    name: String,
}

// SAFETY: handles of the driver may be used from any thread that has their context, which every method binds first.
unsafe impl Send for Driver {}
// SAFETY: likewise; the driver locks its own state.
unsafe impl Sync for Driver {}

impl Driver {
    /// Opens the GPU of this ordinal among the visible ones.
    pub(super) fn open(ordinal: usize, name: String) -> Result<Arc<Self>, DeviceError> {
        let opened = CudaContext::new(ordinal).and_then(|context| {
            let stream = result::stream::create(StreamKind::NonBlocking)?;
            Ok((context, stream))
        });
        match opened {
            Ok((context, stream)) => Ok(Arc::new(Self { context, stream, name })),
            Err(error) => Err(failure(&name, "opening it", error)),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Makes this GPU the one that this thread's calls are for.
    pub(super) fn bind(&self) -> Result<(), DeviceError> {
        self.check("using it", self.context.bind_to_thread())
    }

    pub(super) fn check<T>(
        &self,
        what: &str,
        result: Result<T, DriverError>,
    ) -> Result<T, DeviceError> {
        result.map_err(|error| failure(&self.name, what, error))
    }

    /// Major and minor.
    pub(super) fn compute_capability(&self) -> Result<(i32, i32), DeviceError> {
        self.check("asking what it can do", self.context.compute_capability())
    }

    /// Its card, and the bytes on it.
    pub(super) fn card(&self) -> Result<(String, usize), DeviceError> {
        let card = self.context.name().and_then(|name| Ok((name, self.context.total_mem()?)));
        self.check("asking what it is", card)
    }

    /// The card's own name, the same in all processes of a machine.
    pub(super) fn card_id(&self) -> Option<String> {
        let id = self.context.uuid().ok()?;
        Some(id.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect())
    }

    /// Bytes that nobody has.
    pub(super) fn free(&self) -> u64 {
        self.context.mem_get_info().map_or(0, |(free, _)| free as u64)
    }

    /// Zeros on the GPU.
    pub(super) fn alloc(self: &Arc<Self>, floats: usize) -> Result<Memory, DeviceError> {
        self.bind()?;
        let bytes = 4 * floats.max(1);
        // SAFETY: the context is bound; the memory is filled before anybody reads it.
        let start = match unsafe { result::malloc_sync(bytes) } {
            Ok(start) => start,
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                return Err(DeviceError::GpuMemory {
                    device: self.name.clone(),
                    bytes: bytes as u64,
                    free: self.free(),
                    advice: String::new(),
                });
            }
            Err(error) => return Err(failure(&self.name, "allocating memory", error)),
        };
        let memory = Memory { driver: self.clone(), start: Ptr(start), floats };
        // SAFETY: the memory is as long as that and alive.
        let filled = unsafe { result::memset_d8_async(start, 0, bytes, self.stream) };
        self.check("clearing memory", filled)?;
        Ok(memory)
    }

    /// Zeros on the host that the GPU copies from and to without a detour.
    pub(super) fn pinned(self: &Arc<Self>, floats: usize) -> Result<Pinned, DeviceError> {
        self.bind()?;
        // SAFETY: the context is bound; the memory is filled before it is lent out.
        let start = unsafe { result::malloc_host(4 * floats.max(1), 0) };
        let start = self.check("pinning memory of the host", start)?.cast::<f32>();
        // SAFETY: the allocation is as long as that.
        unsafe { std::ptr::write_bytes(start, 0, floats.max(1)) };
        Ok(Pinned { driver: self.clone(), start, floats })
    }

    /// Enqueues a copy to the GPU. The floats must stay as they are until [`Driver::synchronize`].
    pub(super) fn upload(&self, from: &[f32], to: Ptr) -> Result<(), DeviceError> {
        self.upload_on(self.stream, from, to)
    }

    /// As [`Driver::upload`], in the order of another stream.
    pub(super) fn upload_on(
        &self,
        stream: sys::CUstream,
        from: &[f32],
        to: Ptr,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's addresses come from `Memory` with as many floats; whoever lends `from` waits.
        let copied = unsafe { result::memcpy_htod_async(to.0, from, stream) };
        self.check("copying to it", copied)
    }

    /// As [`Driver::upload`], of bytes.
    pub(super) fn upload_bytes(&self, from: &[u8], to: Ptr) -> Result<(), DeviceError> {
        // SAFETY: as for `upload`.
        let copied = unsafe { result::memcpy_htod_async(to.0, from, self.stream) };
        self.check("copying to it", copied)
    }

    /// Enqueues a copy from one place of the GPU's memory to another.
    pub(super) fn move_within(&self, from: Ptr, to: Ptr, floats: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller's addresses come from `Memory` with as many floats.
        let copied = unsafe { result::memcpy_dtod_async(to.0, from.0, 4 * floats, self.stream) };
        self.check("copying within it", copied)
    }

    /// Enqueues a copy to the host. The floats are there after [`Driver::synchronize`].
    pub(super) fn download(&self, from: Ptr, to: &mut [f32]) -> Result<(), DeviceError> {
        // SAFETY: as for `upload`.
        let copied = unsafe { result::memcpy_dtoh_async(to, from.0, self.stream) };
        self.check("copying from it", copied)
    }

    /// Waits for everything that was enqueued.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream lives as long as `self`.
        self.check("waiting for its work", unsafe { result::stream::synchronize(self.stream) })
    }

    /// Records what `work` enqueues, in place of running it.
    pub(super) fn capture(
        self: &Arc<Self>,
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph, DeviceError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, and no capture is under way: each one ends below.
        self.check("recording a step", unsafe {
            result::stream::begin_capture(self.stream, mode)
        })?;
        let worked = work();
        // SAFETY: as above; a capture has to end, also after a failure.
        let graph = unsafe { result::stream::end_capture(self.stream) };
        worked?;
        let graph = self.check("recording a step", graph)?;
        // SAFETY: the graph came from the capture; its executable form does not need it any longer.
        let made = unsafe {
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            result::graph::destroy(graph).and(made)
        };
        Ok(Graph { driver: self.clone(), graph: self.check("preparing a recorded step", made)? })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // An error here has been told before, or concerns nobody any more.
        let _ = self.context.bind_to_thread();
        // SAFETY: memory and graphs hold the driver, so nothing uses the stream any longer.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// Memory on a GPU.
pub struct Memory {
    driver: Arc<Driver>,
    start: Ptr,
    floats: usize,
}

impl Memory {
    pub(super) fn start(&self) -> Ptr {
        self.start
    }

    pub(super) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    pub(super) fn len(&self) -> usize {
        self.floats
    }

    /// Whether it lies on this GPU.
    pub(super) fn is_on(&self, driver: &Arc<Driver>) -> bool {
        Arc::ptr_eq(&self.driver, driver)
    }

    /// Copies floats from `offset` on to the host.
    pub(in crate::device) fn read(
        &self,
        offset: usize,
        into: &mut [f32],
    ) -> Result<(), DeviceError> {
        self.inside(offset, into.len())?;
        self.driver.bind()?;
        self.driver.download(self.start.at(offset), into)?;
        self.driver.synchronize()
    }

    /// Copies floats from the host, from `offset` on.
    pub(in crate::device) fn write(&self, offset: usize, from: &[f32]) -> Result<(), DeviceError> {
        self.inside(offset, from.len())?;
        self.driver.bind()?;
        self.driver.upload(from, self.start.at(offset))?;
        self.driver.synchronize()
    }

    /// Copies everything from memory of this or another GPU.
    pub(in crate::device) fn copy_from(&self, from: &Memory) -> Result<(), DeviceError> {
        self.inside(0, from.floats)?;
        // What is to be copied must be there: the other GPU has a stream of its own.
        from.driver.bind()?;
        from.driver.synchronize()?;
        self.driver.bind()?;
        // SAFETY: both are alive and as long as that; addresses are unique over all GPUs of a process.
        let copied = unsafe {
            result::memcpy_dtod_async(
                self.start.0,
                from.start.0,
                4 * from.floats,
                self.driver.stream,
            )
        };
        self.driver.check("copying between GPUs", copied)?;
        self.driver.synchronize()
    }

    fn inside(&self, offset: usize, len: usize) -> Result<(), DeviceError> {
        if offset + len <= self.floats {
            return Ok(());
        }
        let reason =
            format!("floats {offset}..{} of a memory that has {}", offset + len, self.floats);
        Err(DeviceError::Mismatch { device: self.driver.name.clone(), reason })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.driver.bind();
        // SAFETY: it came from the driver and is given back once; the driver waits for those who use it.
        let _ = unsafe { result::free_sync(self.start.0) };
    }
}

/// Memory of the host that a GPU reaches directly.
pub(super) struct Pinned {
    driver: Arc<Driver>,
    start: *mut f32,
    floats: usize,
}

// SAFETY: the only handle to its memory.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(super) fn floats(&self) -> &[f32] {
        // SAFETY: as long as that, filled when it was made, and borrowed from `self`.
        unsafe { std::slice::from_raw_parts(self.start, self.floats) }
    }

    pub(super) fn floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.floats) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.driver.bind();
        // Copies from and to it must be over.
        let _ = self.driver.synchronize();
        // SAFETY: it came from the driver and is given back once.
        let _ = unsafe { result::free_host(self.start.cast()) };
    }
}

/// Recorded work that is launched as a whole.
pub(super) struct Graph {
    driver: Arc<Driver>,
    graph: sys::CUgraphExec,
}

// SAFETY: a handle that one owner uses at a time.
unsafe impl Send for Graph {}

impl Graph {
    pub(super) fn launch(&self) -> Result<(), DeviceError> {
        // SAFETY: graph and stream are alive; the memory in it belongs to the owner of this.
        let launched = unsafe { result::graph::launch(self.graph, self.driver.stream) };
        self.driver.check("launching a step", launched)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.driver.bind();
        // SAFETY: made by `Driver::capture`, given back once.
        let _ = unsafe { result::graph::exec_destroy(self.graph) };
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} floats on {})", self.floats, self.driver.name)
    }
}

/// An error of the driver, with what a person may do.
pub(super) fn failure(device: &str, what: &str, error: DriverError) -> DeviceError {
    let code = error.0 as u32;
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
    let name = name.unwrap_or_else(|_| format!("error {code}"));
    let hint = match error.0 {
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE => {
            "the card's memory has a fault that ECC cannot mend; reset the card, or leave it out by CUDA_VISIBLE_DEVICES"
        }
        CUresult::CUDA_ERROR_LAUNCH_FAILED | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => {
            "a kernel went wrong or the card is faulty; `dmesg | grep -i xid` tells which"
        }
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            "there is no memory left; see `nvidia-smi` and `free`"
        }
        CUresult::CUDA_ERROR_LAUNCH_TIMEOUT => {
            "a kernel ran too long for a card that also drives a display"
        }
        CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            "another process has it for itself; see `nvidia-smi`"
        }
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "the driver's library and kernel module differ; restart the machine"
        }
        _ => "see `nvidia-smi` and `dmesg`",
    };
    DeviceError::Gpu {
        device: device.to_owned(),
        what: what.to_owned(),
        reason: format!("{name}; {hint}"),
    }
}
