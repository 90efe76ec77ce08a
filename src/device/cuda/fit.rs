//! [`Fit`]: which batch would fit where one does not.

use crate::device::DeviceError;

/// What a batch needs beside what there is, in bytes.
pub(super) struct Fit {
    pub(super) batch: usize,
    /// Free before anything was taken.
    pub(super) room: u64,
    /// What grows with the batch.
    pub(super) growing: u64,
    /// Variables and gradients.
    pub(super) fixed: u64,
}

impl Fit {
    /// Adds which batch would fit to an error about memory.
    pub(super) fn advise(&self, error: DeviceError) -> DeviceError {
        let DeviceError::GpuMemory { device, bytes, free, .. } = error else { return error };
        let room = self.room.saturating_sub(self.fixed);
        let fits = self.batch as u64 * room / self.growing.max(1);
        let advice = match fits.min(self.batch as u64 - 1) {
            0 => "; not even a batch of one example fits".to_owned(),
            n => format!("; use --batch-size {n}, which would fit"),
        };
        DeviceError::GpuMemory { device, bytes, free, advice }
    }
}
