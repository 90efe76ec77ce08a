//! Parameter servers without a network: which task holds what, and when a gradient is applied.
//!
//! [`assign`] cuts the slab into one list of ranges for each ps task; a [`Shard`] is the store of one such list;
//! the [`Accumulator`] decides, in sync mode, which gradients make a round. Values in, effects out: nothing here
//! waits, sends, or reads a clock.
//!
//! Each shard has its own step and rounds. With backup workers a late gradient may count on one shard and not on
//! another, as in TensorFlow; without them all shards always agree.

mod accumulator;
mod assign;
mod effect;
mod shard;
mod values;

pub use accumulator::{Accumulator, Rounds, WhenShort};
pub use assign::{Placement, assign, bytes_per_ps};
pub use effect::{Effect, Share, Tally, Why, weights};
pub use shard::{Mode, Pushed, Shard};
pub use values::{ShardState, Version};

use crate::device::DeviceError;

/// What a ps task refuses.
#[derive(Debug, thiserror::Error)]
pub enum PsError {
    /// A device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Nobody has initialized the variables yet.
    #[error("the variables of this ps task are empty; wait until the chief has initialized them")]
    Empty,
    /// The variables live.
    #[error(
        "the variables of this ps task live already as incarnation {current}, a rollback to {asked} is refused; \\
         restore them under a newer incarnation"
    )]
    Initialized {
        /// The incarnation that lives.
        current: u64,
        /// The incarnation that was to be written.
        asked: u64,
    },
    /// The gradient belongs to variables from before a restore.
    #[error(
        "the gradient was computed on incarnation {seen} of the variables, which are {current} now; read them again"
    )]
    Incarnation {
        /// What the worker had read.
        seen: u64,
        /// What lives.
        current: u64,
    },
    /// Values of another layout.
    #[error(
        "{what}: got {found} floats, this ps task holds {expected}; give every task the same model"
    )]
    Length {
        /// Which values.
        what: &'static str,
        /// Floats of the shard.
        expected: usize,
        /// Floats that came.
        found: usize,
    },
    /// A state lacks what this shard's optimizer keeps.
    #[error("the checkpoint has no {what}; use the optimizer and averages it was trained with")]
    Missing {
        /// Which values.
        what: &'static str,
    },
    /// A worker that is not in the cluster.
    #[error("there is no worker {worker}; the cluster has {workers}")]
    Stranger {
        /// Who speaks.
        worker: usize,
        /// Workers of the cluster.
        workers: usize,
    },
    /// An async push to a sync shard, or the other way round.
    #[error("this ps task trains in {mode} mode; give every task the same mode")]
    Mode {
        /// The shard's mode.
        mode: &'static str,
    },
}
