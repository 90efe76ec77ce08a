//! The configuration of a run: typed schema, layered resolution, printing and comparison.
//!
//! A value comes from the highest layer that names it: recipe defaults, YAML files, environment,
//! `--set key.path=value`, command-line flags. [`Layers`] collects them, [`Resolved`] holds the
//! typed [`RunConfig`] and where each value came from.

mod check;
mod choice;
mod cluster;
mod compare;
mod error;
mod key;
mod kind;
mod layers;
mod optimizer;
mod origin;
mod print;
mod resolve;
mod schedule;
mod schema;
mod settings;
mod spec;
mod suggest;
mod towers;
mod tree;

pub use choice::{
    CheckpointFormat, ClusterMode, Convolution, DataName, Engine, Exchange, ModelName, OnDevice,
    OptimizerName, Placement, Precision, Reduce, ScheduleName, VariablePlacement, Wire,
};
pub use cluster::{ClusterConfig, TlsConfig};
pub use compare::{differences, fingerprint};
pub use error::ConfigError;
pub use layers::Layers;
pub use optimizer::{OptimizerConfig, UpdateRule};
pub use origin::Origin;
pub use print::run_yaml;
pub use resolve::Resolved;
pub use schedule::LearningRateConfig;
pub use schema::{CheckpointConfig, DataConfig, ModelConfig, RunConfig, TrainConfig};
pub use spec::all_reduce_spec;
pub use towers::{TowerDevices, TowersConfig};
