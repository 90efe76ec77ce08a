//! A folder to run the program in, and what a run left behind.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tftrain::data::Pictures;
use tftrain::io::{Snapshot, checkpoint};

/// The tutorial network on pictures drawn by the program, small and quiet enough for a test.
pub(crate) const SMALL: &str =
    "cifar10 --synthetic --batch-size 8 --set data.examples=100 --summary-every 0";

/// A folder of its own, in which the program runs.
pub(crate) struct Space(TempDir);

/// How a run ended and what it printed.
pub(crate) struct Ended {
    /// The exit code; a signal's number is negative.
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        use std::os::unix::process::ExitStatusExt;
        let code = output.status.code().or(output.status.signal().map(|signal| -signal));
        let text = |bytes| String::from_utf8(bytes).expect("the program prints UTF-8");
        Self { code: code.unwrap(), out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Ended {
    /// Demands an exit code; an error is one message without a panic.
    #[track_caller]
    pub(crate) fn code(self, wanted: i32) -> Self {
        let Self { code, out, err } = &self;
        assert_eq!(*code, wanted, "stdout:\n{out}\nstderr:\n{err}");
        assert!(!err.contains("panicked") && !err.contains("RUST_BACKTRACE"), "{err}");
        self
    }

    /// Demands words on stderr.
    #[track_caller]
    pub(crate) fn says(self, words: &[&str]) -> Self {
        words
            .iter()
            .for_each(|word| assert!(self.err.contains(word), "no {word} in: {}", self.err));
        self
    }
}

/// The program: cargo's, or another one that `TFTRAIN_BIN` names.
pub(crate) fn program() -> std::ffi::OsString {
    std::env::var_os("TFTRAIN_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_tftrain").into())
}

impl Space {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The program with arguments that are separated by spaces, in this folder.
    pub(crate) fn command(&self, args: &str) -> Command {
        let mut command = Command::new(program());
        command.args(args.split_whitespace()).current_dir(self.0.path()).env_remove("RUST_LOG");
        // Whatever the machine has: tests of GPUs ask for them.
        command.stdin(Stdio::null()).env("CUDA_VISIBLE_DEVICES", "");
        command
    }

    pub(crate) fn run(&self, args: &str) -> Ended {
        self.command(args).output().unwrap().into()
    }

    /// Runs to a good end.
    #[track_caller]
    pub(crate) fn ok(&self, args: &str) -> Ended {
        self.run(args).code(0)
    }

    /// A script of the shell, in which `$TFTRAIN` is the program.
    pub(crate) fn shell(&self, script: &str) -> Ended {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).env("TFTRAIN", program());
        shell.env_remove("RUST_LOG").env("CUDA_VISIBLE_DEVICES", "").stdin(Stdio::null());
        shell.current_dir(self.0.path()).output().unwrap().into()
    }

    /// Starts the program; it ends with the value at the latest.
    pub(crate) fn start(&self, args: &str) -> Live {
        self.spawn(&mut self.command(args))
    }

