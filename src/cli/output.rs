//! Everything that is printed: lines on stdout, diagnostics and progress on stderr.

use std::io::{ErrorKind, IsTerminal, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use jiff::tz::TimeZone;
use signal_hook::consts::SIGPIPE;

use super::args::Output;
use crate::session::Voice;
use crate::train::{Evaluation, Happening, Line, Report, StepReport, Weights};
use crate::util::clock::Clock;
use crate::util::stats::Speed;

/// Writes to stdout. The value is the exit code of a command that only prints.
pub(super) fn print(text: &str) -> Result<u8> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.context("cannot write to standard output")?;
    Ok(0)
}

/// Whether a reader of our output went away.
pub(super) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut kinds = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    kinds.any(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// Writes a line to stderr: what is no result. There is nobody to tell when that fails.
pub(super) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The placement log of sessions on stdout, where TensorFlow's servers have it, and what they wait for on stderr.
pub(super) struct PlacementLog;

impl Voice for PlacementLog {
    fn placement(&self, lines: &str) {
        // Who does not read the log still gets answers.
        let _ = print(lines);
    }

    fn note(&self, sentence: &str) {
        note(sentence);
    }
}

/// A progress bar for a download; hidden when stderr is no terminal.
pub(super) fn transfer(name: &str, size: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(size), target());
    let template =
        ">> Downloading {msg} {percent}% [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(name.to_owned());
    bar
}

fn target() -> ProgressDrawTarget {
    match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    }
}

/// `2026-11-29 19:27:40.337271` in local time.
pub(super) fn stamp(wall: Duration) -> String {
    let time = jiff::SignedDuration::try_from(wall)
        .ok()
        .and_then(|since| jiff::Timestamp::from_duration(since).ok())
        .unwrap_or_default();
    time.to_zoned(TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S.%6f").to_string()
}

/// Untimed steps before the benchmark's lines.
const WARM_UP: i64 = 10;

/// Prints what happens in a run.
pub(super) struct Console {
    format: Output,
    clock: Arc<dyn Clock>,
    bar: ProgressBar,
    classes: Vec<String>,
    /// Asks the supervisor to end the run.
    signal: Arc<AtomicUsize>,
    /// The task in front of each line, in a cluster.
    prefix: String,
    /// Untimed steps that are left, for the benchmark's lines; negative after them.
    warm_up: i64,
    /// Steps from one of the benchmark's lines to the next.
    display_every: u64,
    /// Step times since the warm-up, kept for the benchmark's lines only.
    times: Vec<Duration>,
    examples: usize,
}

impl Console {
    /// For a run of these steps; `task` is its name in a cluster.
    pub(super) fn new(
        format: Output,
        clock: Arc<dyn Clock>,
        steps: Range<u64>,
        classes: Vec<String>,
        signal: Arc<AtomicUsize>,
        task: Option<String>,
        display_every: u64,
    ) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps.end), target());
        let template = "[{elapsed_precise}] {bar:30} step {pos}/{len} (eta {eta})";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_position(steps.start);
        bar.reset_eta();
        let prefix = task.map_or_else(String::new, |task| format!("{task} "));
        Self {
            format,
            clock,
            bar,
            classes,
            signal,
            prefix,
            warm_up: WARM_UP,
            display_every: display_every.max(1),
            times: Vec::new(),
            examples: 0,
        }
    }

    fn say(&self, line: &str) -> Result<()> {
        match self.bar.suspend(|| print(&format!("{}{line}\n", self.prefix))) {
            // The reader went away, as `head` does: the run ends as by a signal, and saves.
            Err(error) if is_broken_pipe(&error) => {
                self.signal.store(SIGPIPE as usize, Ordering::Relaxed);
                Ok(())
            }
            result => result.map(|_| ()),
        }
    }

    fn line(&self, line: &Line) -> Result<()> {
        match self.format {
            Output::Json => self.say(&object("step", line)?),
            // By its own count of steps, see `count`.
            Output::Benchmark => Ok(()),
            Output::Tutorial if !line.variables.is_empty() => {
                let values: Vec<String> = line
                    .variables
                    .iter()
                    .map(|(name, value)| format!("{name}: {value:.6}"))
                    .collect();
                self.say(&format!(
                    "step: {}, {}, loss: {:.6}",
                    line.step,
                    values.join(", "),
                    line.loss
                ))
            }
            Output::Tutorial => self.say(&format!(
                "{}: step {}, loss = {:.2} ({:.1} examples/sec; {:.3} sec/batch)",
                stamp(self.clock.wall()),
                line.step,
                line.loss,
                line.examples_per_sec,
                line.sec_per_batch
            )),
        }
    }

    /// A step is done. The benchmark's lines count from the end of a warm-up, and show every `display_every`-th step.
    fn count(&mut self, report: &StepReport) -> Result<()> {
        self.bar.set_position(report.global_step);
        if self.format != Output::Benchmark {
            return Ok(());
        }
        self.warm_up -= 1;
        if self.warm_up == WARM_UP - 1 {
            self.say("Running warm up")?;
        }
        if self.warm_up == 0 {
            self.say("Done warm up\nStep\tImg/sec\ttotal_loss")?;
        }
        if self.warm_up < 0 {
            self.times.push(report.times.total());
            self.examples = report.examples;
            let local = self.times.len() as u64;
            if local == 1 || local.is_multiple_of(self.display_every) {
                let speed = Speed::of(&self.times, self.examples);
                self.say(&format!(
                    "{local}\timages/sec: {:.1} +/- {:.1} (jitter = {:.1})\t{:.3}",
                    speed.mean, speed.uncertainty, speed.jitter, report.loss
                ))?;
            }
        }
        Ok(())
    }

    /// The benchmark's last line.
    fn total(&self) -> Result<()> {
        if self.format != Output::Benchmark || self.times.is_empty() {
            return Ok(());
        }
        let rule = "-".repeat(64);
        let speed = Speed::of(&self.times, self.examples);
        self.say(&format!("{rule}\ntotal images/sec: {:.2}\n{rule}", speed.mean))
    }
}

