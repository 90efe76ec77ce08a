//! [`CollectiveMean`]: equal workers, no parameter server. First the towers of a host, then the hosts.

use std::iter::Peekable;

use super::{Exchange, GradientReducer, Link, ReduceError, direct, ring};
use crate::device::cpu::{Ctx, Isa, reduce::tree_sum};
use crate::device::{DeviceError, Slab};

/// The tag of the message that tells how many gradients a rank has; schedules count from zero.
const COUNT: u32 = u32::MAX;

/// Which way gradients take between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    /// Everybody with everybody: [`direct`].
    #[default]
    Direct,
    /// Around a ring: [`ring`].
    Ring,
}

/// The mean over the gradients of all ranks, each tower and micro-batch of the same weight.
///
/// The local reducer *sums* ([`super::CpuMean::undivided`]); the only division is by the number of gradients of all
/// ranks together, at the end. So with direct exchange, where every rank has the same power of two of gradients, the
/// bits are those of one process with all of them: each host's sum is a subtree of the one tree.
///
/// A rank without data takes part with no gradients. After an error the ranks differ: form a new collective.
pub struct CollectiveMean {
    local: Box<dyn GradientReducer>,
    link: Box<dyn Link>,
    topology: Topology,
    segment: usize,
    /// The host's sum, then everybody's mean.
    mean: Slab,
    /// One segment for each rank.
    rooms: Vec<Vec<f32>>,
    /// Exchanges so far; tags never repeat.
    round: u32,
}

impl CollectiveMean {
    /// For slabs of `len` floats that travel in segments of at most `segment` floats, usually [`super::SEGMENT`].
    pub fn new(
        local: Box<dyn GradientReducer>,
        link: Box<dyn Link>,
        topology: Topology,
        segment: usize,
        len: usize,
    ) -> Result<Self, ReduceError> {
        let bytes = len * size_of::<f32>();
        let device = "the host".to_owned();
        let mean = Slab::host(len).ok_or(DeviceError::OutOfMemory { device, bytes })?;
        let rooms = vec![vec![0.0; segment.clamp(1, len.max(1))]; link.size()];
        Ok(Self { local, link, topology, segment, mean, rooms, round: 0 })
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

    fn exchange(
        &mut self,
        count: usize,
        mut todo: Peekable<impl Iterator<Item = Exchange>>,
    ) -> Result<(), ReduceError> {
        for to in self.peers() {
            let tag = self.tag(COUNT);
            self.link.send(to, tag, &[count as f32])?;
        }
        // What can go before anything is awaited, goes.
        while let Some(first) = todo.next_if(|e| matches!(e, Exchange::Send { .. })) {
            self.carry_out(first, 1.0)?;
        }
        let scale = self.scale(count)?;
        todo.try_for_each(|exchange| self.carry_out(exchange, scale))
    }

    fn carry_out(&mut self, exchange: Exchange, scale: f32) -> Result<(), ReduceError> {
        let round = self.tag(0);
        let (rank, link) = (self.link.rank(), &mut self.link);
        let data = self.mean.as_host_mut().expect("it was made in the host's memory");
        match exchange {
            Exchange::Send { to, tag, range } => {
                link.send(to, round | u64::from(tag), &data[range])?;
            }
            Exchange::Keep { from, tag, range } => {
                let room = &mut self.rooms[from][..range.len()];
                link.recv(from, round | u64::from(tag), room)?;
            }
            Exchange::Sum { range } => {
                let own = &mut data[range];
                let len = own.len();
                self.rooms[rank][..len].copy_from_slice(own);
                let ctx = Ctx { isa: Isa::detect(), threads: 1 };
                tree_sum(ctx, self.rooms.len(), |rank| &self.rooms[rank][..len], scale, own);
            }
            Exchange::Add { from, tag, range } => {
                let room = &mut self.rooms[from][..range.len()];
                link.recv(from, round | u64::from(tag), room)?;
                data[range].iter_mut().zip(&*room).for_each(|(own, other)| *own += other);
            }
            Exchange::Divide { range } => data[range].iter_mut().for_each(|x| *x *= scale),
            Exchange::Receive { from, tag, range } => {
                link.recv(from, round | u64::from(tag), &mut data[range])?;
            }
        }
        Ok(())
    }
}

impl GradientReducer for CollectiveMean {
    fn name(&self) -> &'static str {
        match self.topology {
            Topology::Direct => "collective",
            Topology::Ring => "ring",
        }
    }

