//! Several GPUs: NCCL between them, in one process and in several.

use std::fs;

use crate::cli::{Live, Space, ports, same};
use crate::errors::copy_without;
use crate::fake::{libraries, on_gpus, real, with_libraries};
use crate::training::{Env, NARROW as TWO_EACH, close, counters, run};

/// The tutorial network on one picture at a time, for few steps: after some ten of them a rounding decides which side of a
/// ReLU a sum falls on, and the network goes another way.
const NARROW: &str =
    "--synthetic --batch-size 1 --set data.examples=100 --summary-every 0 --log-every 1";

const FOUR: (&str, &str) = ("FAKE_CUDA_DEVICES", "4");

#[test]
fn however_gradients_meet_the_variables_are_the_same() {
    for (n, steps) in [(2, 30), (4, 30)] {
        let space = Space::new();
        let flags = format!("{TWO_EACH} --max-steps {steps} --learning-rate 0.005");
        let ways = [
            ("auto", "", "nccl"),
            ("cpu", "--reduce cpu", "cpu"),
            ("replicated", "--variables replicated --reduce nccl", "nccl"),
            ("copies", "--variables replicated --reduce cpu", "cpu"),
        ];
        for (name, more, reducer) in ways {
            let args = format!("{flags} --num-gpus {n} {more} --train-dir {name}");
            let Some(ended) = run(&space, &args, &[FOUR]) else { return };
            let out = ended.code(0).out;
            assert!(out.contains(&format!("Reduce:        {reducer}\n")), "{name}: {out}");
        }
        space.ok(&format!("{flags} --set conv=direct --num-towers {n} --train-dir towers"));
        let of = |name: &str| space.checkpoint(name, steps);
        if n == 2 || !real() {
            same(&of("auto"), &of("cpu"));
            same(&of("replicated"), &of("copies"));
        }
        // In which order it adds more than two is up to NCCL.
        close(&of("auto"), &of("cpu"), 1e-4);
        close(&of("replicated"), &of("copies"), 1e-4);
        close(&of("replicated"), &of("cpu"), 1e-4);
        close(&of("auto"), &of("towers"), 1e-4);
    }
}

/// A tower with several micro-batches keeps its sum beside them.
#[test]
fn micro_batches_are_in_the_mean() {
    let space = Space::new();
    let flags = format!("cifar10 {NARROW} --max-steps 3 --num-gpus 2 --accumulate 2");
    for more in ["", "--variables replicated"] {
        for reduce in ["nccl", "cpu"] {
            let args = format!("{flags} {more} --reduce {reduce} --overwrite --train-dir {reduce}");
            let Some(ended) = run(&space, &args, &[]) else { return };
            ended.code(0);
        }
        same(&space.checkpoint("nccl", 3), &space.checkpoint("cpu", 3));
    }
}

#[test]
fn a_step_that_diverges_changes_nothing() {
    let space = Space::new();
    let flags = format!("cifar10 {NARROW} --max-steps 9 --num-gpus 2 --variables replicated");
    let args = format!("{flags} --learning-rate 1e30 --train-dir run");
    let Some(ended) = run(&space, &args, &[]) else { return };
    ended.code(6).says(&["at step 1 in", "the variables were not changed by this step"]);
    let args = format!("{flags} --learning-rate 1e30 --log-every 4 --train-dir later");
    let ended = run(&space, &args, &[]).unwrap().code(6);
    ended.says(&["at step 1 in", "it was read 3 steps later, and nothing was saved since"]);
}

#[test]
fn without_nccl_the_host_averages_and_says_so() {
    let Some(libraries) = libraries() else { return };
    let space = Space::new();
    let some = space.path("libraries");
    copy_without(libraries, &some, "libnccl.so.2");
    let run = |flags: &str| {
        let args = format!("cifar10 {NARROW} --max-steps 1 --num-gpus 2 {flags}");
        let mut command = space.command(&args);
        with_libraries(&mut command, &some);
        command.env("XDG_CACHE_HOME", space.path("cache")).env("CUDA_HOME", "/nowhere/cuda");
        crate::cli::Ended::from(command.output().unwrap())
    };
    let out = run("--train-dir auto").code(0).out;
    assert!(out.contains("Reduce:        cpu (libnccl.so.2 was not found"), "{out}");
    let words = ["reduce: nccl", "libnccl.so.2", "LD_LIBRARY_PATH", "/nowhere/cuda/lib64"];
    run("--train-dir strict --reduce nccl").code(9).says(&words);
}

/// A file for two workers of two GPUs each.
fn two_workers(space: &Space) {
    let [a, b] = ports(2).try_into().unwrap();
    let text = format!(
        "model: cifar10\ntowers: {{gpus: 2}}\n\
         cluster: {{mode: collective, worker: [\"127.0.0.1:{a}\", \"127.0.0.1:{b}\"]}}\n"
    );
    fs::write(space.path("two.yaml"), text).unwrap();
}

