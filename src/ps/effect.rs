//! [`Effect`]: what an [`Accumulator`](super::Accumulator) wants done, and how contributions are weighed.

use std::fmt;

/// What has to be done now, in order, before the accumulator is told anything more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The offered gradient counts: keep it in this slot until it is applied. Slots are numbered from 0 in each round,
    /// so as many slabs are enough as a round has contributions.
    Keep {
        /// The slot.
        slot: usize,
    },
    /// The offered gradient does not count.
    Drop {
        /// Who offered it.
        worker: usize,
        /// Why not.
        why: Why,
    },
    /// Apply the weighted mean ([`weights`]) of these, added as a tree in this order; all slots are free then.
    Apply {
        /// By worker, and for each worker by time.
        shares: Vec<Share>,
    },
    /// Let these workers go on with the variables as they are at `step`.
    Release {
        /// The workers, ascending.
        to: Vec<usize>,
        /// The current step.
        step: u64,
    },
    /// Too many workers died to go on; a round ends when enough have come back.
    TooFew {
        /// Workers that live or have finished.
        left: usize,
        /// What is needed.
        min: usize,
    },
    /// Everybody has finished: training is over.
    End,
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keep { slot } => write!(f, "keep in {slot}"),
            Self::Drop { worker, why } => write!(f, "drop {worker}: {why}"),
            Self::Apply { shares } => {
                f.write_str("apply")?;
                shares.iter().try_for_each(|s| write!(f, " {}*{}", s.worker, s.examples))
            }
            Self::Release { to, step } => {
                f.write_str("release")?;
                to.iter().try_for_each(|worker| write!(f, " {worker}"))?;
                write!(f, " at {step}")
            }
            Self::TooFew { left, min } => write!(f, "too few: {left} of {min}"),
            Self::End => f.write_str("end"),
        }
    }
}

/// Why a gradient does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It was computed at another step than the current one.
    Stale,
    /// Its worker has given its share of this round.
    Extra,
    /// Its worker has left, or never was of the cluster; it must join first.
    Stranger,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stale => "stale",
            Self::Extra => "extra",
            Self::Stranger => "stranger",
        })
    }
}

/// One gradient of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Where it is kept.
    pub slot: usize,
    /// Whose it is.
    pub worker: usize,
    /// Examples it is the mean of.
    pub examples: u64,
}

/// What a worker's gradients came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Gradients that were applied.
    pub applied: u64,
    /// Gradients that were dropped as too old.
    pub stale: u64,
}

/// A factor for each share, and one for their sum, that make their mean by examples.
///
/// The factors are `n / max n`, so with equal counts they are exactly 1 and the last is `1 / shares`: the bits are
/// those of a plain tree mean.
pub fn weights(shares: &[Share]) -> (Vec<f32>, f32) {
    let most = shares.iter().map(|s| s.examples).max().unwrap_or(0).max(1) as f64;
    let total: f64 = shares.iter().map(|s| s.examples as f64).sum();
    let factors = shares.iter().map(|s| (s.examples as f64 / most) as f32).collect();
    (factors, if total > 0.0 { (most / total) as f32 } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(examples: &[u64]) -> Vec<Share> {
        let share = |(worker, &examples)| Share { slot: worker, worker, examples };
        examples.iter().enumerate().map(share).collect()
    }

    #[test]
    fn equal_counts_weigh_nothing() {
        for n in 1..2000 {
            let (factors, scale) = weights(&shares(&vec![37; n]));
            assert!(factors.iter().all(|&w| w == 1.0) && scale == 1.0 / n as f32, "{n}");
        }
    }

    #[test]
    fn others_weigh_by_their_examples() {
        assert_eq!(weights(&shares(&[64, 16, 0])), (vec![1.0, 0.25, 0.0], 0.8));
        assert_eq!(weights(&shares(&[0, 0])), (vec![0.0, 0.0], 0.0));
        assert_eq!(weights(&[]), (vec![], 0.0));
    }
}
