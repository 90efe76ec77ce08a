//! [`Schedule`]: the learning rate, pure in the global step, so that a restart needs no schedule state.

/// The shape of a rate over steps. All numbers are steps of the run at hand.
#[derive(Clone, Debug, PartialEq)]
pub enum Curve {
    /// Always the same.
    Constant(f64),
    /// `initial * factor ^ (step / decay_steps)`, the exponent cut to a whole number with `staircase`.
    Exponential {
        /// Rate at step 0.
        initial: f64,
        /// What it is multiplied with every `decay_steps`.
        factor: f64,
        /// Steps of one decay; at least 1.
        decay_steps: u64,
        /// In stairs instead of smoothly.
        staircase: bool,
    },
    /// `values[i]` until `boundaries[i]`, exclusive; the last value for ever.
    Piecewise {
        /// One more than boundaries.
        values: Vec<f64>,
        /// Ascending steps.
        boundaries: Vec<u64>,
    },
    /// `(initial - end) * (1 - min(step, steps) / steps) ^ power + end`.
    Polynomial {
        /// Rate at step 0.
        initial: f64,
        /// Rate from `steps` on.
        end: f64,
        /// The power.
        power: f64,
        /// Steps of the descent; at least 1.
        steps: u64,
    },
}

/// A curve, reached by a linear warm-up.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// The rate after the warm-up.
    pub curve: Curve,
    /// While the step is below this, the rate is `curve(0) * step / warmup_steps`.
    pub warmup_steps: u64,
}

impl Schedule {
    /// Always the same rate.
    pub fn constant(rate: f64) -> Self {
        Self { curve: Curve::Constant(rate), warmup_steps: 0 }
    }

    /// The rate of the update that starts at `step` (the global step before it).
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.curve.rate(0) * step as f64 / self.warmup_steps as f64;
        }
        self.curve.rate(step)
    }
}

impl Curve {
    fn rate(&self, step: u64) -> f64 {
        match self {
            Curve::Constant(rate) => *rate,
            Curve::Exponential { initial, factor, decay_steps, staircase } => {
                let decays = step as f64 / *decay_steps as f64;
                initial * factor.powf(if *staircase { decays.floor() } else { decays })
            }
            Curve::Piecewise { values, boundaries } => {
                values[boundaries.iter().filter(|&&b| step >= b).count()]
            }
            Curve::Polynomial { initial, end, power, steps } => {
                let left = 1.0 - step.min(*steps) as f64 / *steps as f64;
                (initial - end) * left.powf(*power) + end
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden(key: &str, curve: Curve) {
        let text = include_str!("../../tests/golden/schedules.json");
        let golden: serde_json::Value = serde_json::from_str(text).unwrap();
        let schedule = Schedule { curve, warmup_steps: 0 };
        let steps = golden["steps"].as_array().unwrap();
        for (step, expected) in steps.iter().zip(golden[key].as_array().unwrap()) {
            let (got, expected) =
                (schedule.rate(step.as_u64().unwrap()), expected.as_f64().unwrap());
            assert!(
                (got - expected).abs() <= 1e-7 * expected.max(1e-9),
                "{key} {step}: {got} {expected}"
            );
        }
    }

    #[test]
    fn agrees_with_tensorflow() {
        let exponential = |staircase| Curve::Exponential {
            initial: 0.1,
            factor: 0.1,
            decay_steps: 100,
            staircase,
        };
        golden("exponential_decay(0.1, step, 100, 0.1, staircase)", exponential(true));
        golden("exponential_decay(0.1, step, 100, 0.1)", exponential(false));
        let polynomial = Curve::Polynomial { initial: 0.1, end: 0.001, power: 0.5, steps: 200 };
        golden("polynomial_decay(0.1, step, 200, 0.001, power 0.5)", polynomial);
    }

    #[test]
    fn piecewise_changes_at_its_boundaries() {
        let curve = Curve::Piecewise { values: vec![0.1, 0.01, 0.001], boundaries: vec![10, 20] };
        let rates: Vec<f64> = [0, 9, 10, 19, 20, 99].map(|s| curve.rate(s)).to_vec();
        assert_eq!(rates, [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]);
    }

    #[test]
    fn warm_up_starts_at_zero() {
        let schedule = Schedule { curve: Curve::Constant(0.4), warmup_steps: 4 };
        let rates: Vec<f64> = (0..6).map(|s| schedule.rate(s)).collect();
        assert_eq!(rates, [0.0, 0.1, 0.2, 0.300_000_000_000_000_04, 0.4, 0.4]);
    }
}
