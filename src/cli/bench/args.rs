//! The flags of `tftrain bench`; no logic.

use std::path::PathBuf;

use clap::{Args, Subcommand, value_parser};

use crate::config::{Exchange, Wire};

#[derive(Debug, Args)]
pub(in crate::cli) struct BenchArgs {
    #[command(subcommand)]
    pub(in crate::cli) what: BenchWhat,
}

#[derive(Debug, Subcommand)]
pub(in crate::cli) enum BenchWhat {
    /// Whole training steps, on synthetic pictures unless --data-dir is given
    Step(StepBenchArgs),
    /// The input pipeline alone
    Input(InputBenchArgs),
    /// The mean over the gradients of processes on this machine, as workers of a collective take it
    Reduce(ReduceBenchArgs),
    /// A worker's round with a parameter server on this machine, beside plain TCP
    Rpc(RpcBenchArgs),
}

#[derive(Debug, Args)]
pub(in crate::cli) struct StepBenchArgs {
    /// cifar10, resnet or line
    #[arg(long, default_value = "cifar10")]
    pub(in crate::cli) model: String,
    /// Timed steps
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = value_parser!(u64).range(1..))]
    pub(in crate::cli) num_batches: u64,
    /// Untimed steps before them
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(in crate::cli) num_warmup_batches: u64,
    /// Steps between lines
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(in crate::cli) display_every: u64,
    /// One JSON object at the end instead of lines
    #[arg(long)]
    pub(in crate::cli) json: bool,
    /// GPUs, one tower each
    #[arg(long, value_name = "N", conflicts_with = "num_towers")]
    pub(in crate::cli) num_gpus: Option<u64>,
    /// CPU towers
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(in crate::cli) num_towers: u64,
    /// Examples per tower [the model's default]
    #[arg(long, value_name = "N")]
    pub(in crate::cli) batch_size: Option<u64>,
    /// Threads of all towers together [all cores]
    #[arg(long, value_name = "N")]
    pub(in crate::cli) threads: Option<u64>,
    /// Where the data set lies
    #[arg(long, value_name = "DIR")]
    pub(in crate::cli) data_dir: Option<String>,
    /// Also the time of each operation, its GFLOP/s and GB/s, beside what the processor can do at most
    #[arg(long)]
    pub(in crate::cli) profile: bool,
    /// Any setting of the configuration
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(in crate::cli) set: Vec<String>,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct InputBenchArgs {
    /// Timed batches
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = value_parser!(u64).range(1..))]
    pub(in crate::cli) num_batches: u64,
    /// Examples per batch
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(1..))]
    pub(in crate::cli) batch_size: u32,
    /// Threads that prepare input
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = value_parser!(u32).range(1..))]
    pub(in crate::cli) input_threads: u32,
    /// Where CIFAR-10 lies [synthetic pictures]
    #[arg(long, value_name = "DIR")]
    pub(in crate::cli) data_dir: Option<PathBuf>,
    /// One JSON object instead of lines
    #[arg(long)]
    pub(in crate::cli) json: bool,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct ReduceBenchArgs {
    /// Bytes of the gradients, with commas between them
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_value = "65536,1048576,4300000,67108864", value_parser = value_parser!(u64).range(4..))]
    pub(in crate::cli) sizes: Vec<u64>,
    /// Processes
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = value_parser!(u32).range(2..=64))]
    pub(in crate::cli) ranks: u32,
    /// Rounds over all sizes
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = value_parser!(u64).range(1..))]
    pub(in crate::cli) rounds: u64,
    /// Which way gradients take: direct, ring
    #[arg(long, value_name = "WAY", default_value = "direct", value_parser = Exchange::NAMES.to_vec())]
    pub(in crate::cli) exchange: String,
    /// How floats travel: f32, bf16, f16
    #[arg(long, value_name = "FORMAT", default_value = "f32", value_parser = Wire::NAMES.to_vec())]
    pub(in crate::cli) wire: String,
    /// One JSON object instead of lines
    #[arg(long)]
    pub(in crate::cli) json: bool,
    /// Which of the processes this one is
    #[arg(long, value_name = "N", default_value_t = 0, hide = true)]
    pub(in crate::cli) rank: u32,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct RpcBenchArgs {
    /// Rounds, each of 20 exchanges of either kind in turn
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = value_parser!(u64).range(1..))]
    pub(in crate::cli) rounds: u64,
    /// One JSON object instead of lines
    #[arg(long)]
    pub(in crate::cli) json: bool,
    /// Be the server
    #[arg(long, hide = true)]
    pub(in crate::cli) serve: bool,
}
