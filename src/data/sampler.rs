//! [`Sampler`]: which example comes when.

use std::num::NonZeroU32;

use crate::util::rng::{Purpose, Stream};

/// An example's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// How often all examples had been handed out before.
    pub epoch: u64,
    /// The example.
    pub index: usize,
}

/// Maps positions to examples: a function of `(seed, position)`, so training restarts anywhere.
///
/// A position counts the examples handed out since the start of training. Every epoch hands out
/// every example once, in an order of its own when shuffling.
pub struct Sampler {
    seed: u64,
    examples: NonZeroU32,
    shuffle: bool,
    /// The orders of the last even and odd epoch asked for: a batch may lie across two epochs.
    orders: [Order; 2],
}

#[derive(Default)]
struct Order {
    epoch: Option<u64>,
    examples: Vec<u32>,
}

impl Sampler {
    /// A sampler of `examples` examples, in their own order unless `shuffle`.
    pub fn new(seed: u64, examples: NonZeroU32, shuffle: bool) -> Self {
        Self { seed, examples, shuffle, orders: Default::default() }
    }

    /// The example at `position`.
    pub fn at(&mut self, position: u64) -> Pick {
        let n = u64::from(self.examples.get());
        let (epoch, turn) = (position / n, (position % n) as usize);
        let index = if self.shuffle { self.order(epoch)[turn] as usize } else { turn };
        Pick { epoch, index }
    }

    fn order(&mut self, epoch: u64) -> &[u32] {
        let order = &mut self.orders[(epoch % 2) as usize];
        if order.epoch != Some(epoch) {
            order.epoch = Some(epoch);
            order.examples.clear();
            order.examples.extend(0..self.examples.get());
            shuffle(&mut order.examples, &mut Stream::new(self.seed, Purpose::Shuffle, epoch));
        }
        &order.examples
    }
}

/// Fisher-Yates: every order is as likely as any other.
pub(super) fn shuffle(values: &mut [u32], stream: &mut Stream) {
    for last in (1..values.len()).rev() {
        values.swap(last, stream.below(last as u32 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(seed: u64, examples: u32, shuffle: bool) -> Sampler {
        Sampler::new(seed, NonZeroU32::new(examples).unwrap(), shuffle)
    }

    proptest! {
        #[test]
        fn every_epoch_hands_out_every_example_once_to_any_towers(
            seed: u64, n in 1u32..200, batch in 1u64..17, towers in 1u64..5, shuffle: bool,
        ) {
            // Each tower asks for its own batches of every step, with a sampler of its own.
            let epochs = 3;
            let total = epochs * u64::from(n);
            let mut seen = vec![0u32; (epochs * u64::from(n)) as usize];
            for tower in 0..towers {
                let mut sampler = sampler(seed, n, shuffle);
                for step in 0..total.div_ceil(batch * towers) {
                    for i in 0..batch {
                        let position = (step * towers + tower) * batch + i;
                        let pick = sampler.at(position);
                        prop_assert_eq!(pick.epoch, position / u64::from(n));
                        if position < total {
                            seen[pick.epoch as usize * n as usize + pick.index] += 1;
                        }
                    }
                }
            }
            prop_assert!(seen.iter().all(|&times| times == 1));
        }

        #[test]
        fn a_restart_continues_alike(seed: u64, n in 1u32..100, start in 0u64..1000) {
            let mut whole = sampler(seed, n, true);
            (0..start).for_each(|p| { whole.at(p); });
            let mut restarted = sampler(seed, n, true);
            for position in start..start + 300 {
                prop_assert_eq!(whole.at(position), restarted.at(position));
            }
        }
    }

    #[test]
    fn orders_differ_between_epochs_and_seeds() {
        let order = |seed, epoch: u64| -> Vec<usize> {
            let mut sampler = sampler(seed, 50, true);
            (0..50).map(|i| sampler.at(epoch * 50 + i).index).collect()
        };
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_eq!(order(1, 1), order(1, 1));
    }

    #[test]
    fn every_order_of_three_is_equally_likely() {
        let mut counts = std::collections::BTreeMap::new();
        let mut sampler = sampler(5, 3, true);
        for epoch in 0..6000 {
            let order: Vec<usize> = (0..3).map(|i| sampler.at(epoch * 3 + i).index).collect();
            *counts.entry(order).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|c| (880..1120).contains(c)), "{counts:?}");
    }

    #[test]
    fn without_shuffling_examples_keep_their_order_at_any_position() {
        let mut sampler = sampler(0, 7, false);
        assert_eq!(sampler.at(9), Pick { epoch: 1, index: 2 });
        assert_eq!(sampler.at(u64::MAX), Pick { epoch: u64::MAX / 7, index: 1 });
    }
}
