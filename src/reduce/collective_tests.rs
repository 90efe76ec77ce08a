//! Collectives in one process, over links that hold messages back.

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
    slab.as_host_mut().unwrap().fill_with(|| stream.normal() * 10f32.powf(stream.range(-4., 4.)));
    slab
}

fn bits(slab: &Slab) -> Vec<u32> {
    slab.as_host().unwrap().iter().map(|x| x.to_bits()).collect()
}

fn device() -> Arc<dyn Device> {
    Arc::new(CpuDevice::new(0, 1).unwrap())
}

/// As they are, in one bucket.
fn plain(topology: Topology, segment: usize) -> Way {
    Way { topology, wire: Wire::F32, segment, rows: Vec::new(), bucket: usize::MAX }
}

fn collective(link: impl Link + 'static, way: Way, n: usize, len: usize) -> CollectiveMean {
    let local = CpuMean::undivided(device());
    CollectiveMean::new(Box::new(local), Box::new(link), way, n, len).unwrap()
}

/// What towers do: each tells of the rows of its gradient, from the end.
fn tell(sink: &dyn Sink, grads: &[Slab], rows: &[Range<usize>]) {
    std::thread::scope(|scope| {
        for (i, slab) in grads.iter().enumerate() {
            scope.spawn(move || {
                let values = slab.as_host().unwrap();
                for row in rows.iter().rev() {
                    sink.ready(i, row.clone(), &values[row.clone()]);
                }
            });
        }
    });
}

/// The means of the ranks after each of two rounds; rank `r` has `counts[r]` gradients, and tells of them early unless it is a
/// third one.
fn run(
    world: Vec<LocalLink>,
    way: Way,
    len: usize,
    counts: &[usize],
    gradient: impl Fn(usize, usize) -> Slab + Copy + Send + 'static,
) -> Vec<[Vec<u32>; 2]> {
    let ranks = world.into_iter().enumerate().map(|(rank, link)| {
        let (n, first) = (counts[rank], counts[..rank].iter().sum::<usize>());
        let (early, rows) = (rank % 3 != 2, way.rows.clone());
        let counts = counts.to_vec();
        let mut reducer = collective(link, way.clone(), n, len);
        std::thread::spawn(move || {
            [0, 1].map(|round| {
                let mut grads: Vec<_> =
                    (0..n).map(|i| gradient(1000 * round + first + i, len)).collect();
                if early {
                    tell(reducer.begin(), &grads, &rows);
                }
                let mut loss = (rank + 1) as f64;
                reducer.reduce(&mut grads, Some(&mut loss)).unwrap();
                let weighed = |(rank, n): (usize, &usize)| ((rank + 1) * n) as f64;
                let total = counts.iter().sum::<usize>().max(1) as f64;
                let expected = counts.iter().enumerate().map(weighed).sum::<f64>() / total;
                assert!((loss - expected).abs() < 1e-6 * expected.max(1.0), "{loss} {expected}");
                bits(&reducer.mean(&grads)[0])
            })
        })
    });
    let ranks: Vec<_> = ranks.collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

fn one_process(n: usize, len: usize, round: usize) -> Vec<u32> {
    let mut grads: Vec<_> = (0..n).map(|i| gradient(1000 * round + i, len)).collect();
    let mut mean = CpuMean::new(device());
    mean.reduce(&mut grads, Some(&mut 0.0)).unwrap();
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
        least in 1usize..500,
        seed in prop::option::of(any::<u64>()),
    ) {
        let world = match seed {
            Some(seed) => LocalLink::disorderly_world(hosts, seed),
            None => LocalLink::world(hosts),
        };
        let expected = [0, 1].map(|round| one_process(hosts * towers, len, round));
        // Rows with gaps between them, as alignment makes them.
        let rows = (0..len).step_by(23).map(|start| start..(start + 19).min(len)).collect();
        let way = Way { rows, bucket: least, ..plain(Topology::Direct, segment) };
        let all = run(world, way, len, &vec![towers; hosts], gradient);
        let in_rows = |mean: &[Vec<u32>; 2]| {
            let within = |mean: &Vec<u32>| (0..len).filter(|at| at % 23 < 19).map(|at| mean[at]).collect();
            mean.each_ref().map(within) as [Vec<u32>; 2]
        };
        prop_assert!(all.iter().all(|ranks| in_rows(ranks) == in_rows(&expected)));
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
        let way = Way { wire, ..plain(topology, segment) };
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
            let way = Way { wire, ..plain(topology, 16) };
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

    fn send_with(
        &mut self,
        to: usize,
        tag: u64,
        len: usize,
        write: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), ReduceError> {
        self.live()?;
        self.link.send_with(to, tag, len, write)
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
                        reducer.reduce(&mut [gradient(0, 200)], Some(&mut 0.0)).unwrap_err()
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
            std::thread::spawn(move || {
                reducer.reduce(&mut [gradient(0, len)], Some(&mut 0.0)).unwrap_err()
            })
        })
        .collect();
    let errors: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    assert!(errors.iter().any(|e| matches!(e, ReduceError::Length { .. })), "{errors:?}");
}

#[test]
fn buckets_are_cut_at_rows_from_the_end() {
    let whole = |len| std::iter::once(0..len).collect::<Vec<_>>();
    let rows = [0..10, 10..18, 20..85, 90..100, 100..120];
    assert_eq!(buckets(&rows, 120, 30), [90..120, 20..90, 0..20]);
    assert_eq!(buckets(&[0..10, 10..20, 20..40], 40, 100), whole(40));
    assert_eq!(buckets(&whole(40), 40, 1), whole(40));
    assert_eq!(buckets(&[], 0, 1), whole(0));
}

#[test]
fn a_rank_that_gives_up_a_step_lets_nobody_have_its_mean() {
    let mut world = LocalLink::world(2);
    let rows = vec![0..32, 32..64];
    let way = Way { rows: rows.clone(), bucket: 32, ..plain(Topology::Direct, 16) };
    let all = rows.clone();
    let mut other = collective(world.pop().unwrap(), way.clone(), 1, 64);
    let mut diverged = collective(world.pop().unwrap(), way, 1, 64);
    let waiting = std::thread::spawn(move || {
        let mut grads = [gradient(1, 64)];
        tell(other.begin(), &grads, &all);
        other.reduce(&mut grads, Some(&mut 0.0))
    });
    tell(diverged.begin(), &[gradient(0, 64)], &rows);
    drop(diverged);
    assert!(matches!(waiting.join().unwrap(), Err(ReduceError::PeerLost { rank: 0, .. })));
}
