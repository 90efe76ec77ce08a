//! [`Slab`]: one flat f32 vector on one device.

use std::ops::Range;
use std::sync::Arc;

use super::cuda::Memory;
use super::{DeviceError, heap};

/// A cache line, so that a vector of lines is aligned for every vector unit.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// One flat f32 vector on one device: parameters, slots, gradients or scratch, laid out by one `VarTable`.
pub struct Slab {
    buffer: Buffer,
    len: usize,
}

/// Closed: few kinds of memory exist, so this is an enum and nobody downcasts.
enum Buffer {
    Host(Vec<Line>),
    /// Shared with who sums it while it is being computed.
    Cuda(Arc<Memory>),
}

impl Slab {
    /// Zeros in the host's memory, aligned to 64 bytes. `None` when the system has not that much.
    pub fn host(len: usize) -> Option<Self> {
        let lines = len.div_ceil(16);
        let mut buffer = Vec::new();
        buffer.try_reserve_exact(lines).ok()?;
        heap::huge_pages(&mut buffer.spare_capacity_mut()[..lines]);
        buffer.resize(lines, Line([0.0; 16]));
        Some(Self { buffer: Buffer::Host(buffer), len })
    }

    /// The whole of a GPU's memory.
    pub(super) fn cuda(memory: Memory, len: usize) -> Self {
        Self { buffer: Buffer::Cuda(Arc::new(memory)), len }
    }

    /// Floats.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The floats, where they lie in the host's memory.
    pub fn as_host(&self) -> Option<&[f32]> {
        match &self.buffer {
            Buffer::Host(lines) => Some(&bytemuck::cast_slice(lines)[..self.len]),
            Buffer::Cuda(_) => None,
        }
    }

    /// The floats, where they lie in the host's memory.
    pub fn as_host_mut(&mut self) -> Option<&mut [f32]> {
        match &mut self.buffer {
            Buffer::Host(lines) => Some(&mut bytemuck::cast_slice_mut(lines)[..self.len]),
            Buffer::Cuda(_) => None,
        }
    }

    /// The memory, where it is a GPU's.
    pub(super) fn as_cuda(&self) -> Option<&Arc<Memory>> {
        match &self.buffer {
            Buffer::Host(_) => None,
            Buffer::Cuda(memory) => Some(memory),
        }
    }

    /// Copies a range to the host.
    pub fn read(&self, range: Range<usize>, into: &mut [f32]) -> Result<(), DeviceError> {
        self.check(&range, into.len())?;
        match &self.buffer {
            Buffer::Host(lines) => into.copy_from_slice(&bytemuck::cast_slice(lines)[range]),
            Buffer::Cuda(memory) => memory.read(range.start, into)?,
        }
        Ok(())
    }

    /// Copies from the host to a range.
    pub fn write(&mut self, range: Range<usize>, from: &[f32]) -> Result<(), DeviceError> {
        self.check(&range, from.len())?;
        match &mut self.buffer {
            Buffer::Host(lines) => bytemuck::cast_slice_mut(lines)[range].copy_from_slice(from),
            Buffer::Cuda(memory) => memory.write(range.start, from)?,
        }
        Ok(())
    }

    /// Copies everything from a slab of the same length, whatever device holds it.
    pub fn copy_from(&mut self, from: &Slab) -> Result<(), DeviceError> {
        self.check(&(0..self.len), from.len)?;
        match (&mut self.buffer, &from.buffer) {
            (_, Buffer::Host(lines)) => {
                self.write(0..from.len, &bytemuck::cast_slice(lines)[..from.len])
            }
            (Buffer::Host(lines), Buffer::Cuda(memory)) => {
                memory.read(0, &mut bytemuck::cast_slice_mut(lines)[..from.len])
            }
            (Buffer::Cuda(own), Buffer::Cuda(memory)) => own.copy_from(memory),
        }
    }

    fn check(&self, range: &Range<usize>, len: usize) -> Result<(), DeviceError> {
        if range.start <= range.end && range.end <= self.len && range.len() == len {
            return Ok(());
        }
        Err(DeviceError::Mismatch {
            device: "slab".to_owned(),
            reason: format!("{len} floats for {range:?} of {}", self.len),
        })
    }
}

impl std::fmt::Debug for Slab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slab({} floats)", self.len)
    }
}
