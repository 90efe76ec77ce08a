//! [`CommGroup`]: the GPUs of this process as ranks of an NCCL communicator, alone or with those of other processes.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{self, CUresult};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t};

use super::driver::{Driver, Memory, failure};
use super::libnccl::{IN_PROGRESS, Nccl, SUCCESS, UniqueId, does_not_block, nccl};
use crate::device::{DeviceError, Slab};

/// Looks at the GPU so often without sleeping: a sum between cards of one machine takes microseconds.
const SPINS: u64 = 2000;
/// Sleep between looks after that.
const NAP: Duration = Duration::from_micros(100);
/// Naps between looks at whether NCCL or another process failed: some 50 ms.
const GLANCE: u64 = 500;
/// Naps for what is nearly done when another process says good-bye: some half a second.
const LAST_NAPS: u64 = 5_000;
/// Naps for saying good-bye: some 2 s.
const FINAL_NAPS: u64 = 20_000;
/// Naps for the word of why a remote rank is gone: some 3 s.
const REASON_NAPS: u64 = 30_000;
/// Naps for ranks that are all of this process, which started together: some 60 s.
const STUCK_NAPS: u64 = 600_000;

/// A communicator's ranks on the GPUs of this process.
///
/// Nothing here waits blindly: a rank whose fellow died waits in its stream for ever, and so would who synchronises with it.
/// After an error the communicator is aborted, which frees the streams, and cannot be used any more.
pub struct CommGroup {
    nccl: &'static Nccl,
    ranks: Vec<Rank>,
    /// Ranks of all processes.
    size: usize,
    aborted: bool,
}

struct Rank {
    comm: ncclComm_t,
    driver: Arc<Driver>,
    /// Recorded after a sum.
    done: sys::CUevent,
}

// SAFETY: communicators and events are used by one thread at a time, through `&mut self`, with their context bound.
unsafe impl Send for CommGroup {}

/// One rank's part in a sum over all ranks.
pub struct Summand<'a> {
    /// Its number among those of this process.
    pub rank: usize,
    /// Becomes the sum.
    pub slab: &'a mut Slab,
    /// What is summed where that is not the slab itself.
    pub from: Option<&'a Slab>,
}

/// The card a slab lies on, the same name in all processes of a machine and another on all other cards; `None` on the host.
pub fn card_id(slab: &Slab) -> Option<String> {
    slab.as_cuda().and_then(|memory| memory.driver().card_id())
}

