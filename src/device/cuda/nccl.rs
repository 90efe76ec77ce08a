//! [`CommGroup`]: the GPUs of this process as ranks of an NCCL communicator, alone or with those of other processes.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t};

use super::driver::{Driver, Memory, Ptr};
use super::events::{Event, SideStream};
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
    /// Whether sums have begun whose end nobody has seen.
    summing: bool,
}

struct Rank {
    comm: ncclComm_t,
    driver: Arc<Driver>,
    /// What is summed while it is being computed.
    memory: Arc<Memory>,
    /// Where it sums, beside the steps' stream.
    side: SideStream,
    /// Where in the steps' stream the operands of a sum are there: of each of those that are summed early, and of others.
    marks: Vec<Event>,
    /// Recorded after a sum.
    done: Event,
}

// SAFETY: communicators are used by one thread at a time, through `&mut self`, with their context bound.
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

/// As NCCL takes it.
struct Part {
    rank: usize,
    from: Ptr,
    to: Ptr,
    len: usize,
}

/// What is being done, for errors.
const SUMMING: &str = "summing gradients by NCCL";

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
        let mut group = Self { nccl, ranks: Vec::new(), size, aborted: false, summing: false };
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
                let memory = on_gpu(slab)?.clone();
                let driver = memory.driver().clone();
                let (side, done) = (SideStream::new(&driver)?, Event::new(&driver)?);
                let marks = vec![Event::new(&driver)?];
                let mut comm = std::ptr::null_mut();
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
                self.ranks.push(Rank { comm, driver, memory, side, marks, done });
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

    /// Begins to sum slabs of equal length over all ranks, behind what their streams have been given so far. Every rank of this process
    /// must have a part in each of the sums; all processes do the same sums in the same order.
    ///
    /// # Errors
    /// [`DeviceError::Gpu`] for what NCCL says, and what `watch` says.
    pub fn begin<'a, E: From<DeviceError>>(
        &mut self,
        summands: impl Iterator<Item = Summand<'a>>,
        watch: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let summands: Result<Vec<Part>, DeviceError> = summands
            .map(|Summand { rank, slab, from }| {
                let (to, len) = (on_gpu(slab)?, slab.len());
                let from = from.map_or(Ok(to), on_gpu)?;
                let own = &self.ranks[rank].driver;
                if !to.is_on(own) || !from.is_on(own) || from.len() != len {
                    let reason = "a slab is not this rank's, or of another length".to_owned();
                    let device = own.name().to_owned();
                    return Err(DeviceError::Mismatch { device, reason });
                }
                Ok(Part { rank, from: from.start(), to: to.start(), len })
            })
            .collect();
        let marked = (0..self.ranks.len()).try_for_each(|rank| self.mark(rank, 0));
        let enqueued = marked.and(summands).and_then(|parts| self.enqueue(0, &parts));
        self.summing = true;
        self.settle(enqueued, watch)
    }

    /// Marks where the stream of a rank stands now, as number `n` of its marks.
    ///
    /// # Errors
    /// [`DeviceError::Gpu`] for what the driver says.
    pub fn mark(&mut self, rank: usize, n: usize) -> Result<(), DeviceError> {
        let Rank { driver, marks, .. } = &mut self.ranks[rank];
        while marks.len() <= n {
            marks.push(Event::new(driver)?);
        }
        driver.bind()?;
        marks[n].record(driver.stream())
    }

    /// Begins to sum a range of the slabs that the group was made for, in place, each behind number `n` of its rank's marks, while
    /// the steps' streams go on.
    ///
    /// # Errors
    /// As [`CommGroup::begin`].
    pub fn begin_sum<E: From<DeviceError>>(
        &mut self,
        n: usize,
        range: &Range<usize>,
        watch: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let part = |(rank, own): (usize, &Rank)| {
            if range.start > range.end || range.end > own.memory.len() {
                let device = own.driver.name().to_owned();
                let reason = format!("floats {range:?} of a slab that has {}", own.memory.len());
                return Err(DeviceError::Mismatch { device, reason });
            }
            let at = own.memory.start().at(range.start);
            Ok(Part { rank, from: at, to: at, len: range.len() })
        };
        let parts: Result<Vec<Part>, _> = self.ranks.iter().enumerate().map(part).collect();
        let enqueued = parts.and_then(|parts| self.enqueue(n, &parts));
        self.summing = true;
        self.settle(enqueued, watch)
    }

    /// Lets the ranks' streams wait for all sums that have begun. Whoever then waits for one of these streams calls
    /// [`CommGroup::finish`] before, which waits less blindly.
    ///
    /// # Errors
    /// [`DeviceError::Gpu`] for what the driver says.
    pub fn hold_streams(&self) -> Result<(), DeviceError> {
        self.record()?;
        self.ranks.iter().try_for_each(|rank| {
            rank.driver.bind()?;
            rank.done.hold(rank.driver.stream())
        })
    }

    /// Waits for the end of all sums that have begun.
    ///
    /// # Errors
    /// As [`CommGroup::begin`].
    pub fn finish<E: From<DeviceError>>(
        &mut self,
        watch: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        if !self.summing {
            return Ok(());
        }
        if let Err(error) = self.record() {
            self.abort();
            return Err(error.into());
        }
        self.wait(SUMMING, Self::is_done, watch)?;
        self.summing = false;
        Ok(())
    }

    /// Waits until NCCL has taken what was enqueued.
    fn settle<E: From<DeviceError>>(
        &mut self,
        enqueued: Result<(), DeviceError>,
        watch: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        if let Err(error) = enqueued {
            self.abort();
            return Err(error.into());
        }
        self.wait(SUMMING, Self::is_settled, watch)
    }

    /// Enqueues sums, each behind number `n` of its rank's marks.
    fn enqueue(&self, n: usize, parts: &[Part]) -> Result<(), DeviceError> {
        if self.aborted {
            return Err(absent("NCCL", "the communicator has failed before".to_owned()));
        }
        for own in &self.ranks {
            own.driver.bind()?;
            own.marks[n].hold(own.side.raw())?;
        }
        // SAFETY: as in `enter`.
        self.nccl.check(SUMMING, unsafe { (self.nccl.group_start)() })?;
        let mut enqueued = Ok(());
        for &Part { rank, from, to, len } in parts {
            enqueued = enqueued.and_then(|()| {
                let own = &self.ranks[rank];
                own.driver.bind()?;
                // SAFETY: both are alive, on the communicator's GPU and as long as that: the caller has checked it, and waits for the
                // sum before it lets go of them.
                let code = unsafe {
                    (self.nccl.all_reduce)(
                        from.raw(),
                        to.raw(),
                        len,
                        ncclDataType_t::ncclFloat32,
                        ncclRedOp_t::ncclSum,
                        own.comm,
                        own.side.raw().cast(),
                    )
                };
                self.check(rank, SUMMING, code)
            });
        }
        // SAFETY: as in `enter`; a group has to end, also after a failure.
        let code = unsafe { (self.nccl.group_end)() };
        enqueued?;
        self.nccl.check(SUMMING, code)
    }

    fn record(&self) -> Result<(), DeviceError> {
        self.ranks.iter().try_for_each(|rank| {
            rank.driver.bind()?;
            rank.done.record(rank.side.raw())
        })
    }

    /// Whether all streams have come to the event.
    fn is_done(&self) -> Result<bool, DeviceError> {
        for rank in &self.ranks {
            rank.driver.bind()?;
            if !rank.done.is_reached(SUMMING)? {
                return Ok(false);
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
        // A sum that nobody waited for may never end: another rank's GPU may have failed.
        if !self.aborted && !self.summing && alive(&self.ranks) {
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
    }
}

fn absent(asked: &str, reason: String) -> DeviceError {
    DeviceError::Absent { asked: asked.to_owned(), reason }
}

fn on_gpu(slab: &Slab) -> Result<&Arc<Memory>, DeviceError> {
    slab.as_cuda().ok_or_else(|| DeviceError::Mismatch {
        device: "NCCL".to_owned(),
        reason: "a slab is in the host's memory".to_owned(),
    })
}
