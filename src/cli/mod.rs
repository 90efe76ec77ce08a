//! The commands, one file each; [`args`] holds the flags, [`exit`] the exit codes.

mod args;
mod bench;
mod certs;
mod cluster;
mod cluster_args;
mod data;
mod devices;
mod eval;
mod exit;
mod feeds;
mod gpus;
mod header;
mod inspect;
mod launch;
mod output;
mod predict;
mod run;
mod run_graph;
mod security;
mod serve;
mod sessions;
mod setup;
mod train;
mod watchdog;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use signal_hook::consts::signal::SIGXFSZ;
use tracing_subscriber::EnvFilter;

use self::args::{Cli, Command};

/// Runs the program; the value is its exit code.
pub fn main() -> ExitCode {
    let cli = Cli::parse_from(normalized(std::env::args_os()));
    log_to_stderr();
    devices::keep_kernels();
    devices::look_for_nccl();
    let ready = fail_beyond_size_limits().and_then(|()| Ok(devices::limit_instructions()?));
    match ready.and_then(|()| dispatch(cli.command)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => exit::fail(&error),
    }
}

/// What `RUST_LOG` asks for; warnings of this program where it says nothing.
fn log_to_stderr() {
    let filter =
        EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("tftrain=warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
}

/// Lets a write beyond `ulimit -f` fail, which is told, where the signal would end the process without a word.
fn fail_beyond_size_limits() -> anyhow::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::default()).context("cannot listen to SIGXFSZ")?;
    Ok(())
}

fn dispatch(command: Command) -> anyhow::Result<u8> {
    match command {
        Command::Cifar10(args) => train::train(Some("cifar10"), None, &args),
        Command::LineFit(args) => train::train(Some("line"), None, &args),
        Command::Train(args) => train::train(None, Some(&args.config), &args.common),
        Command::Serve(args) => train::serve(args.config.as_deref(), &args.common),
        Command::Launch(args) => launch::launch(&args),
        Command::Certs(args) => certs::certs(&args),
        Command::Eval(args) => eval::eval(&args),
        Command::Predict(args) => predict::predict(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Run(args) => run_graph::run(&args),
        Command::Devices => devices::devices(),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Data(args) => data::data(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "tftrain", &mut script);
            output::print(&String::from_utf8_lossy(&script))
        }
        Command::Man => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command()).render(&mut page)?;
            output::print(&String::from_utf8_lossy(&page))
        }
    }
}

/// Switches that TensorFlow's scripts also write as `--flag True` and `--noflag`.
const SWITCHES: [&str; 7] = [
    "--allow-soft-placement",
    "--async-towers",
    "--log-device-placement",
    "--overwrite",
    "--resume",
    "--run-once",
    "--synthetic",
];

/// Arguments in this program's spelling: `--num_gpus` is `--num-gpus`, `--log_device_placement True` is
/// `--log-device-placement=True`, and `tftrain --config FILE` is `tftrain train --config FILE`. What follows a bare `--`
/// stays as it is.
fn normalized(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args = args.peekable();
    let mut out: Vec<OsString> = args.next().into_iter().collect();
    while let Some(arg) = args.next() {
        let Some(flag) = arg.to_str().filter(|flag| flag.starts_with("--")) else {
            out.push(arg);
            continue;
        };
        if flag == "--" {
            out.push(arg);
            break;
        }
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        let mut name = name.replace('_', "-");
        let mut value = value;
        let positive = name.strip_prefix("--no").map(|rest| format!("--{rest}"));
        if let Some(positive) = positive.filter(|name| SWITCHES.contains(&name.as_str())) {
            (name, value) = (positive, Some("false".to_owned()));
        } else if SWITCHES.contains(&name.as_str()) && value.is_none() {
            let next = args.next_if(|next| next == "True" || next == "False");
            value = next.and_then(|next| next.into_string().ok());
        }
        out.push(value.map_or(name.clone(), |value| format!("{name}={value}")).into());
    }
    out.extend(args);
    let is = |arg: &OsString, start: &str| arg.to_str().is_some_and(|arg| arg.starts_with(start));
    if out.get(1).is_some_and(|first| is(first, "--")) && out.iter().any(|arg| is(arg, "--config"))
    {
        out.insert(1, "train".into());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn takes_tensorflows_spelling() {
        let args = ["tftrain", "cifar10", "--num_gpus=2", "--train_dir", "a_b", "--data_dir=c_d"];
        let out = normalized(args.iter().map(OsString::from));
        assert_eq!(
            out,
            ["tftrain", "cifar10", "--num-gpus=2", "--train-dir", "a_b", "--data-dir=c_d"]
        );
        let args =
            ["tftrain", "train", "--log_device_placement", "True", "--nosynthetic", "--", "--a_b"];
        let out = normalized(args.iter().map(OsString::from));
        assert_eq!(
            out,
            ["tftrain", "train", "--log-device-placement=True", "--synthetic=false", "--", "--a_b"]
        );
        let out = normalized(["tftrain", "--config", "x.yaml"].iter().map(OsString::from));
        assert_eq!(out, ["tftrain", "train", "--config", "x.yaml"]);
    }
}
