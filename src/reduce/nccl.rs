//! [`NcclMean`]: the mean over GPUs, which never leaves them.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::{GradientReducer, Link, Nobody, ReduceError, Sink};
use crate::device::cuda::{self, CommGroup, Summand, UniqueId};
use crate::device::{Device, DeviceError, Slab};

/// The mean over the gradients of all GPUs, of this process or of several, by NCCL. Each tower's GPU has its own copy of it.
///
/// A GPU first adds up its own micro-batches, then NCCL sums over the GPUs, then each multiplies by one over the number of
/// gradients. The bits are the same on all GPUs. In which order NCCL adds is up to NCCL: it depends on the number of GPUs, on
/// how they are connected and on NCCL's version, and stays the same while these do. So the mean is not that of
/// [`super::CpuMean`] to the last bit.
///
/// Where each GPU has one gradient, ranges of it are summed as soon as they are final on all of them, while the rest is still being
/// computed. All processes sum the same ranges in the same order.
pub struct NcclMean {
    sums_early: Mutex<Early>,
    /// A tower's each.
    devices: Vec<Arc<dyn Device>>,
    /// The sums of towers that have several micro-batches each.
    sums: Vec<Slab>,
    /// A copy of the mean, for who needs it in the host's memory.
    host: Option<Slab>,
    /// One over the gradients of all processes, or 1 where the sum is wanted.
    scale: f32,
    /// With other processes, for each GPU two floats of its own and their sums over all: losses, and of how many gradients.
    tallies: Vec<(Slab, Slab)>,
}

/// The communicator, and how far a step's early sums are.
struct Early {
    group: CommGroup,
    /// Says whether the other processes are there.
    link: Option<Box<dyn Link>>,
    /// Ranges that are told of in this step, in the order of the first GPU that tells of each.
    ranges: Vec<Range<usize>>,
    /// How many of them each GPU has told of.
    told: Vec<usize>,
    /// How many are being summed.
    begun: usize,
    failed: Option<ReduceError>,
}

impl Early {
    /// A GPU has been given all the work that makes a range.
    fn ready(&mut self, rank: usize, range: Range<usize>) -> Result<(), ReduceError> {
        let n = self.told[rank];
        match self.ranges.get(n) {
            None => self.ranges.push(range),
            Some(known) if *known == range => {}
            Some(known) => {
                let reason = format!("{range:?} is ready where {known:?} is due");
                let device = "a GPU's gradients".to_owned();
                return Err(DeviceError::Mismatch { device, reason }.into());
            }
        }
        self.group.mark(rank, n)?;
        self.told[rank] += 1;
        let all = self.told.iter().copied().min().unwrap_or(0);
        let Self { group, link, ranges, begun, .. } = self;
        while *begun < all {
            let mut watch = || link.as_mut().map_or(Ok(()), |link| link.glance());
            group.begin_sum(*begun, &ranges[*begun], &mut watch)?;
            *begun += 1;
        }
        Ok(())
    }
}

/// Who takes part beside the GPUs of this process.
pub struct Fellows {
    /// Watches the other processes.
    pub link: Box<dyn Link>,
    /// What all ranks share, made by one process.
    pub id: UniqueId,
    /// The number of this process's first GPU among all.
    pub first: usize,
    /// GPUs of all processes.
    pub size: usize,
    /// Gradients of all processes.
    pub gradients: usize,
}

impl NcclMean {
    /// For the gradients `grads`, as many for each of `devices`, and each on its device.
    ///
    /// # Errors
    /// [`ReduceError::Device`] where NCCL fails, and what the link of `fellows` says.
    pub fn new(
        devices: Vec<Arc<dyn Device>>,
        grads: &[Slab],
        fellows: Option<Fellows>,
    ) -> Result<Self, ReduceError> {
        let (len, own) = (grads.first().map_or(0, Slab::len), devices.len());
        let (mut sums, mut tallies) = (Vec::new(), Vec::new());
        if grads.len() > own {
            for device in &devices {
                sums.push(device.alloc(len)?);
            }
        }
        let places = if sums.is_empty() { grads } else { &sums };
        let (group, link, gradients): (_, Option<Box<dyn Link>>, _) = match fellows {
            None => {
                let id = cuda::unique_id()?;
                let group = CommGroup::join::<ReduceError>(places, id, 0, own, &mut || Ok(()))?;
                (group, None, grads.len())
            }
            Some(Fellows { mut link, id, first, size, gradients }) => {
                for device in &devices {
                    tallies.push((device.alloc(2)?, device.alloc(2)?));
                }
                let group = CommGroup::join(places, id, first, size, &mut || link.glance())?;
                (group, Some(link), gradients)
            }
        };
        let scale = 1.0 / gradients as f32;
        let (ranges, told) = (Vec::new(), vec![0; devices.len()]);
        let early = Early { group, link, ranges, told, begun: 0, failed: None };
        Ok(Self { sums_early: Mutex::new(early), devices, sums, host: None, scale, tallies })
    }

