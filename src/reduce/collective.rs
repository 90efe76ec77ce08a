//! [`CollectiveMean`]: equal workers, no parameter server. First the towers of a host, then the hosts.

use std::ops::Range;
use std::sync::Arc;

use super::early::Early;
use super::hosts::{Hosts, Schedule, Share, Topology, slab};
use super::{GradientReducer, Link, Nobody, ReduceError, Sink, Wire};
use crate::device::cpu::{Ctx, Isa, reduce::tree_sum};
use crate::device::{DeviceError, Slab};
use crate::util::trace::Trace;

/// The mean over the gradients of all ranks, each tower and micro-batch of the same weight.
///
/// Each host *sums* its own; the only division is by the number of gradients of all ranks together, at the end. So with
/// direct exchange, where every rank has the same power of two of gradients, the bits are those of one process with all of
/// them: each host's sum is a subtree of the one tree.
///
/// Floats travel by a [`Wire`]. Whatever it rounds, all ranks end with the same bits: who owns a range takes what the others get.
///
/// The slab is exchanged in *buckets*, one after the other, the same on all ranks. All but the last begin as soon as every tower
/// has told the [`Sink`] of them, while the rest of the gradients is still being computed. The last waits
/// for [`GradientReducer::reduce`], so that nobody gets the mean of a step that a rank has given up.
///
/// A rank without data takes part with no gradients. After an error the ranks differ: form a new collective.
pub struct CollectiveMean {
    local: Box<dyn GradientReducer>,
    /// The sum of a rank without gradients, once it was needed.
    zeros: Option<Slab>,
    /// The sum of the last bucket where the others went early.
    tail: Vec<f32>,
    /// In the order in which they are exchanged.
    buckets: Vec<Range<usize>>,
    schedule: Schedule,
    /// Away while buckets may be on their way.
    hosts: Option<Hosts>,
    early: Option<Early>,
}

/// How a collective exchanges gradients.
#[derive(Clone, Debug)]
pub struct Way {
    /// Between whom.
    pub topology: Topology,
    /// In which format.
    pub wire: Wire,
    /// Floats of a message, at most; usually [`super::SEGMENT`].
    pub segment: usize,
    /// The rows of the slab, ascending; what lies between them is never told of.
    pub rows: Vec<Range<usize>>,
    /// Floats of a bucket, at least.
    pub bucket: usize,
}

/// Cuts a slab of `len` floats at its rows into buckets of at least `least` floats, from its end: the backward pass is done
/// with the last rows first.
fn buckets(rows: &[Range<usize>], len: usize, least: usize) -> Vec<Range<usize>> {
    let mut buckets = Vec::new();
    let mut end = len;
    for start in rows.iter().rev().map(|row| row.start).filter(|&start| start > 0) {
        if end - start >= least {
            buckets.push(start..end);
            end = start;
        }
    }
    buckets.push(0..end);
    buckets
}

impl CollectiveMean {
    /// For `n` gradients of `len` floats on this rank, summed by `local`.
    pub fn new(
        local: Box<dyn GradientReducer>,
        link: Box<dyn Link>,
        way: Way,
        n: usize,
        len: usize,
    ) -> Result<Self, ReduceError> {
        let Way { topology, wire, segment, rows, bucket } = way;
        let buckets = buckets(&rows, len, bucket);
        let hosts = Hosts::new(link, wire, len)?;
        let schedule = Schedule { topology, segment };
        let early = match buckets.split_last() {
            Some((_, first)) if !first.is_empty() => Some(Early::new(first, &rows, n, schedule)?),
            _ => None,
        };
        let (zeros, tail) = (None, Vec::new());
        Ok(Self { local, zeros, tail, buckets, schedule, hosts: Some(hosts), early })
    }
}

/// The error of a reducer that goes on after one.
fn gone() -> ReduceError {
    let (device, reason) = ("the host".to_owned(), "the collective has failed before".to_owned());
    DeviceError::Mismatch { device, reason }.into()
}

/// The floats of a slab of so many.
fn on_host(slab: &Slab, len: usize) -> Result<&[f32], DeviceError> {
    slab.as_host().filter(|floats| floats.len() == len).ok_or_else(|| {
        let reason = format!("gradients of {} floats in place of {len}", slab.len());
        DeviceError::Mismatch { device: "the host".to_owned(), reason }
    })
}

impl GradientReducer for CollectiveMean {
    fn name(&self) -> &'static str {
        match self.schedule.topology {
            Topology::Direct => "collective",
            Topology::Ring => "ring",
        }
    }

    fn trace(&mut self, trace: Arc<Trace>) {
        if let Some(early) = &self.early {
            early.trace(trace);
        }
    }

    fn begin(&mut self) -> &dyn Sink {
        match (&self.early, self.hosts.take()) {
            (Some(early), Some(hosts)) => {
                early.begin(hosts);
                early
            }
            (_, hosts) => {
                self.hosts = hosts;
                &Nobody
            }
        }
    }

    fn reduce(
        &mut self,
        grads: &mut [Slab],
        mut loss: Option<&mut f64>,
    ) -> Result<(), ReduceError> {
        let (hosts, begin, early) = match (self.hosts.take(), &self.early) {
            (Some(hosts), _) => (hosts, 0, Ok(())),
            (None, Some(early)) => early.end()?,
            (None, None) => return Err(gone()),
        };
        // Also after an error: it says good-bye when it goes.
        let hosts = self.hosts.insert(hosts);
        early?;
        let len = self.buckets.first().map_or(0, |first| first.end);
        let whole = match (begin, &grads[..]) {
            (0, []) => Some(match &mut self.zeros {
                Some(zeros) => &*zeros,
                none => none.insert(slab(len)?),
            }),
            (0, _) => {
                self.local.reduce(grads, Some(&mut 0.0))?;
                Some(&self.local.mean(grads)[0])
            }
            _ => None,
        };
        let count = grads.len() as f32;
        let own_loss = loss.as_deref().copied().unwrap_or(0.0);
        let share = Share { gradients: count, losses: own_loss as f32 * count };
        for range in &self.buckets[begin..] {
            let own = match (whole, &grads[..]) {
                (Some(whole), _) => &on_host(whole, len)?[range.clone()],
                (None, [one]) => &on_host(one, len)?[range.clone()],
                (None, many) => {
                    for one in many {
                        on_host(one, len)?;
                    }
                    let piece = |i: usize| &many[i].as_host().unwrap_or_default()[range.clone()];
                    let ctx = Ctx { isa: Isa::detect(), threads: 1 };
                    self.tail.resize(range.len(), 0.0);
                    tree_sum(ctx, many.len(), piece, 1.0, &mut self.tail);
                    &self.tail[..]
                }
            };
            let total = hosts.exchange(self.schedule, range, own, share)?;
            if let Some(loss) = &mut loss {
                **loss = f64::from(total.losses / total.gradients.max(1.0));
            }
        }
        Ok(())
    }

    fn mean<'a>(&'a self, _grads: &'a [Slab]) -> &'a [Slab] {
        self.hosts.as_ref().map_or(&[], |hosts| std::slice::from_ref(&hosts.mean))
    }
}

#[cfg(test)]
#[path = "collective_tests.rs"]
mod tests;
