//! From the configuration to the update rule and the learning rate's schedule, which counts in steps.

use crate::config::{LearningRateConfig, OptimizerConfig, RunConfig, UpdateRule as RuleConfig};
use crate::optim::{Curve, Schedule, UpdateRule};

pub(super) fn rule(config: &OptimizerConfig) -> UpdateRule {
    let clip = config.clip.map(|clip| clip as f32);
    match config.rule {
        RuleConfig::Sgd => UpdateRule { clip, ..UpdateRule::default() },
        RuleConfig::Momentum { momentum, nesterov } => {
            UpdateRule { momentum: Some(momentum as f32), nesterov, clip }
        }
    }
}

/// Epochs become steps of `global_batch` examples: `int(examples / global_batch * epochs)`, so that any number of towers
/// decays at the same epoch. The tutorial's own rule, `tower_blind`, counted the batch of one tower.
pub(super) fn schedule(config: &RunConfig, examples: usize, global_batch: usize) -> Schedule {
    let steps_by = |batch: usize, epochs: f64| (examples as f64 / batch as f64 * epochs) as u64;
    let steps = |epochs: f64| steps_by(global_batch, epochs);
    let rate = &config.optimizer.learning_rate;
    let curve = match rate {
        LearningRateConfig::Constant { initial, .. } => Curve::Constant(*initial),
        LearningRateConfig::Exponential {
            initial,
            factor,
            epochs_per_decay,
            staircase,
            tower_blind,
            ..
        } => Curve::Exponential {
            initial: *initial,
            factor: *factor,
            decay_steps: match tower_blind {
                true => steps_by(config.data.batch_size, *epochs_per_decay),
                false => steps(*epochs_per_decay),
            }
            .max(1),
            staircase: *staircase,
        },
        LearningRateConfig::Piecewise { values, boundaries_epochs, .. } => Curve::Piecewise {
            values: values.clone(),
            boundaries: boundaries_epochs.iter().map(|&epochs| steps(epochs)).collect(),
        },
        LearningRateConfig::Polynomial { initial, r#final, power, epochs, .. } => {
            let steps = steps(*epochs).max(1);
            Curve::Polynomial { initial: *initial, end: *r#final, power: *power, steps }
        }
    };
    Schedule { curve, warmup_steps: steps(rate.warmup_epochs()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decays_at_the_same_epoch_for_any_number_of_towers() {
        let mut config = RunConfig::recipe("cifar10").unwrap();
        let decay = |config: &RunConfig, towers: usize| match schedule(config, 50_000, 128 * towers)
            .curve
        {
            Curve::Exponential { decay_steps, .. } => decay_steps,
            other => panic!("{other:?}"),
        };
        for (towers, steps) in [(1, 136_718), (2, 68_359), (3, 45_572), (4, 34_179), (8, 17_089)] {
            assert_eq!(decay(&config, towers), steps);
        }
        let rate = &mut config.optimizer.learning_rate;
        if let LearningRateConfig::Exponential { tower_blind, .. } = rate {
            *tower_blind = true;
        }
        assert_eq!(decay(&config, 4), 136_718);
    }
}
