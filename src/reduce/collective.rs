//! [`CollectiveMean`]: equal workers, no parameter server. First the towers of a host, then the hosts.

use super::hosts::{Hosts, slab};
use super::{GradientReducer, Link, ReduceError, Wire, direct, ring};
use crate::device::{DeviceError, Slab};

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
/// Floats travel by a [`Wire`]. Whatever it rounds, all ranks end with the same bits: who owns a range takes what the others get.
///
/// A rank without data takes part with no gradients. After an error the ranks differ: form a new collective.
pub struct CollectiveMean {
    local: Box<dyn GradientReducer>,
    /// The sum of a rank without gradients, once it was needed.
    zeros: Option<Slab>,
    topology: Topology,
    segment: usize,
    hosts: Hosts,
}

impl CollectiveMean {
    /// For slabs of `len` floats that travel in segments of at most `segment` floats, usually [`super::SEGMENT`].
    pub fn new(
        local: Box<dyn GradientReducer>,
        link: Box<dyn Link>,
        topology: Topology,
        wire: Wire,
        segment: usize,
        len: usize,
    ) -> Result<Self, ReduceError> {
        let hosts = Hosts::new(link, wire, len)?;
        Ok(Self { local, zeros: None, topology, segment, hosts })
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
        let hosts = &mut self.hosts;
        let (rank, size, len) = (hosts.link.rank(), hosts.link.size(), hosts.mean.len());
        let sum = if count == 0 {
            match &mut self.zeros {
                Some(zeros) => &*zeros,
                none => none.insert(slab(len)?),
            }
        } else {
            self.local.reduce(grads)?;
            &self.local.mean(grads)[0]
        };
        let own = sum.as_host().filter(|own| own.len() == len).ok_or_else(|| {
            let reason = format!("a sum of {} floats in place of {len}", sum.len());
            DeviceError::Mismatch { device: "the host".to_owned(), reason }
        })?;
        match self.topology {
            Topology::Direct => {
                hosts.exchange(own, count, direct(rank, size, len, self.segment).peekable())
            }
            Topology::Ring => {
                hosts.exchange(own, count, ring(rank, size, len, self.segment).peekable())
            }
        }
    }