    fn reduce(&mut self, grads: &mut [Slab]) -> Result<(), ReduceError> {
        let count = grads.len();
        if count == 0 {
            self.mean.as_host_mut().unwrap_or_default().fill(0.0);
        } else {
            self.local.reduce(grads)?;
            self.mean.copy_from(&self.local.mean(grads)[0])?;
        }
        let (rank, size, len) = (self.link.rank(), self.link.size(), self.mean.len());
        match self.topology {
            Topology::Direct => {
                self.exchange(count, direct(rank, size, len, self.segment).peekable())?;
            }
            Topology::Ring => {
                self.exchange(count, ring(rank, size, len, self.segment).peekable())?;
            }
        }
        self.round = self.round.wrapping_add(1);
        Ok(())
    }

    fn mean<'a>(&'a self, _grads: &'a [Slab]) -> &'a [Slab] {
        std::slice::from_ref(&self.mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Device, cpu::CpuDevice};
    use crate::reduce::{CpuMean, LocalLink};
    use crate::util::rng::{Purpose, Stream};
    use proptest::prelude::*;
    use std::sync::Arc;

    /// Gradient `i` of a round, of which the sums depend on their order.
    fn gradient(i: usize, len: usize) -> Slab {
        let mut stream = Stream::new(9, Purpose::Test, i as u64);
        let mut slab = Slab::host(len).unwrap();
        slab.as_host_mut()
            .unwrap()
            .fill_with(|| stream.normal() * 10f32.powf(stream.range(-4., 4.)));
        slab
    }

    fn bits(slab: &Slab) -> Vec<u32> {
        slab.as_host().unwrap().iter().map(|x| x.to_bits()).collect()
    }

    fn device() -> Arc<dyn Device> {
        Arc::new(CpuDevice::new(0, 1).unwrap())
    }

    fn collective(
        link: impl Link + 'static,
        how: Topology,
        segment: usize,
        n: usize,
        len: usize,
    ) -> CollectiveMean {
        let local = CpuMean::undivided(device(), n, len).unwrap();
        CollectiveMean::new(Box::new(local), Box::new(link), how, segment, len).unwrap()
    }

    /// The means of the ranks after each of two rounds; rank `r` has `counts[r]` gradients.
    fn run(
        world: Vec<LocalLink>,
        how: Topology,
        segment: usize,
        len: usize,
        counts: &[usize],
    ) -> Vec<[Vec<u32>; 2]> {
        let ranks = world.into_iter().enumerate().map(|(rank, link)| {
            let (n, first) = (counts[rank], counts[..rank].iter().sum::<usize>());
            let mut reducer = collective(link, how, segment, n, len);
            std::thread::spawn(move || {
                [0, 1].map(|round| {
                    let mut grads: Vec<_> =
                        (0..n).map(|i| gradient(1000 * round + first + i, len)).collect();
                    reducer.reduce(&mut grads).unwrap();
                    bits(&reducer.mean(&grads)[0])
                })
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    fn one_process(n: usize, len: usize, round: usize) -> Vec<u32> {
        let mut grads: Vec<_> = (0..n).map(|i| gradient(1000 * round + i, len)).collect();
        let mut mean = CpuMean::new(device(), n, len).unwrap();
        mean.reduce(&mut grads).unwrap();
        bits(&mean.mean(&grads)[0])
    }

    fn tree(values: &[f32]) -> f32 {
        match values {
            [x] => *x,
            _ => {
                let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
                tree(left) + tree(right)
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn hosts_agree_with_one_process(
            hosts in 1usize..=5,
            towers in prop::sample::select(vec![1usize, 2, 4]),
            len in prop::sample::select(vec![0usize, 1, 15, 16, 17, 64, 100, 333, 1000]),
            segment in 1usize..400,
            seed in prop::option::of(any::<u64>()),
        ) {
            let world = match seed {
                Some(seed) => LocalLink::disorderly_world(hosts, seed),
                None => LocalLink::world(hosts),
            };
            let expected = [0, 1].map(|round| one_process(hosts * towers, len, round));
            let all = run(world, Topology::Direct, segment, len, &vec![towers; hosts]);
            prop_assert!(all.iter().all(|ranks| *ranks == expected));
        }

        #[test]
        fn uneven_ranks_weigh_what_they_bring(
            counts in prop::collection::vec(0usize..4, 1..=5),
            len in 1usize..200,
            segment in 1usize..200,
            seed: u64,
        ) {
            let total = counts.iter().sum::<usize>();
            let grads: Vec<_> = (0..total).map(|i| gradient(i, len)).collect();
            // A sum per host, a sum of these, one division.
            let mean = |at: usize| {
                let mut first = 0;
                let hosts: Vec<f32> = counts.iter().map(|&n| {
                    let own: Vec<f32> =
                        (first..first + n).map(|i| grads[i].as_host().unwrap()[at]).collect();
                    first += n;
                    if own.is_empty() { 0.0 } else { tree(&own) }
                }).collect();
                (tree(&hosts) * (1.0 / total.max(1) as f32)).to_bits()
            };
            let expected: Vec<u32> = (0..len).map(mean).collect();
            let world = LocalLink::disorderly_world(counts.len(), seed);
            let all = run(world, Topology::Direct, segment, len, &counts);
            prop_assert!(all.iter().all(|rank| rank[0] == expected));
        }

        #[test]
        fn the_ring_adds_in_its_own_fixed_order(
            size in 1usize..=5,
            len in prop::sample::select(vec![0usize, 1, 16, 17, 100, 333]),
            segment in 1usize..200,
            seed: u64,
        ) {
            let grads: Vec<_> = (0..size).map(|i| gradient(i, len)).collect();
            let each = len.div_ceil(size).next_multiple_of(16);
            let mean = |at: usize| {
                let around = (0..size).map(|i| grads[(at / each + i) % size].as_host().unwrap()[at]);
                let sum = around.reduce(|sum, x| sum + x).unwrap();
                (sum * (1.0 / size as f32)).to_bits()
            };
            let expected: Vec<u32> = (0..len).map(mean).collect();
            let world = LocalLink::disorderly_world(size, seed);
            let all = run(world, Topology::Ring, segment, len, &vec![1; size]);
            prop_assert!(all.iter().all(|rank| rank[0] == expected && rank[1] == all[0][1]));
        }
    }

    /// Breaks off after some messages.
    struct Dying {
        link: LocalLink,
        left: usize,
    }

    impl Dying {
        fn live(&mut self) -> Result<(), ReduceError> {
            self.left = self.left.checked_sub(1).ok_or_else(|| {
                let reason = "its time had come".to_owned();
                ReduceError::PeerLost { rank: 77, reason }
            })?;
            Ok(())
        }
    }

    impl Link for Dying {
        fn rank(&self) -> usize {
            self.link.rank()
        }

        fn size(&self) -> usize {
            self.link.size()
        }

        fn send(&mut self, to: usize, tag: u64, chunk: &[f32]) -> Result<(), ReduceError> {
            self.live()?;
            self.link.send(to, tag, chunk)
        }

        fn recv(&mut self, from: usize, tag: u64, into: &mut [f32]) -> Result<(), ReduceError> {
            self.live()?;
            self.link.recv(from, tag, into)
        }
    }

    #[test]
    fn a_lost_rank_is_named_by_all_others() {
        for how in [Topology::Direct, Topology::Ring] {
            for left in [0, 1, 4, 9, 14] {
                let dead = left % 3;
                let ranks: Vec<_> = LocalLink::disorderly_world(3, left as u64)
                    .into_iter()
                    .map(|link| {
                        let left = if link.rank() == dead { left } else { usize::MAX };
                        let mut reducer = collective(Dying { link, left }, how, 16, 1, 200);
                        std::thread::spawn(move || {
                            reducer.reduce(&mut [gradient(0, 200)]).unwrap_err()
                        })
                    })
                    .collect();
                for (rank, thread) in ranks.into_iter().enumerate() {
                    let error = thread.join().unwrap();
                    let named = if rank == dead { 77 } else { dead };
                    assert!(matches!(error, ReduceError::PeerLost { rank, .. } if rank == named));
                }
            }
        }
    }

    #[test]
    fn another_model_is_refused() {
        let world = LocalLink::world(2).into_iter().zip([100, 200]);
        let ranks: Vec<_> = world
            .map(|(link, len)| {
                let mut reducer = collective(link, Topology::Direct, 400, 1, len);
                std::thread::spawn(move || reducer.reduce(&mut [gradient(0, len)]).unwrap_err())
            })
            .collect();
        let errors: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(errors.iter().any(|e| matches!(e, ReduceError::Length { .. })), "{errors:?}");
    }
}
