//! `tftrain`: parse the arguments, do what they say, print the error chain once, choose the exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    tftrain::cli::main()
}
