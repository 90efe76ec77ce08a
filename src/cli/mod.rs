//! The commands, one file each; [`args`] holds the flags, [`exit`] the exit codes.

mod args;
mod bench;
mod cluster;
mod data;
mod devices;
mod eval;
mod exit;
mod inspect;
mod launch;
mod output;
mod predict;
mod setup;
mod train;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use signal_hook::consts::signal::SIGXFSZ;

use self::args::{Cli, Command};

/// Runs the program; the value is its exit code.
pub fn main() -> ExitCode {
    let cli = Cli::parse_from(normalized(std::env::args_os()));
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    match fail_beyond_size_limits().and_then(|()| dispatch(cli.command)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => exit::fail(&error),
    }
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
        Command::Launch(args) => launch::launch(&args),
        Command::Eval(args) => eval::eval(&args),
        Command::Predict(args) => predict::predict(&args),
        Command::Bench(args) => bench::bench(&args),
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

/// Arguments in this program's spelling: `--num_gpus` is `--num-gpus`, as TensorFlow's scripts write it, and
/// `tftrain --config FILE` is `tftrain train --config FILE`.
fn normalized(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut out = Vec::new();
    for (i, arg) in args.enumerate() {
        let arg = match arg.to_str() {
            Some(flag) if flag.starts_with("--") => {
                let (name, value) = match flag.split_once('=') {
                    Some((name, value)) => (name, Some(value)),
                    None => (flag, None),
                };
                let name = name.replace('_', "-");
                value.map_or(name.clone(), |value| format!("{name}={value}")).into()
            }
            _ => arg,
        };
        if i == 1 && arg.to_str().is_some_and(|a| a == "--config" || a.starts_with("--config=")) {
            out.push("train".into());
        }
        out.push(arg);
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
        let out = normalized(["tftrain", "--config", "x.yaml"].iter().map(OsString::from));
        assert_eq!(out, ["tftrain", "train", "--config", "x.yaml"]);
    }
}