    fn mean<'a>(&'a self, _grads: &'a [Slab]) -> &'a [Slab] {
        std::slice::from_ref(&self.hosts.mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Device, cpu::CpuDevice};
    use crate::reduce::{CpuMean, LocalLink};
    use crate::util::rng::{Purpose, Stream};
    use bytes::Bytes;
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

    /// How gradients travel.
    #[derive(Clone, Copy)]
    struct Way {
        topology: Topology,
        wire: Wire,
        segment: usize,
    }

    /// As they are.
    fn plain(topology: Topology, segment: usize) -> Way {
        Way { topology, wire: Wire::F32, segment }
    }

    fn collective(link: impl Link + 'static, way: Way, n: usize, len: usize) -> CollectiveMean {
        let local = CpuMean::undivided(device(), n, len).unwrap();
        let Way { topology, wire, segment } = way;
        CollectiveMean::new(Box::new(local), Box::new(link), topology, wire, segment, len).unwrap()
    }

    /// The means of the ranks after each of two rounds; rank `r` has `counts[r]` gradients.
    fn run(
        world: Vec<LocalLink>,
        way: Way,
        len: usize,
        counts: &[usize],
        gradient: impl Fn(usize, usize) -> Slab + Copy + Send + 'static,
    ) -> Vec<[Vec<u32>; 2]> {
        let ranks = world.into_iter().enumerate().map(|(rank, link)| {
            let (n, first) = (counts[rank], counts[..rank].iter().sum::<usize>());
            let mut reducer = collective(link, way, n, len);
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
            let all = run(world, plain(Topology::Direct, segment), len, &vec![towers; hosts], gradient);
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
            let all = run(world, plain(Topology::Direct, segment), len, &counts, gradient);
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
            let all = run(world, plain(Topology::Ring, segment), len, &vec![1; size], gradient);
            prop_assert!(all.iter().all(|rank| rank[0] == expected && rank[1] == all[0][1]));
        }

        /// Whatever is rounded on the way, nobody ends with other bits, and nothing is further off than roundings explain.
        #[test]
        fn ranks_agree_on_rounded_means(
            counts in prop::collection::vec(0usize..3, 1..=5),
            topology in prop::sample::select(vec![Topology::Direct, Topology::Ring]),
            (wire, unit) in prop::sample::select(vec![(Wire::Bf16, 8), (Wire::F16, 11)]),
            len in prop::sample::select(vec![1usize, 16, 17, 100, 333, 3000]),
            segment in 1usize..2000,
            seed: u64,
        ) {
            let world = || LocalLink::disorderly_world(counts.len(), seed);
            let way = Way { topology, wire, segment };
            let all = run(world(), way, len, &counts, small);
            prop_assert!(all.iter().all(|rank| *rank == all[0]));
            let exact = run(world(), plain(topology, segment), len, &counts, small);
            let total = counts.iter().sum::<usize>();
            let grads: Vec<_> = (0..total).map(|i| small(i, len)).collect();
            let roundings = counts.len().max(2) as f32;
            for at in 0..len {
                let sizes = grads.iter().map(|slab| slab.as_host().unwrap()[at].abs());
                let mean = sizes.sum::<f32>() / total.max(1) as f32;
                let bound = 1.1 * roundings * (mean * 0.5f32.powi(unit) + 0.5f32.powi(24));
                let value = |ranks: &[[Vec<u32>; 2]]| f32::from_bits(ranks[0][0][at]);
                prop_assert!((value(&all) - value(&exact)).abs() <= bound, "at {at}");
            }
        }
    }

    /// A gradient whose sums half precision holds.
    fn small(i: usize, len: usize) -> Slab {
        let mut slab = gradient(i, len);
        slab.as_host_mut().unwrap().iter_mut().for_each(|x| *x *= 0.01);
        slab
    }

    #[test]
    fn infinities_and_nans_reach_everybody() {
        let special = |i: usize, len: usize| {
            let mut slab = small(i, len);
            let (values, i) = (slab.as_host_mut().unwrap(), i % 1000);
            (values[2 + i], values[10 + i], values[90 - i]) = (f32::INFINITY, f32::NAN, -1e38);
            slab
        };
        for topology in [Topology::Direct, Topology::Ring] {
            for wire in [Wire::F32, Wire::Bf16, Wire::F16] {
                let way = Way { topology, wire, segment: 16 };
                for rank in run(LocalLink::world(3), way, 100, &[1; 3], special) {
                    let mean: Vec<f32> = rank[0].iter().map(|bits| f32::from_bits(*bits)).collect();
                    assert!(mean[2..5].iter().all(|x| *x == f32::INFINITY), "{wire:?}");
                    assert!(mean[10..13].iter().all(|x| x.is_nan()), "{wire:?}");
                    let beyond = mean[88..91].iter().all(|x| *x == f32::NEG_INFINITY);
                    assert_eq!(beyond, wire == Wire::F16, "{wire:?}: {:?}", &mean[88..91]);
                    assert_eq!(
                        mean.iter().filter(|x| !x.is_finite()).count(),
                        if beyond { 9 } else { 6 }
                    );
                }
            }
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

        fn send_bytes(&mut self, to: usize, tag: u64, message: Bytes) -> Result<(), ReduceError> {
            self.live()?;
            self.link.send_bytes(to, tag, message)
        }

        fn recv_bytes(&mut self, from: usize, tag: u64) -> Result<Bytes, ReduceError> {
            self.live()?;
            self.link.recv_bytes(from, tag)
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
                        let mut reducer = collective(Dying { link, left }, plain(how, 16), 1, 200);
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
                let mut reducer = collective(link, plain(Topology::Direct, 400), 1, len);
                std::thread::spawn(move || reducer.reduce(&mut [gradient(0, len)]).unwrap_err())
            })
            .collect();
        let errors: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(errors.iter().any(|e| matches!(e, ReduceError::Length { .. })), "{errors:?}");
    }
}
