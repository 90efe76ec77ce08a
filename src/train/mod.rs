//! Training: [`Trainer::step`] is the only training loop body in the crate; [`Supervisor`] brings it to life, calls the
//! hooks after each step and ends it in order; [`assemble`] is the one place that knows the mode.
//!
//! A step is: batches from the input, variables from the store, gradients from every tower in parallel, their mean from
//! the reducer, one update by the store. Then the hooks: log line, summary, evaluation, checkpoint.

mod eval;
mod hooks;
mod meter;
mod report;
mod strategy;
mod supervisor;
mod tower;
mod trainer;

pub use eval::{ClassScore, Evaluation, Evaluator, Weights};
pub use hooks::{CheckpointHook, EvalHook, Flow, Hook, LogHook, NotFinite, SummaryHook, Tell};
pub use meter::{Line, Meter};
pub use report::{EventsReport, Happening, MetricsReport, Report, Summary};
pub use strategy::{Assembly, Fabric, Part, assemble, store_settings};
pub use supervisor::{Outcome, Supervisor};
pub use tower::{LocalTower, Tower};
pub use trainer::{Diverged, StepReport, StepTimes, Trainer};