    /// With a copy of the mean in the memory of `host`, which is then the result.
    pub fn on_host(self, host: &dyn Device, len: usize) -> Result<Self, DeviceError> {
        Ok(Self { host: Some(host.alloc(len)?), ..self })
    }

    /// The sum in place of the mean: the first stage of a [`super::CollectiveMean`], which divides once, at the end.
    pub fn undivided(self) -> Self {
        Self { scale: 1.0, ..self }
    }
}

impl Sink for NcclMean {
    fn is_early(&self) -> bool {
        true
    }

    fn ready(&self, index: usize, range: Range<usize>, values: &[f32]) {
        let mut early = self.sums_early.lock().unwrap_or_else(PoisonError::into_inner);
        if values.is_empty() && early.failed.is_none() && index < early.told.len() {
            early.failed = early.ready(index, range).err();
        }
    }
}

impl GradientReducer for NcclMean {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn begin(&mut self) -> &dyn Sink {
        // Micro-batches are added up first.
        match self.sums.is_empty() {
            true => self,
            false => &Nobody,
        }
    }

    fn reduce(
        &mut self,
        grads: &mut [Slab],
        mut loss: Option<&mut f64>,
    ) -> Result<(), ReduceError> {
        let Self { sums_early, devices, sums, host, scale, tallies } = self;
        let early = sums_early.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = early.failed.take() {
            return Err(error);
        }
        let is_under_way = early.begun > 0;
        if early.begun < early.ranges.len() {
            let reason = "a GPU has told of fewer gradients than others".to_owned();
            let device = "NCCL".to_owned();
            return Err(DeviceError::Mismatch { device, reason }.into());
        }
        early.ranges.clear();
        early.told.fill(0);
        early.begun = 0;
        let Early { group, link, .. } = early;
        let alone = link.is_none();
        let each = (grads.len() / devices.len()).max(1);
        if each > 1 {
            for (device, own) in devices.iter().zip(grads.chunks_mut(each)) {
                device.sum(own, 1.0)?;
            }
        }
        if let (Some((own, _)), Some(loss)) = (tallies.first_mut(), &loss) {
            let count = (each * devices.len()) as f32;
            own.write(0..2, &[**loss as f32 * count, count])?;
        }
        let mut into = sums.iter_mut();
        let own = grads.chunks_mut(each).map(|own| &mut own[0]).enumerate();
        let own = own.filter(|_| !is_under_way);
        let own = own.map(|(rank, own)| match into.next() {
            Some(sum) => Summand { rank, slab: sum, from: Some(own) },
            None => Summand { rank, slab: own, from: None },
        });
        let tallied = tallies.iter_mut().enumerate();
        let tallied =
            tallied.map(|(rank, (own, all))| Summand { rank, slab: all, from: Some(own) });
        let mut watch = || link.as_mut().map_or(Ok(()), |link| link.glance());
        group.begin(own.chain(tallied), &mut watch)?;
        if loss.is_none() && alone && host.is_none() {
            group.hold_streams()?;
        } else {
            group.finish(&mut watch)?;
        }
        if let (Some((_, all)), Some(loss)) = (tallies.first(), &mut loss) {
            let mut total = [0.0; 2];
            all.read(0..2, &mut total)?;
            **loss = f64::from(total[0] / total[1].max(1.0));
        }
        let means = if sums.is_empty() { grads } else { &mut sums[..] };
        // One that is copied to the host is enough.
        let needed = if host.is_some() { 1 } else { means.len() };
        if *scale != 1.0 {
            for (device, mean) in devices.iter().zip(means.iter_mut().take(needed)) {
                device.sum(std::slice::from_mut(mean), *scale)?;
            }
        }
        if let (Some(host), Some(mean)) = (host, means.first()) {
            host.copy_from(mean)?;
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<(), ReduceError> {
        let early = self.sums_early.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Early { group, link, .. } = early;
        group.finish(&mut || link.as_mut().map_or(Ok(()), |link| link.glance()))
    }

    fn mean<'a>(&'a self, grads: &'a [Slab]) -> &'a [Slab] {
        match &self.host {
            Some(host) => std::slice::from_ref(host),
            None if self.sums.is_empty() => grads,
            None => &self.sums,
        }
    }
}
