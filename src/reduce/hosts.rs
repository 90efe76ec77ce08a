//! [`Hosts`]: carries out the schedule of an exchange over a [`Link`].

use std::ops::Range;

use bytes::Bytes;

use super::{Exchange, Link, ReduceError, Wire, direct, ring};
use crate::device::cpu::{Ctx, Isa, reduce::tree_sum};
use crate::device::{DeviceError, Slab};

/// The tag of the message that tells a rank's share; schedules count from zero.
const SHARE: u32 = u32::MAX;

/// Floats that are added at a time, so that they stay in the nearest cache.
const BLOCK: usize = 1024;

/// Which way gradients take between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    /// Everybody with everybody: [`direct`].
    #[default]
    Direct,
    /// Around a ring: [`ring`].
    Ring,
}

/// How an exchange is cut into messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    pub(super) topology: Topology,
    /// Floats of a message, at most.
    pub(super) segment: usize,
}

/// What a rank brings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// Its gradients.
    pub(super) gradients: f32,
    /// The sum of their losses.
    pub(super) losses: f32,
}

/// This rank among the others.
pub(super) struct Hosts {
    pub(super) link: Box<dyn Link>,
    wire: Wire,
    /// Everybody's mean.
    pub(super) mean: Slab,
    /// A message of each rank that waits for the others.
    kept: Vec<Bytes>,
    /// A block of each rank.
    blocks: Vec<[f32; BLOCK]>,
    /// Exchanges so far; tags never repeat.
    round: u32,
}

impl Hosts {
    /// For slabs of `len` floats.
    pub(super) fn new(link: Box<dyn Link>, wire: Wire, len: usize) -> Result<Self, DeviceError> {
        let size = link.size();
        Ok(Self {
            link,
            wire,
            mean: slab(len)?,
            kept: vec![Bytes::new(); size],
            blocks: vec![[0.0; BLOCK]; size],
            round: 0,
        })
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.link.rank();
        (0..self.link.size()).filter(move |&rank| rank != own)
    }

    /// Of a message of this round.
    fn tag(&self, tag: u32) -> u64 {
        u64::from(self.round) << 32 | u64::from(tag)
    }

    /// The shares of all ranks together.
    fn total(&mut self, own: Share) -> Result<Share, ReduceError> {
        let mut total = own;
        for from in self.peers() {
            let mut share = [0.0; 2];
            let tag = self.tag(SHARE);
            self.link.recv(from, tag, &mut share)?;
            total.gradients += share[0];
            total.losses += share[1];
        }
        Ok(total)
    }

    /// From this rank's sum of gradients to everybody's mean, in a range of the slab that `own` is the part of. Gives the
    /// shares of all ranks together.
    pub(super) fn exchange(
        &mut self,
        schedule: Schedule,
        range: &Range<usize>,
        own: &[f32],
        share: Share,
    ) -> Result<Share, ReduceError> {
        let (rank, size) = (self.link.rank(), self.link.size());
        let Schedule { topology, segment } = schedule;
        match topology {
            Topology::Direct => {
                self.follow(range.start, own, share, direct(rank, size, own.len(), segment))
            }
            Topology::Ring => {
                self.follow(range.start, own, share, ring(rank, size, own.len(), segment))
            }
        }
    }

    fn follow(
        &mut self,
        start: usize,
        own: &[f32],
        share: Share,
        todo: impl Iterator<Item = Exchange>,
    ) -> Result<Share, ReduceError> {
        let mut todo = todo.peekable();
        for to in self.peers() {
            let tag = self.tag(SHARE);
            self.link.send(to, tag, &[share.gradients, share.losses])?;
        }
        // What can go before anything is awaited, goes.
        while let Some(first) = todo.next_if(|e| matches!(e, Exchange::Send { .. })) {
            self.carry_out(first, start, own, 1.0)?;
        }
        let total = self.total(share)?;
        let scale = 1.0 / total.gradients.max(1.0);
        todo.try_for_each(|exchange| self.carry_out(exchange, start, own, scale))?;
        self.round = self.round.wrapping_add(1);
        Ok(total)
    }