impl CommGroup {
    /// The GPUs of `slabs` as ranks `first` and following of `size`. All processes must call it with the same `id`. `watch` ends
    /// the waiting for other processes.
    ///
    /// # Errors
    /// [`DeviceError::Absent`] without NCCL, [`DeviceError::Gpu`] for what NCCL says, and what `watch` says.
    pub fn join<E: From<DeviceError>>(
        slabs: &[Slab],
        id: UniqueId,
        first: usize,
        size: usize,
        watch: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<Self, E> {
        let nccl = nccl().map_err(|reason| absent("NCCL", reason))?;
        let mut group = Self { nccl, ranks: Vec::new(), size, aborted: false };
        group.enter(slabs, id, first)?;
        group.wait("connecting the GPUs", Self::is_settled, watch)?;
        Ok(group)
    }

    fn enter(&mut self, slabs: &[Slab], id: UniqueId, first: usize) -> Result<(), DeviceError> {
        let mut config = does_not_block();
        // SAFETY: groups are counted per thread; each start is followed by an end.
        self.nccl.check("connecting the GPUs", unsafe { (self.nccl.group_start)() })?;
        let mut entered = Ok(());
        for (i, slab) in slabs.iter().enumerate() {
            entered = entered.and_then(|()| {
                let driver = on_gpu(slab)?.driver().clone();
                driver.bind()?;
                let (mut comm, mut done) = (std::ptr::null_mut(), std::ptr::null_mut());
                // SAFETY: the context is bound; the event is given back in `drop`.
                let made = unsafe { sys::cuEventCreate(&mut done, 2) }.result();
                driver.check("creating an event", made)?;
                // SAFETY: as nccl.h says; the communicator is given back in `drop` or `abort`.
                let code = unsafe {
                    (self.nccl.init_rank)(
                        &mut comm,
                        self.size as i32,
                        id.raw(),
                        (first + i) as i32,
                        &mut config,
                    )
                };
                self.ranks.push(Rank { comm, driver, done });
                self.check(i, "connecting it by NCCL", code)
            });
        }
        // SAFETY: as above.
        let code = unsafe { (self.nccl.group_end)() };
        entered?;
        self.nccl.check("connecting the GPUs", code)
    }

    fn check(&self, rank: usize, what: &str, code: i32) -> Result<(), DeviceError> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.nccl.failure(self.ranks[rank].driver.name(), what, code)),
        }
    }

    /// Ranks of all processes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Sums slabs of equal length over all ranks, on the ranks' own streams, and waits for the end: here all sums are there. Every
    /// rank of this process must have a part in each of the sums; all processes do the same sums in the same order.
    ///
    /// # Errors
    /// [`DeviceError::Gpu`] for what NCCL says, and what `watch` says.
    pub fn all_reduce<'a, E: From<DeviceError>>(
        &mut self,
        summands: impl Iterator<Item = Summand<'a>>,
        watch: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let what = "summing gradients by NCCL";
        if let Err(error) = self.enqueue(summands, what) {
            self.abort();
            return Err(error.into());
        }
        self.wait(what, Self::is_settled, watch)?;
        if let Err(error) = self.record() {
            self.abort();
            return Err(error.into());
        }
        self.wait(what, Self::is_done, watch)
    }

    fn enqueue<'a>(
        &self,
        summands: impl Iterator<Item = Summand<'a>>,
        what: &str,
    ) -> Result<(), DeviceError> {
        if self.aborted {
            return Err(absent("NCCL", "the communicator has failed before".to_owned()));
        }
        // SAFETY: as in `enter`.
        self.nccl.check(what, unsafe { (self.nccl.group_start)() })?;
        let mut enqueued = Ok(());
        for Summand { rank, slab, from } in summands {
            enqueued = enqueued.and_then(|()| {
                let (to, len) = (on_gpu(slab)?, slab.len());
                let from = from.map_or(Ok(to), on_gpu)?;
                let own = &self.ranks[rank];
                if !to.is_on(&own.driver) || !from.is_on(&own.driver) || from.len() != len {
                    let reason = "a slab is not this rank's, or of another length".to_owned();
                    return Err(DeviceError::Mismatch {
                        device: own.driver.name().to_owned(),
                        reason,
                    });
                }
                own.driver.bind()?;
                // SAFETY: both are alive, on the communicator's GPU and as long as that; who uses them later does so in the order of
                // the stream.
                let code = unsafe {
                    (self.nccl.all_reduce)(
                        from.start().raw(),
                        to.start().raw(),
                        len,
                        ncclDataType_t::ncclFloat32,
                        ncclRedOp_t::ncclSum,
                        own.comm,
                        own.driver.stream().cast(),
                    )
                };
                self.check(rank, what, code)
            });
        }
        // SAFETY: as in `enter`; a group has to end, also after a failure.
        let code = unsafe { (self.nccl.group_end)() };
        enqueued?;
        self.nccl.check(what, code)
    }

    fn record(&self) -> Result<(), DeviceError> {
        self.ranks.iter().try_for_each(|rank| {
            rank.driver.bind()?;
            // SAFETY: event and stream are alive and of one context.
            let recorded = unsafe { sys::cuEventRecord(rank.done, rank.driver.stream()) };
            rank.driver.check("recording an event", recorded.result())
        })
    }

    /// Whether all streams have come to the event.
    fn is_done(&self) -> Result<bool, DeviceError> {
        for rank in &self.ranks {
            rank.driver.bind()?;
            // SAFETY: the event is alive.
            match unsafe { sys::cuEventQuery(rank.done) } {
                CUresult::CUDA_SUCCESS => {}
                CUresult::CUDA_ERROR_NOT_READY => return Ok(false),
                other => {
                    let error = other.result().err();
                    let error =
                        error.map(|e| failure(rank.driver.name(), "summing gradients by NCCL", e));
                    return error.map_or(Ok(true), Err);
                }
            }
        }
        Ok(true)
    }

    /// Whether NCCL has done what it was told, as far as streams are not concerned.
    fn is_settled(&self) -> Result<bool, DeviceError> {
        for rank in 0..self.ranks.len() {
            match self.state(rank) {
                SUCCESS => {}
                IN_PROGRESS => return Ok(false),
                code => self.check(rank, "working with NCCL", code)?,
            }
        }
        Ok(true)
    }

    fn state(&self, rank: usize) -> i32 {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive; writes one number.
        let code = unsafe { (self.nccl.async_error)(self.ranks[rank].comm, &mut state) };
        if code == SUCCESS { state } else { code }
    }

    /// Waits until `is_done`; after an error the communicator is aborted.
    fn wait<E: From<DeviceError>>(
        &mut self,
        what: &str,
        is_done: impl Fn(&Self) -> Result<bool, DeviceError>,
        watch: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let waited = self.poll(what, is_done, watch);
        if waited.is_err() {
            self.abort();
        }
        waited
    }

    fn poll<E: From<DeviceError>>(
        &self,
        what: &str,
        is_done: impl Fn(&Self) -> Result<bool, DeviceError>,
        watch: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let alone = self.size == self.ranks.len();
        let mut failed = None;
        for round in 0.. {
            let naps = match failed {
                None => match is_done(self) {
                    Ok(true) => return Ok(()),
                    Ok(false) => round.max(SPINS) - SPINS,
                    Err(error) if alone => return Err(error.into()),
                    Err(error) => {
                        failed = Some((error, round));
                        continue;
                    }
                },
                // Another process is the cause, and says why in a moment.
                Some((error, since)) if round - since > REASON_NAPS => return Err(error.into()),
                Some((_, since)) => round - since,
            };
            if round < SPINS {
                std::thread::yield_now();
                continue;
            }
            std::thread::sleep(NAP);
            if naps % GLANCE != 0 {
                continue;
            }
            if let Err(error) = watch() {
                // Who has done its last step leaves, which may be before this rank has heard of the end of the sum.
                let is_late = failed.is_none()
                    && (0..LAST_NAPS).any(|_| {
                        std::thread::sleep(NAP);
                        is_done(self).unwrap_or(false)
                    });
                return if is_late { Ok(()) } else { Err(error) };
            }
            let code = (0..self.ranks.len()).map(|rank| (rank, self.state(rank)));
            let wrong = code.into_iter().find(|(_, code)| ![SUCCESS, IN_PROGRESS].contains(code));
            if let (None, Some((rank, code))) = (&failed, wrong) {
                let error = self.nccl.failure(self.ranks[rank].driver.name(), what, code);
                if alone {
                    return Err(error.into());
                }
                failed = Some((error, round));
            }
            if alone && naps > STUCK_NAPS {
                let device = self.ranks[0].driver.name().to_owned();
                let reason = "NCCL does not come to an end; NCCL_DEBUG=INFO tells more".to_owned();
                return Err(DeviceError::Gpu { device, what: what.to_owned(), reason }.into());
            }
        }
        Ok(())
    }

    /// Ends whatever the ranks are waiting for.
    fn abort(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| !rank.comm.is_null()) {
            let _ = rank.driver.bind();
            // SAFETY: given back here and nowhere else.
            unsafe { (self.nccl.abort)(rank.comm) };
            rank.comm = std::ptr::null_mut();
        }
        self.aborted = true;
    }
}

