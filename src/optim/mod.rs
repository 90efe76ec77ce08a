//! How gradients change parameters: the rule of one step, and the rate as a function of the global step.

mod rule;
mod schedule;

pub use rule::{STATISTIC_SHARE, UpdateRule, average_decay};
pub use schedule::{Curve, Schedule};
