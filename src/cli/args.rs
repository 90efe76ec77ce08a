//! The flags as typed; no logic.

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

use super::cluster_args::ClusterArgs;

/// Trains neural networks on every device of a machine, the way distributed TensorFlow 1 did it.
#[derive(Debug, Parser)]
#[command(name = "tftrain", version, infer_subcommands = false, arg_required_else_help = true)]
// As in TensorFlow's scripts, of a flag given twice the last counts.
#[command(args_override_self = true)]
#[command(
    after_help = "Flags may be written as TensorFlow's scripts do: --num_gpus, --train_dir, ...\n\
    Exit codes: 0 done, 2 usage, 3 data, 4 peers missing, 5 peer lost, 6 diverged, 7 storage, 8 refused, 9 device,\n\
    130/143 interrupted and saved, 141 our output was closed, 1 anything else."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train the CIFAR-10 tutorial network
    Cifar10(Box<TrainArgs>),
    /// Fit y = 5x + 8: the smallest run there is
    LineFit(Box<TrainArgs>),
    /// Train what a YAML file describes
    Train(Box<ConfigArgs>),
    /// Start a task of a cluster that only serves
    Serve(Box<ServeArgs>),
    /// Start every task of a cluster on this machine
    Launch(LaunchArgs),
    /// Make certificates for the tasks of a cluster
    Certs(super::certs::CertsArgs),
    /// Evaluate the checkpoints of a run
    Eval(EvalArgs),
    /// Tell the classes of pictures: CIFAR records, PNG or JPEG files
    Predict(PredictArgs),
    /// Run a graph that TensorFlow wrote, here or on a server, or only place it
    Run(super::run_graph::RunArgs),
    /// Measure examples per second and their parts
    Bench(super::bench::BenchArgs),
    /// List the devices and the CUDA libraries that were found
    Devices,
    /// Look into a file that the program reads or writes
    Inspect(InspectArgs),
    /// Get a data set or describe it
    Data(DataArgs),
    /// Print shell completions
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page
    Man,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// The YAML file
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,
    #[command(flatten)]
    pub(crate) common: TrainArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The YAML file [the cifar10 recipe]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) common: TrainArgs,
}

/// How step lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// As the CIFAR-10 tutorial prints them
    #[default]
    Tutorial,
    /// As tf_cnn_benchmarks prints them
    Benchmark,
    /// One JSON object a line
    Json,
}

#[derive(Debug, Default, Args)]
pub(crate) struct TrainArgs {
    /// GPUs to use, one tower each
    #[arg(long, value_name = "N", conflicts_with = "num_towers")]
    pub(crate) num_gpus: Option<u64>,
    /// Which GPUs, by their numbers among the visible ones, a tower on each in this order: 0,2
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "num_towers")]
    pub(crate) gpu_indices: Vec<u16>,
    /// CPU towers to use
    #[arg(long, value_name = "N")]
    pub(crate) num_towers: Option<u64>,
    /// Let towers run on the CPU where a GPU was asked for but is not there
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub(crate) allow_soft_placement: Option<bool>,
    /// Print the device of every operation
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub(crate) log_device_placement: Option<bool>,
    /// Examples per tower and step [cifar10: 128]
    #[arg(long, value_name = "N")]
    pub(crate) batch_size: Option<u64>,
    /// The run ends when the global step reaches this
    #[arg(long, value_name = "N")]
    pub(crate) max_steps: Option<u64>,
    /// Where checkpoints, events and metrics go
    #[arg(long, value_name = "DIR")]
    pub(crate) train_dir: Option<String>,
    /// Where the data set lies
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<String>,
    /// Pictures drawn by the program itself; needs no file
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub(crate) synthetic: Option<bool>,
    /// Go on with the run in --train-dir
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_parser = boolean, action = ArgAction::Set)]
    pub(crate) resume: bool,
    /// Replace the run in --train-dir
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_parser = boolean, action = ArgAction::Set)]
    pub(crate) overwrite: bool,
    /// A constant learning rate instead of the configured schedule
    #[arg(long, value_name = "RATE")]
    pub(crate) learning_rate: Option<f64>,
    /// Micro-batches per tower, averaged before each update
    #[arg(long, value_name = "K")]
    pub(crate) accumulate: Option<u64>,
    /// Towers update the variables without waiting for each other
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_parser = boolean, action = ArgAction::Set)]
    pub(crate) async_towers: bool,
    /// Where variables live: cpu, replicated
    #[arg(long, value_name = "WHERE")]
    pub(crate) variables: Option<String>,
    /// How gradients are averaged, in the words of TensorFlow's benchmarks: nccl, pscpu, xring, nccl/pscpu, nccl/xring
    #[arg(long, value_name = "SPEC", conflicts_with = "reduce")]
    pub(crate) all_reduce_spec: Option<String>,
    /// How gradients are averaged: auto, cpu, nccl, none
    #[arg(long, value_name = "HOW")]
    pub(crate) reduce: Option<String>,
    /// How products and convolutions compute: f32, bf16, or tf32 on GPUs [f32]
    #[arg(long, value_name = "TYPE")]
    pub(crate) precision: Option<String>,
    /// Of all random numbers
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Threads of all towers together, at least one each [all cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<u64>,
    /// Threads that prepare input
    #[arg(long, value_name = "N")]
    pub(crate) input_threads: Option<u64>,
    /// Steps between step lines
    #[arg(long, visible_alias = "log-frequency", value_name = "N")]
    pub(crate) log_every: Option<u64>,
    /// Steps between histograms; 0 for none
    #[arg(long, value_name = "N")]
    pub(crate) summary_every: Option<u64>,
    /// Steps between evaluations
    #[arg(long, value_name = "N")]
    pub(crate) eval_every: Option<u64>,
    /// Seconds between checkpoints
    #[arg(long, visible_alias = "save-model-secs", value_name = "SECS")]
    pub(crate) save_secs: Option<f64>,
    /// Steps between checkpoints
    #[arg(long, visible_alias = "save-model-steps", value_name = "N")]
    pub(crate) save_steps: Option<u64>,
    /// Newest checkpoints to keep; 0 for all
    #[arg(long, visible_alias = "max-to-keep", value_name = "N")]
    pub(crate) keep: Option<u64>,
    /// Also keep for good one checkpoint per so many hours
    #[arg(long, visible_alias = "keep-checkpoint-every-n-hours", value_name = "HOURS")]
    pub(crate) keep_every_hours: Option<f64>,
    /// First steps to draw in trace.json of --train-dir, for Chrome's trace viewer or Perfetto
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) trace_steps: u64,
    /// Any setting of the configuration, by its key: optimizer.momentum=0.9
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
    /// How step lines look
    #[arg(long, value_enum, default_value_t)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// The YAML file with its `cluster`
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,
    /// Restart a task that fails, this often each
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) restart: u32,
    /// Print the command of each task instead
    #[arg(long)]
    pub(crate) print: bool,
    /// Flags for every task, after `--`
    #[arg(last = true, value_name = "FLAGS")]
    pub(crate) rest: Vec<String>,
}