#[test]
fn two_processes_train_as_one() {
    const STEPS: u64 = 5;
    let space = Space::new();
    two_workers(&space);
    let flags = format!("{NARROW} --max-steps {STEPS}");
    let one = format!("cifar10 {flags} --num-gpus 4 --reduce cpu --train-dir one");
    let Some(ended) = run(&space, &one, &[FOUR]) else { return };
    ended.code(0);
    let ways = [
        ("nccl", "", "nccl, 4 GPUs of 2 workers"),
        ("ring", "--all-reduce-spec nccl/xring", "collective, nccl inside this worker"),
        ("host", "--reduce cpu", "collective over gRPC (worker of rank 0: reduce is cpu)"),
    ];
    for (name, more, reducer) in ways {
        let args = format!("launch --config two.yaml -- {flags} {more} --train-dir {name}");
        let out = run(&space, &args, &[FOUR]).unwrap().code(0).out;
        assert!(out.contains(&format!("Reduce:        {reducer}")), "{name}: {out}");
        match name {
            "ring" => close(&space.checkpoint(name, STEPS), &space.checkpoint("one", STEPS), 1e-4),
            _ => same(&space.checkpoint(name, STEPS), &space.checkpoint("one", STEPS)),
        }
    }
    let losses = |run: &str| -> Vec<f64> {
        space.rows(run, "step").iter().map(|row| row["loss"].as_f64().unwrap()).collect()
    };
    for (got, expected) in losses("nccl").into_iter().zip(losses("one")) {
        assert!((got - expected).abs() < 1e-5 * expected, "{got} {expected}");
    }
}

/// Starts worker `index` of the file of [`two_workers`] on these GPUs.
fn worker(space: &Space, index: usize, gpus: &str, flags: &str) -> Option<Live> {
    let task = format!("train --config two.yaml --job-name worker --task-index {index}");
    let mut command = space.command(&format!("{task} {NARROW} {flags}"));
    on_gpus(&mut command, 4, &[FOUR, ("CUDA_VISIBLE_DEVICES", gpus)])?;
    command.env("XDG_CACHE_HOME", space.path("cache"));
    Some(space.spawn(&mut command))
}

#[test]
fn whose_fellow_is_killed_ends_with_5() {
    let space = Space::new();
    two_workers(&space);
    for victim in [0, 1] {
        let run = format!("run{victim}");
        let start = |index: usize, gpus| {
            worker(&space, index, gpus, &format!("--max-steps 100000 --train-dir {run}"))
        };
        let (Some(first), Some(second)) = (start(0, "0,1"), start(1, "2,3")) else { return };
        let (killed, mut other) = if victim == 0 { (first, second) } else { (second, first) };
        other.until(|| space.steps_so_far(&run) >= 2);
        killed.kill();
        other.ended().code(5).says(&[&format!("worker:{victim}")]);
    }
}

#[test]
fn nccl_that_is_demanded_and_cannot_be_had_ends_all_with_9() {
    let space = Space::new();
    two_workers(&space);
    let flags = "--max-steps 3 --set cluster.engine=nccl --train-dir run";
    let start = |index| worker(&space, index, "0,1", flags);
    let (Some(first), Some(second)) = (start(0), start(1)) else { return };
    for worker in [first, second] {
        worker.ended().code(9).says(&["cluster.engine: nccl", "share a GPU"]);
    }
}

/// What is not a number ends both, whoever sees it first, and neither waits for the other.
#[test]
fn a_worker_that_diverges_ends_both_with_6() {
    let space = Space::new();
    two_workers(&space);
    for (name, more) in [("nccl", ""), ("host", "--reduce cpu"), ("own", "--variables replicated")]
    {
        let flags = format!("--max-steps 50 --learning-rate 1e30 {more} --train-dir {name}");
        let start = |index, gpus| worker(&space, index, gpus, &flags);
        let (Some(first), Some(second)) = (start(0, "0,1"), start(1, "2,3")) else { return };
        for worker in [first, second] {
            worker.ended().code(6).says(&["diverged with loss"]);
        }
    }
}

/// A step is two pieces, and the gradients of the first are summed while the second is computed: the bits stay the same, whatever
/// comes late.
#[test]
fn sums_begin_while_the_rest_is_computed() {
    const STEPS: u64 = 5;
    let space = Space::new();
    let flags = format!("{TWO_EACH} --max-steps {STEPS} --num-gpus 2 --variables replicated");
    let late = [("FAKE_CUDA_DELAY_US", "300")];
    let ways: [(&str, &str, Env<'_>); 4] = [
        ("host", "--reduce cpu", &[]),
        ("early", "", &[("FAKE_CUDA_TRACE", "count.json")]),
        ("late", "", &late),
        ("seen", "--set train.summary_every=1", &late),
    ];
    for (name, more, env) in ways {
        let args = format!("{flags} {more} --train-dir {name}");
        let Some(ended) = run(&space, &args, env) else { return };
        ended.code(0);
        same(&space.checkpoint("host", STEPS), &space.checkpoint(name, STEPS));
    }
    let counters = counters(&space, "count.json");
    assert_eq!(counters["graph"].as_u64(), Some(2 * 2 * (STEPS - 1)), "{counters:?}");
    assert_eq!(counters["leaked_bytes"].as_u64().unwrap_or(0), 0, "{counters:?}");
}
