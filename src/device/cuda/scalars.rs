//! [`Scalars`]: the fetched numbers of runs, kept on their way until somebody asks.

use std::sync::Arc;

use super::driver::{Driver, Pinned, Ptr};
use crate::device::DeviceError;

/// The numbers of the last runs, those of a run in each row.
pub(super) struct Scalars {
    host: Pinned,
    /// Numbers of a run.
    len: usize,
    /// The row of the next run, and how many before it nobody has asked for.
    row: usize,
    unread: usize,
}

impl Scalars {
    /// Runs that are remembered.
    pub(super) const ROWS: usize = 64;

    /// For so many numbers a run.
    pub(super) fn new(driver: &Arc<Driver>, len: usize) -> Result<Self, DeviceError> {
        Ok(Self { host: driver.pinned(Self::ROWS * len)?, len, row: 0, unread: 0 })
    }

    /// Numbers of a run.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Enqueues that the numbers of this run, which begin at `from`, come to a row of their own.
    pub(super) fn keep(&mut self, driver: &Driver, from: Ptr) -> Result<(), DeviceError> {
        if self.len > 0 {
            let row = &mut self.host.floats_mut()[self.row * self.len..][..self.len];
            driver.download(from, row)?;
        }
        self.row = (self.row + 1) % Self::ROWS;
        self.unread = Self::ROWS.min(self.unread + 1);
        Ok(())
    }

    /// The rows of the runs since this was last asked, oldest first. The runs must be over.
    pub(super) fn take(&mut self) -> impl Iterator<Item = &[f32]> {
        let (unread, row, len) = (std::mem::take(&mut self.unread), self.row, self.len);
        let start = move |ago| (row + Self::ROWS - ago) % Self::ROWS * len;
        let all = self.host.floats();
        (1..=unread).rev().map(move |ago| &all[start(ago)..][..len])
    }
}