    /// As [`Space::start`], for a command that was changed.
    pub(crate) fn spawn(&self, command: &mut Command) -> Live {
        Live(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// As [`Space::start`], with a stdout that nobody reads.
    pub(crate) fn spawn_unread(&self, args: &str) -> Live {
        Live(self.command(args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap())
    }

    /// As [`Space::start`], with the lines of stdout in a file.
    pub(crate) fn start_into(&self, file: &str, args: &str) -> Live {
        let out = fs::File::create(self.path(file)).unwrap();
        Live(self.command(args).stdout(out).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// How many lines a file has.
    pub(crate) fn lines(&self, file: &str) -> usize {
        fs::read_to_string(self.path(file)).map_or(0, |text| text.lines().count())
    }

    /// A CIFAR-10 folder: 5 batches of `records` pictures, and `held_out` ones to measure on. Labels go round, and the
    /// brightness of a picture tells its label.
    pub(crate) fn pictures(&self, name: &str, records: usize, held_out: usize) {
        let dir = self.path(name);
        fs::create_dir_all(&dir).unwrap();
        let batches = (1..=5).map(|i| (format!("data_batch_{i}.bin"), i * 1000, records));
        for (file, first, count) in batches.chain([("test_batch.bin".to_owned(), 0, held_out)]) {
            let bytes: Vec<u8> = (first..first + count).flat_map(record).collect();
            fs::write(dir.join(file), bytes).unwrap();
        }
    }

    /// The steps of the whole checkpoints of a run, ascending.
    pub(crate) fn checkpoints(&self, run: &str) -> Vec<u64> {
        let Ok(entries) = fs::read_dir(self.path(run)) else { return Vec::new() };
        let step = |name: &str| {
            name.strip_prefix("model.ckpt-")?.strip_suffix(".safetensors")?.parse::<u64>().ok()
        };
        let mut steps: Vec<u64> =
            entries.filter_map(|e| step(e.unwrap().file_name().to_str()?)).collect();
        steps.sort_unstable();
        steps
    }

    /// The checkpoint of a step.
    #[track_caller]
    pub(crate) fn checkpoint(&self, run: &str, step: u64) -> Snapshot {
        let path = self.path(run).join(format!("model.ckpt-{step}.safetensors"));
        let snapshot = checkpoint::load(&path).unwrap();
        assert_eq!(snapshot.global_step, step);
        snapshot
    }

    /// The rows of `metrics.jsonl` of a kind.
    #[track_caller]
    pub(crate) fn rows(&self, run: &str, kind: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap_or_default();
        let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        rows.filter(|row| row["kind"] == kind).collect()
    }

    /// How many steps a running program has logged.
    pub(crate) fn steps_so_far(&self, run: &str) -> u64 {
        let text = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap_or_default();
        text.lines().filter(|line| line.contains(r#""kind":"step""#)).count() as u64
    }

    /// The steps in rows of `metrics.jsonl`, in their order.
    pub(crate) fn steps(&self, run: &str, kind: &str) -> Vec<u64> {
        self.rows(run, kind).iter().map(|row| row["step"].as_u64().unwrap()).collect()
    }
}

/// Ports that were free a moment ago.
pub(crate) fn ports(n: usize) -> Vec<u16> {
    let listeners: Vec<TcpListener> =
        (0..n).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

/// Writes a cluster file of `ps` parameter servers and `workers` workers.
pub(crate) fn cluster(space: &Space, name: &str, ps: usize, workers: usize, rest: &str) {
    let ports = ports(ps + workers);
    let list = |ports: &[u16]| -> String {
        ports.iter().map(|port| format!("\"127.0.0.1:{port}\"")).collect::<Vec<_>>().join(", ")
    };
    let mut text = String::from("model: line\ndata: {name: line}\ncluster:\n");
    if ps > 0 {
        text += &format!("  ps: [{}]\n", list(&ports[..ps]));
    }
    text += &format!("  worker: [{}]\n{rest}", list(&ports[ps..]));
    fs::write(space.path(name), text).unwrap();
}

/// A CIFAR-10 record.
pub(crate) fn record(i: usize) -> Vec<u8> {
    let label = (i % 10) as u8;
    let pixel = |p: usize| (label * 20).wrapping_add(((p * 7 + i * 13) % 50) as u8);
    std::iter::once(label).chain((0..Pictures::PIXELS).map(pixel)).collect()
}

/// Demands the same bits in every tensor of two checkpoints, and the same position in the data.
#[track_caller]
pub(crate) fn same(a: &Snapshot, b: &Snapshot) {
    let bits = |snapshot: &Snapshot| -> Vec<(String, Vec<usize>, Vec<u32>)> {
        let one = |(name, tensor): &(String, tftrain::tensor::HostTensor)| {
            let values = tensor.as_f32().unwrap().iter().map(|v| v.to_bits()).collect();
            (name.clone(), tensor.shape().to_vec(), values)
        };
        snapshot.tensors.iter().map(one).collect()
    };
    let (x, y) = (bits(a), bits(b));
    let names = |all: &[(String, Vec<usize>, Vec<u32>)]| {
        all.iter().map(|(name, shape, _)| (name.clone(), shape.clone())).collect::<Vec<_>>()
    };
    assert_eq!(names(&x), names(&y));
    assert!(!x.is_empty());
    let differ: Vec<_> =
        x.iter().zip(&y).filter(|(x, y)| x.2 != y.2).map(|(x, _)| x.0.as_str()).collect();
    assert!(differ.is_empty(), "these differ: {differ:?}");
    assert_eq!((a.global_step, &a.metadata), (b.global_step, &b.metadata));
}

/// A running program, killed with this value.
pub(crate) struct Live(Child);

impl Live {
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Waits until something shows; a program that ends before, or takes minutes, fails the test.
    #[track_caller]
    pub(crate) fn until(&mut self, shows: impl Fn() -> bool) {
        for _ in 0..12_000 {
            if shows() {
                return;
            }
            let ended = self.0.try_wait().unwrap();
            assert!(ended.is_none() || shows(), "ended too early: {ended:?}: {}", self.stderr());
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("nothing showed in two minutes");
    }

    /// Sends a signal by its name.
    pub(crate) fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.id());
        Command::new("sh").args(["-c", &kill]).stderr(Stdio::null()).status().unwrap();
    }

    fn stderr(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut stderr) = self.0.stderr.take() {
            stderr.read_to_string(&mut text).unwrap();
        }
        text
    }

    /// Waits for the end.
    pub(crate) fn ended(mut self) -> Ended {
        let err = self.stderr();
        let status = self.0.wait().unwrap();
        Ended { err, ..Output { status, stdout: Vec::new(), stderr: Vec::new() }.into() }
    }

    /// Ends the program without a chance to save.
    pub(crate) fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
