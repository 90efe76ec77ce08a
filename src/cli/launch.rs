//! `tftrain launch`: every task of a cluster file on this machine, as children of one command.
//!
//! A child dies with its launcher: its standard input is a pipe from here, and a task that was launched ends when that pipe
//! does (see [`end_with_launcher`]), which also holds after `kill -9`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result};

use super::args::LaunchArgs;
use super::exit::Usage;
use super::output::{note, print};
use super::{setup, train};
use crate::cluster::{EVALUATOR, TaskId};
use crate::config::Layers;
use crate::train::has_client;
use crate::util::clock::{Clock, SystemClock};

/// Tells a task that it was launched from here.
const LAUNCHED: &str = "TFTRAIN_LAUNCHED";

/// How long children get to save after the first one failed or a signal came.
const GRACE: Duration = Duration::from_secs(10);

/// A line that a child printed.
type Line = (TaskId, String);

/// A running task.
struct Task {
    child: Child,
    restarts: u32,
}

/// Starts all tasks, prints their lines with the task in front, and ends with the first failure's exit code.
pub(super) fn launch(args: &LaunchArgs) -> Result<u8> {
    let layers = setup::with_file(Layers::new(None), &args.config)?;
    let config = layers.resolve()?.config;
    let spec = &config.cluster.jobs;
    if spec.is_empty() {
        let text = format!("{} describes no cluster: it has no `cluster:`", args.config.display());
        return Err(Usage(text).into());
    }
    let mut all: Vec<(TaskId, &str)> = spec.all().collect();
    let client = spec.client();
    if has_client(&config) && spec.address(&client).is_none() {
        all.push((client, "any address"));
    }
    if args.print {
        return print(&commands(&all, args));
    }
    let signal = train::signals()?;
    let (tell, told) = channel();
    let mut tasks = BTreeMap::new();
    for (task, _) in all {
        let child = start(&task, args, 0, &tell)?;
        tasks.insert(task, Task { child, restarts: 0 });
    }
    let code = supervise(&mut tasks, args, &tell, &told, &signal)?;
    Ok(code)
}

fn start(task: &TaskId, args: &LaunchArgs, restarts: u32, tell: &Sender<Line>) -> Result<Child> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut child = Command::new(program)
        .args(arguments(task, args, restarts))
        .env(LAUNCHED, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {task}"))?;
    if let Some(stdout) = child.stdout.take() {
        follow(task.clone(), stdout, tell.clone());
    }
    if let Some(stderr) = child.stderr.take() {
        follow(task.clone(), stderr, tell.clone());
    }
    Ok(child)
}

/// The arguments of one task. One that is started again goes on with what its first life left.
fn arguments(task: &TaskId, args: &LaunchArgs, restarts: u32) -> Vec<String> {
    let mut out = vec!["train".to_owned(), "--config".to_owned()];
    out.push(args.config.display().to_string());
    out.extend(["--job-name".to_owned(), task.job.clone()]);
    out.extend(["--task-index".to_owned(), task.index.to_string()]);
    out.extend(args.rest.iter().cloned());
    if restarts > 0 {
        out.retain(|argument| !["--overwrite", "--resume"].contains(&argument.as_str()));
        out.push("--resume".to_owned());
    }
    out
}

fn commands(tasks: &[(TaskId, &str)], args: &LaunchArgs) -> String {
    let line = |(task, address): &(TaskId, &str)| {
        let words: Vec<String> = arguments(task, args, 0).iter().map(|word| quoted(word)).collect();
        format!("tftrain {}   # on the host of {address}\n", words.join(" "))
    };
    tasks.iter().map(line).collect()
}

/// A word as a shell reads it back.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,@%+{}".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Sends the lines of a pipe until it ends.
fn follow(task: TaskId, pipe: impl Read + Send + 'static, tell: Sender<Line>) {
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            if tell.send((task.clone(), line)).is_err() {
                return;
            }
        }
    });
}

fn supervise(
    tasks: &mut BTreeMap<TaskId, Task>,
    args: &LaunchArgs,
    tell: &Sender<Line>,
    told: &Receiver<Line>,
    signal: &Arc<AtomicUsize>,
) -> Result<u8> {
    let clock = SystemClock::default();
    let mut code = 0;
    let mut ending: Option<Duration> = None;
    while !tasks.is_empty() {
        let mut next = told.recv_timeout(Duration::from_millis(50)).ok();
        while let Some((task, line)) = next {
            print(&format!("[{task}] {line}\n"))?;
            next = told.try_recv().ok();
        }
        let mut ended = Vec::new();
        for (task, running) in tasks.iter_mut() {
            if let Some(status) = running.child.try_wait().with_context(|| format!("{task}"))? {
                ended.push((task.clone(), exit_code(status), running.restarts));
            }
        }
        for (task, child_code, restarts) in ended {
            tasks.remove(&task);
            if child_code == 0 {
                continue;
            }
            note(&format!("[launch] {task} ended with exit code {child_code}"));
            // Nobody waits for an evaluator, in its death neither.
            if task.job == EVALUATOR {
                continue;
            }
            if ending.is_none() && restarts < args.restart {
                note(&format!("[launch] restarting {task}, {} of {}", restarts + 1, args.restart));
                let restarts = restarts + 1;
                let child = start(&task, args, restarts, tell)?;
                tasks.insert(task, Task { child, restarts });
                continue;
            }
            if code == 0 {
                code = child_code;
            }
            ending.get_or_insert_with(|| clock.monotonic());
        }
        if signal.load(Ordering::Relaxed) != 0 && ending.is_none() {
            code = 128 + signal.load(Ordering::Relaxed) as u8;
            ending = Some(clock.monotonic());
        }
        if ending.is_some() {
            // The end of its input asks a task to finish its step and save.
            tasks.values_mut().for_each(|running| running.child.stdin = None);
        }
        if ending.is_some_and(|since| clock.monotonic() - since > GRACE) {
            for (task, running) in tasks.iter_mut() {
                note(&format!("[launch] {task} did not end in time: killed"));
                running.child.kill().with_context(|| format!("cannot end {task}"))?;
            }
        }
    }
    // What the last ones said before they ended.
    while let Ok((task, line)) = told.recv_timeout(Duration::from_millis(100)) {
        print(&format!("[{task}] {line}\n"))?;
    }
    Ok(code)
}

/// The code that a shell would report.
fn exit_code(status: std::process::ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// In a task that was launched: raises SIGTERM's flag when the launcher is gone.
#[allow(clippy::disallowed_methods, reason = "the mark of the launcher is read where it is set")]
pub(super) fn end_with_launcher(signal: &Arc<AtomicUsize>) {
    if std::env::var(LAUNCHED).is_err() {
        return;
    }
    let signal = signal.clone();
    std::thread::spawn(move || {
        let mut nothing = [0; 64];
        while std::io::stdin().read(&mut nothing).is_ok_and(|n| n > 0) {}
        let _ = signal.compare_exchange(
            0,
            signal_hook::consts::SIGTERM as usize,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    });
}
