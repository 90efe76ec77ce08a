//! Training: [`Trainer::step`] is the only training loop body in the crate; [`Supervisor`] brings it to life, calls the
//! hooks after each step and ends it in order; [`duty`] and [`assemble`] are the one place that knows the mode.
//!
//! A step is: batches from the input, variables from the store, gradients from every tower in parallel, their mean from
//! the reducer, one update by the store. Then the hooks: log line, summary, evaluation, checkpoint.

mod duty;
mod eval;
mod hooks;
mod losses;
mod meter;
mod optimizer;
mod progress;
mod reducer;
mod report;
mod strategy;
mod supervisor;
mod trainer;

pub use duty::{
    Duty, Training, computing_tasks, duty, has_any_jobs, has_client, settle_mode,
    towers_are_counted_elsewhere, update_mode,
};
pub use eval::{ClassScore, Evaluation, Evaluator, Weights};
pub use hooks::{
    CheckpointHook, EvalHook, Flow, Hook, LogHook, NotFinite, SummaryHook, Tell, TraceHook,
};
pub use meter::{Line, Meter};
pub use progress::{Phase, Progress};
pub use reducer::collective;
pub use report::{EventsReport, Happening, MetricsReport, Report, Summary};
pub use strategy::{
    Assembly, Fabric, LocalTowers, Part, assemble, cpu_device, local_towers, store_settings,
};
pub use supervisor::{Outcome, Supervisor};
pub use trainer::{Diverged, StepReport, StepTimes, Trainer, Wanted};