/// Which values of the variables to judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightsArg {
    /// As trained
    Raw,
    /// Their moving averages
    Averaged,
    /// One after the other
    Both,
}

/// Which part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EvalData {
    /// The held-out pictures
    Test,
    /// Those that were trained on, without distortion
    #[value(name = "train-eval", alias = "train_eval")]
    TrainEval,
}

#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    /// The directory of the run
    #[arg(long, visible_alias = "checkpoint-dir", value_name = "DIR")]
    pub(crate) train_dir: PathBuf,
    /// Where the data set lies [as in the run]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Which pictures
    #[arg(long, value_enum, default_value = "test")]
    pub(crate) eval_data: EvalData,
    /// Which weights
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) weights: WeightsArg,
    /// Count only the first pictures [all]
    #[arg(long, value_name = "N")]
    pub(crate) num_examples: Option<usize>,
    /// Follow a running job: look for a new checkpoint this often
    #[arg(long, value_name = "SECS")]
    pub(crate) eval_interval_secs: Option<f64>,
    /// Evaluate the newest checkpoint and stop; so it is without --eval-interval-secs
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub(crate) run_once: Option<bool>,
    /// When following, stop after a checkpoint of at least this step
    #[arg(long, value_name = "N", requires = "eval_interval_secs")]
    pub(crate) until_step: Option<u64>,
    /// Where TensorBoard events of the evaluation go [none]
    #[arg(long, value_name = "DIR")]
    pub(crate) eval_dir: Option<PathBuf>,
    /// Threads [all cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// One JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

impl EvalArgs {
    /// What an evaluator task of a cluster does: every new checkpoint, up to the last step.
    pub(crate) fn following(train_dir: &str, last_step: u64) -> Self {
        Self {
            train_dir: train_dir.into(),
            data_dir: None,
            eval_data: EvalData::Test,
            weights: WeightsArg::Both,
            num_examples: None,
            eval_interval_secs: Some(1.0),
            run_once: None,
            until_step: Some(last_step),
            eval_dir: None,
            threads: None,
            json: false,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct PredictArgs {
    /// CIFAR record files (.bin), PNG or JPEG files
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// The directory of the run
    #[arg(long, value_name = "DIR")]
    pub(crate) train_dir: PathBuf,
    /// Classes to print per picture
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) top: usize,
    /// Pictures to take from a record file
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) records: usize,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    #[command(subcommand)]
    pub(crate) what: InspectWhat,
}

#[derive(Debug, Subcommand)]
pub(crate) enum InspectWhat {
    /// The tensors of a checkpoint, or of the newest one of a run
    Checkpoint {
        /// File, prefix of TensorFlow's files, or run directory
        path: PathBuf,
    },
    /// The values of a TensorBoard event file, or of all of a run
    Events {
        /// File or run directory
        path: PathBuf,
    },
    /// The records of a CIFAR-10 folder, or of a CIFAR-100 one
    Dataset {
        /// Folder
        path: PathBuf,
        /// cifar10 or cifar100
        #[arg(long, default_value = "cifar10")]
        name: String,
    },
    /// A configuration file, resolved, each value with its origin
    Config {
        /// YAML file
        path: PathBuf,
        /// Any setting of the configuration
        #[arg(long = "set", value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
    /// The graph of a model: variables, operations, shapes
    Model {
        /// cifar10, resnet, line, or a YAML file
        path: String,
        /// Examples per batch
        #[arg(long, value_name = "N", default_value_t = 128)]
        batch_size: usize,
    },
}

#[derive(Debug, Args)]
pub(crate) struct DataArgs {
    #[command(subcommand)]
    pub(crate) what: DataWhat,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DataWhat {
    /// Download, check and unpack a data set
    Fetch {
        /// cifar10 or cifar100
        name: String,
        /// Where to [data/NAME]
        #[arg(long, value_name = "DIR")]
        data_dir: Option<PathBuf>,
        /// Another place to download from; size and digest stay the published ones
        #[arg(long, value_name = "URL")]
        url: Option<String>,
    },
    /// Where a data set comes from and how it is laid out
    Info {
        /// cifar10, cifar100, synthetic or line
        name: String,
    },
}

/// `--flag`, `--flag=true` and Python's `--flag=True`.
fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" => Ok(true),
        "false" | "0" | "no" => Ok(false),
        _ => Err("expected true or false".to_owned()),
    }
}
