//! [`Hosts`]: carries out the schedule of an exchange over a [`Link`].

use std::collections::VecDeque;
use std::iter::Peekable;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::{Exchange, Link, ReduceError, Wire};
use crate::device::cpu::{Ctx, Isa, reduce::tree_sum};
use crate::device::{DeviceError, Slab};

/// The tag of the message that tells how many gradients a rank has; schedules count from zero.
const COUNT: u32 = u32::MAX;

/// Floats that are added at a time, so that they stay in the nearest cache.
const BLOCK: usize = 1024;

/// Messages that are remembered, for their memory.
const REMEMBERED: usize = 8;

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
    /// Messages that were sent: their memory is used again when the link has let go of it.
    sent: VecDeque<Bytes>,
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
            sent: VecDeque::with_capacity(REMEMBERED),
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

    /// One over the number of gradients of all ranks.
    fn scale(&mut self, own: usize) -> Result<f32, ReduceError> {
        let mut total = own as f32;
        for from in self.peers() {
            let mut count = [0.0];
            let tag = self.tag(COUNT);
            self.link.recv(from, tag, &mut count)?;
            total += count[0];
        }
        Ok(1.0 / total.max(1.0))
    }

    /// From this rank's sum of `count` gradients to everybody's mean.
    pub(super) fn exchange(
        &mut self,
        own: &[f32],
        count: usize,
        mut todo: Peekable<impl Iterator<Item = Exchange>>,
    ) -> Result<(), ReduceError> {
        for to in self.peers() {
            let tag = self.tag(COUNT);
            self.link.send(to, tag, &[count as f32])?;
        }
        // What can go before anything is awaited, goes.
        while let Some(first) = todo.next_if(|e| matches!(e, Exchange::Send { .. })) {
            self.carry_out(first, own, 1.0)?;
        }
        let scale = self.scale(count)?;
        todo.try_for_each(|exchange| self.carry_out(exchange, own, scale))?;
        self.round = self.round.wrapping_add(1);
        Ok(())
    }

    fn carry_out(
        &mut self,
        exchange: Exchange,
        own: &[f32],
        scale: f32,
    ) -> Result<(), ReduceError> {
        let wire = self.wire;
        match exchange {
            Exchange::Send { to, tag, range, summed } => {
                let mut message = self.memory(range.len() * wire.width());
                let floats = if summed { &host(&mut self.mean)[range] } else { &own[range] };
                wire.encode(floats, &mut message);
                let message = message.freeze();
                self.remember(message.clone());
                self.link.send_bytes(to, self.tag(tag), message)?;
            }
            Exchange::Keep { from, tag, range } => {
                self.kept[from] = self.message(from, tag, range.len())?;
            }
            Exchange::Sum { range } => self.sum(range, own, scale),
            Exchange::Add { from, tag, range } => {
                let message = self.message(from, tag, range.len())?;
                let sums = &mut host(&mut self.mean)[range.clone()];
                wire.decode(&message, sums);
                sums.iter_mut().zip(&own[range]).for_each(|(sum, own)| *sum += own);
            }
            Exchange::Divide { range } => {
                let mean = &mut host(&mut self.mean)[range];
                mean.iter_mut().for_each(|x| *x *= scale);
                wire.round(mean);
            }
            Exchange::Receive { from, tag, range } => {
                let message = self.message(from, tag, range.len())?;
                wire.decode(&message, &mut host(&mut self.mean)[range]);
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
    fn sum(&mut self, range: Range<usize>, own: &[f32], scale: f32) {
        let ctx = Ctx { isa: Isa::detect(), threads: 1 };
        let (rank, width) = (self.link.rank(), self.wire.width());
        let mean = &mut host(&mut self.mean)[range.clone()];
        for (i, (mean, own)) in mean.chunks_mut(BLOCK).zip(own[range].chunks(BLOCK)).enumerate() {
            let bytes = i * BLOCK * width..(i * BLOCK + own.len()) * width;
            for (from, block) in self.blocks.iter_mut().enumerate().filter(|(r, _)| *r != rank) {
                self.wire.decode(&self.kept[from][bytes.clone()], &mut block[..own.len()]);
            }
            let block = |r: usize| if r == rank { own } else { &self.blocks[r][..own.len()] };
            tree_sum(ctx, self.blocks.len(), block, scale, mean);
            self.wire.round(mean);
        }
    }

    /// Memory for a message, if possible that of one which has left.
    fn memory(&mut self, bytes: usize) -> BytesMut {
        let mut memory = match self.sent.pop_front().map(Bytes::try_into_mut) {
            Some(Ok(left)) => left,
            Some(Err(on_its_way)) => {
                self.sent.push_front(on_its_way);
                BytesMut::new()
            }
            None => BytesMut::new(),
        };
        memory.clear();
        memory.reserve(bytes);
        memory
    }

    fn remember(&mut self, message: Bytes) {
        if self.sent.len() < REMEMBERED {
            self.sent.push_back(message);
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
