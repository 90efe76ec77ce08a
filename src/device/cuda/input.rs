//! [`Input`]: brings a batch to the GPU while the step before it is computed.

use std::sync::Arc;

use super::driver::{Driver, Memory, Pinned, Ptr};
use super::events::{Event, SideStream};
use crate::device::DeviceError;

/// Two stages on the way of a batch: pinned memory of the host, and memory of the GPU from which a step takes it over at its
/// start. As soon as that is done the next batch may come, on a stream of its own.
pub(super) struct Input {
    // Dropped first: its copies use the memory below.
    copies: SideStream,
    /// The batch has come.
    come: Event,
    /// The last batch has been taken over.
    taken: Event,
    host: Pinned,
    stage: Memory,
    driver: Arc<Driver>,
    /// Floats of each feed.
    lens: Vec<usize>,
}

impl Input {
    /// For batches of so many floats.
    pub(super) fn new(driver: &Arc<Driver>, floats: usize) -> Result<Self, DeviceError> {
        let made = Self {
            copies: SideStream::new(driver)?,
            come: Event::new(driver)?,
            taken: Event::new(driver)?,
            host: driver.pinned(floats)?,
            stage: driver.alloc(floats)?,
            driver: driver.clone(),
            lens: Vec::new(),
        };
        // New memory is cleared in the order of the steps' stream.
        made.taken.record(driver.stream())?;
        Ok(made)
    }

    /// Begins to copy a batch.
    pub(super) fn bring(&mut self, feeds: &[&[f32]]) -> Result<(), DeviceError> {
        // The batch before has left the host's memory.
        self.come.synchronize()?;
        self.lens.clear();
        let mut rest = self.host.floats_mut();
        for feed in feeds {
            let (own, others) = rest.split_at_mut(feed.len());
            own.copy_from_slice(feed);
            rest = others;
            self.lens.push(feed.len());
        }
        self.taken.hold(self.copies.raw())?;
        let floats = &self.host.floats()[..self.lens.iter().sum()];
        self.driver.upload_on(self.copies.raw(), floats, self.stage.start())?;
        self.come.record(self.copies.raw())
    }

    /// Whether the first feed of the batch that was brought has so many floats.
    pub(super) fn begins_with(&self, floats: usize) -> bool {
        self.lens.first() == Some(&floats)
    }

    /// Enqueues into the steps' stream that the batch is taken over to `places`.
    pub(super) fn take(&self, places: &[Ptr]) -> Result<(), DeviceError> {
        let stream = self.driver.stream();
        self.come.hold(stream)?;
        let mut from = self.stage.start();
        for (place, len) in places.iter().zip(&self.lens) {
            self.driver.move_within(from, *place, *len)?;
            from = from.at(*len);
        }
        self.taken.record(stream)
    }
}