impl Drop for CommGroup {
    fn drop(&mut self) {
        let alive = |ranks: &[Rank]| ranks.iter().all(|rank| !rank.comm.is_null());
        if !self.aborted && alive(&self.ranks) {
            for rank in &self.ranks {
                let _ = rank.driver.bind();
                // SAFETY: the communicator is alive; what it says shows below.
                unsafe { (self.nccl.finalize)(rank.comm) };
            }
            let settled = (0..FINAL_NAPS).find_map(|_| match self.is_settled() {
                Ok(false) => {
                    std::thread::sleep(NAP);
                    None
                }
                settled => Some(settled.is_ok()),
            });
            for rank in self.ranks.iter_mut().filter(|_| settled == Some(true)) {
                let _ = rank.driver.bind();
                // SAFETY: given back once: `abort` leaves out what is null.
                unsafe { (self.nccl.destroy)(rank.comm) };
                rank.comm = std::ptr::null_mut();
            }
        }
        self.abort();
        for rank in &self.ranks {
            let _ = rank.driver.bind();
            // SAFETY: made in `enter`, given back once.
            let _ = unsafe { sys::cuEventDestroy_v2(rank.done) };
        }
    }
}

fn absent(asked: &str, reason: String) -> DeviceError {
    DeviceError::Absent { asked: asked.to_owned(), reason }
}

fn on_gpu(slab: &Slab) -> Result<&Memory, DeviceError> {
    slab.as_cuda().ok_or_else(|| DeviceError::Mismatch {
        device: "NCCL".to_owned(),
        reason: "a slab is in the host's memory".to_owned(),
    })
}