impl Report for Console {
    fn report(&mut self, happening: &Happening<'_>) -> Result<()> {
        match happening {
            Happening::Step(report) => self.count(report)?,
            Happening::Line(line) => self.line(line)?,
            Happening::Evaluation(evaluation) if self.format == Output::Json => {
                self.say(&object("evaluation", evaluation)?)?;
            }
            Happening::Evaluation(evaluation) => {
                self.say(&precision_line(evaluation, self.clock.wall()))?;
                tracing::debug!("{}", class_table(evaluation, &self.classes));
            }
            Happening::Checkpoint { path, step } => {
                tracing::info!("saved step {step} to {}", path.display());
            }
            Happening::Summary(_) => {}
            Happening::End { .. } => {
                self.total()?;
                self.bar.finish_and_clear();
            }
        }
        Ok(())
    }
}

/// One JSON object that says what it is.
fn object(kind: &str, values: &impl serde::Serialize) -> Result<String> {
    let mut object = serde_json::to_value(values)?;
    object["kind"] = kind.into();
    Ok(object.to_string())
}

/// `<time>: precision @ 1 = 0.765 (top 5 0.981, 10000 examples, averaged weights, step 5000)`.
pub(super) fn precision_line(evaluation: &Evaluation, wall: Duration) -> String {
    let weights = match evaluation.weights {
        Weights::Raw => "raw",
        Weights::Averaged => "averaged",
    };
    format!(
        "{}: precision @ 1 = {:.4} (top 5 {:.4}, {} examples, {weights} weights, step {})",
        stamp(wall),
        evaluation.precision,
        evaluation.top5,
        evaluation.examples,
        evaluation.step
    )
}

/// Hits by class, one line each.
pub(super) fn class_table(evaluation: &Evaluation, names: &[String]) -> String {
    let width = names.iter().map(String::len).max().unwrap_or(0);
    let mut table = String::new();
    for (score, name) in evaluation.classes.iter().zip(names) {
        let share = score.correct as f64 / score.total.max(1) as f64;
        table += &format!("  {name:width$}  {:5} / {:5}  {share:.3}\n", score.correct, score.total);
    }
    table
}