    /// The mean of a range that lies so far behind `start`.
    fn mean(&mut self, start: usize, range: Range<usize>) -> &mut [f32] {
        &mut host(&mut self.mean)[start + range.start..start + range.end]
    }

    fn carry_out(
        &mut self,
        exchange: Exchange,
        start: usize,
        own: &[f32],
        scale: f32,
    ) -> Result<(), ReduceError> {
        let wire = self.wire;
        match exchange {
            Exchange::Send { to, tag, range, summed } => {
                let (tag, len) = (self.tag(tag), range.len() * wire.width());
                let floats = match summed {
                    true => &host(&mut self.mean)[start + range.start..start + range.end],
                    false => &own[range],
                };
                self.link.send_with(to, tag, len, &mut |message| wire.encode(floats, message))?;
            }
            Exchange::Keep { from, tag, range } => {
                self.kept[from] = self.message(from, tag, range.len())?;
            }
            Exchange::Sum { range } => self.sum(start, range, own, scale),
            Exchange::Add { from, tag, range } => {
                let message = self.message(from, tag, range.len())?;
                let sums = self.mean(start, range.clone());
                wire.decode(&message, sums);
                sums.iter_mut().zip(&own[range]).for_each(|(sum, own)| *sum += own);
            }
            Exchange::Divide { range } => {
                let mean = self.mean(start, range);
                mean.iter_mut().for_each(|x| *x *= scale);
                wire.round(mean);
            }
            Exchange::Receive { from, tag, range } => {
                let message = self.message(from, tag, range.len())?;
                wire.decode(&message, self.mean(start, range));
            }
        }
        Ok(())
    }

    /// The next message of a rank, which must hold so many floats.
    fn message(&mut self, from: usize, tag: u32, floats: usize) -> Result<Bytes, ReduceError> {
        let message = self.link.recv_bytes(from, self.tag(tag))?;
        self.wire.expect(from, &message, floats)?;
        Ok(message)
    }

    /// Adds what was kept and what is one's own as a tree by rank, and divides.
    fn sum(&mut self, start: usize, range: Range<usize>, own: &[f32], scale: f32) {
        let ctx = Ctx { isa: Isa::detect(), threads: 1 };
        let (rank, wire) = (self.link.rank(), self.wire);
        let mean = &mut host(&mut self.mean)[start + range.start..start + range.end];
        for (i, (mean, own)) in mean.chunks_mut(BLOCK).zip(own[range].chunks(BLOCK)).enumerate() {
            let bytes = i * BLOCK * wire.width()..(i * BLOCK + own.len()) * wire.width();
            let kept = |from: usize| &self.kept[from][bytes.clone()];
            for (from, block) in self.blocks.iter_mut().enumerate().filter(|(r, _)| *r != rank) {
                if wire.floats(kept(from)).is_none() {
                    wire.decode(kept(from), &mut block[..own.len()]);
                }
            }
            let block = |r: usize| match r == rank {
                true => own,
                false => wire.floats(kept(r)).unwrap_or(&self.blocks[r][..own.len()]),
            };
            tree_sum(ctx, self.blocks.len(), block, scale, mean);
            wire.round(mean);
        }
    }
}

/// Zeros in the host's memory.
pub(super) fn slab(len: usize) -> Result<Slab, DeviceError> {
    let (device, bytes) = ("the host".to_owned(), len * size_of::<f32>());
    Slab::host(len).ok_or(DeviceError::OutOfMemory { device, bytes })
}

/// The floats of a slab that [`slab`] made.
fn host(slab: &mut Slab) -> &mut [f32] {
    slab.as_host_mut().expect("it was made in the host's memory")
}
