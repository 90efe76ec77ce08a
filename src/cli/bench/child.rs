//! Other processes of this program, for benchmarks between tasks.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child as Process, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

/// A process that says and hears lines, and ends with this value.
pub(super) struct Child {
    process: Process,
    says: BufReader<ChildStdout>,
}

impl Child {
    /// Starts this program with other arguments.
    pub(super) fn start(args: &[String]) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut process = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start another process")?;
        let Some(stdout) = process.stdout.take() else { bail!("another process has no output") };
        Ok(Self { process, says: BufReader::new(stdout) })
    }

    /// The next line that it says.
    pub(super) fn hear(&mut self) -> Result<String> {
        line(&mut self.says)
    }

    /// Says a line to it.
    pub(super) fn tell(&mut self, line: &str) -> Result<()> {
        let Some(stdin) = &mut self.process.stdin else { bail!("another process has no input") };
        writeln!(stdin, "{line}").context("cannot speak to another process")
    }

    /// Waits for its end, which must be a good one.
    pub(super) fn finish(mut self) -> Result<()> {
        let status = self.process.wait().context("cannot wait for another process")?;
        if !status.success() {
            bail!("another process ended with {status}");
        }
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // One that has ended cannot be killed, and needs not.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What a child hears: the next line of its input.
pub(super) fn hear() -> Result<String> {
    line(&mut std::io::stdin().lock())
}

fn line(from: &mut impl BufRead) -> Result<String> {
    let mut line = String::new();
    let read = from.read_line(&mut line).context("cannot hear another process")?;
    if read == 0 {
        bail!("another process ended before it was asked to");
    }
    Ok(line.trim().to_owned())
}
