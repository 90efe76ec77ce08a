//! [`Event`] and [`SideStream`]: how a GPU copies while it computes, and tells how long its work took.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::sys;

use super::driver::Driver;
use super::probe;
use crate::device::DeviceError;

/// A mark in the order of a stream.
pub(super) struct Event {
    driver: Arc<Driver>,
    event: sys::CUevent,
}

// SAFETY: handles of the driver may be used from any thread that has their context.
unsafe impl Send for Event {}

impl Event {
    /// For the order of work alone.
    pub(super) fn new(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        Self::with(driver, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// That also tells when it was reached.
    pub(super) fn timed(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        Self::with(driver, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(driver: &Arc<Driver>, flags: sys::CUevent_flags) -> Result<Self, DeviceError> {
        driver.bind()?;
        let event = driver.check("creating an event", result::event::create(flags))?;
        Ok(Self { driver: driver.clone(), event })
    }

    /// Marks what `stream` has been given so far.
    pub(super) fn record(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
        // SAFETY: event and stream are alive and of one context.
        let recorded = unsafe { result::event::record(self.event, stream) };
        self.driver.check("recording an event", recorded)
    }

    /// Lets what `stream` is given from now on wait for the mark.
    pub(super) fn hold(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as above.
        let held = unsafe { result::stream::wait_event(stream, self.event, flags) };
        self.driver.check("ordering its work", held)
    }

    /// Waits for the mark; one that was never recorded is no reason to wait.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the event is alive.
        let reached = unsafe { sys::cuEventSynchronize(self.event) };
        self.driver.check("waiting for its work", reached.result())
    }

    /// Whether the mark has been reached; `what` is being done.
    pub(super) fn is_reached(&self, what: &str) -> Result<bool, DeviceError> {
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.event) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => self.driver.check(what, other.result()).map(|()| true),
        }
    }

    /// The time from this mark to a later one; both have been reached, and are [`Event::timed`].
    pub(super) fn until(&self, later: &Self) -> Result<Duration, DeviceError> {
        let mut milliseconds: f32 = 0.0;
        // A driver before that of CUDA 12.8 has no such function.
        let told = probe::quietly(|| {
            // SAFETY: both events are alive; writes one number.
            unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, self.event, later.event) }
        });
        let device = self.driver.name().to_owned();
        let told = told.map_err(|reason| DeviceError::Absent { asked: device, reason })?;
        self.driver.check("timing its work", told.result())?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.driver.bind();
        // SAFETY: made in `with`, given back once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

/// A stream beside that of the steps, for copies.
pub(super) struct SideStream {
    driver: Arc<Driver>,
    stream: sys::CUstream,
}

// SAFETY: as for `Event`.
unsafe impl Send for SideStream {}

impl SideStream {
    pub(super) fn new(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        driver.bind()?;
        let stream = result::stream::create(StreamKind::NonBlocking);
        Ok(Self { driver: driver.clone(), stream: driver.check("creating a stream", stream)? })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.stream
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        let _ = self.driver.bind();
        // SAFETY: made in `new`, given back once, when its work is over.
        let _ = unsafe {
            result::stream::synchronize(self.stream).and(result::stream::destroy(self.stream))
        };
    }
}
