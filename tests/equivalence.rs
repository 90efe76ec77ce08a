//! Ways to compute the same steps give the same bits: towers, threads, and clusters of real processes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[allow(dead_code, reason = "shared with the tests of the program as its users run it")]
#[path = "cli/support.rs"]
mod support;

use support::{SMALL, Space, cluster, same};

const STEPS: u64 = 5;

/// Trains by each of `ways` and compares the last checkpoints with the first's.
#[track_caller]
fn all_same(ways: &[&str]) {
    let space = Space::new();
    for (i, way) in ways.iter().enumerate() {
        space.ok(&format!("{SMALL} --max-steps {STEPS} --train-dir run{i} {way}"));
        same(&space.checkpoint("run0", STEPS), &space.checkpoint(&format!("run{i}"), STEPS));
    }
}

#[test]
fn four_towers_are_four_micro_batches_are_four_replicas() {
    all_same(&[
        "--batch-size=4 --accumulate 4",
        "--batch-size=4 --num-towers 4",
        "--batch-size=4 --num-towers 4 --variables replicated",
        "--batch-size=4 --num-towers 2 --accumulate 2",
        "--batch-size=4 --num-gpus 4 --allow-soft-placement",
    ]);
}

#[test]
fn three_towers_are_three_micro_batches() {
    all_same(&["--accumulate 3", "--num-towers 3", "--num-towers 3 --variables replicated"]);
}

#[test]
fn threads_do_not_matter() {
    all_same(&[
        "--threads 1",
        "--threads 2",
        "--threads 3 --input-threads 3",
        "--threads 1 --input-threads 2",
    ]);
}

#[test]
fn watching_does_not_change_what_is_learned() {
    let space = Space::new();
    space.pictures("pictures", 4, 10);
    let run = "cifar10 --data-dir pictures --batch-size 4 --max-steps 6 --log-every 1";
    space.ok(&format!("{run} --train-dir plain --summary-every 0"));
    space.ok(&format!("{run} --train-dir watched --summary-every 1 --save-steps 2 --eval-every 2"));
    same(&space.checkpoint("plain", 6), &space.checkpoint("watched", 6));
    assert_eq!(space.steps("watched", "evaluation"), [2, 2, 4, 4, 6, 6]);
    assert_eq!(space.checkpoints("watched"), [2, 4, 6]);
}

#[test]
fn the_seed_does_matter() {
    let space = Space::new();
    for seed in [1, 2] {
        space.ok(&format!("line-fit --max-steps 1 --train-dir {seed} --seed {seed}"));
    }
    let first = |run| space.checkpoint(run, 1).tensors[0].1.as_f32().unwrap().to_owned();
    assert_ne!(first("1"), first("2"));
}

#[test]
fn asynchronous_towers_end_at_the_last_step() {
    let space = Space::new();
    for towers in [2, 3] {
        let run = format!("async{towers}");
        space.ok(&format!(
            "{SMALL} --async-towers --num-towers {towers} --max-steps 11 --log-every 1 --train-dir {run}"
        ));
        assert_eq!(space.checkpoints(&run), [11]);
        let snapshot = space.checkpoint(&run, 11);
        for (name, tensor) in &snapshot.tensors {
            assert!(tensor.as_f32().unwrap().iter().all(|v| v.is_finite()), "{name}");
        }
        let rows = space.rows(&run, "step");
        assert!(!rows.is_empty() && rows.iter().all(|row| row["loss"].as_f64().is_some()));
        assert!(space.steps(&run, "step").is_sorted_by(|a, b| a < b));
        space.ok(&format!("{SMALL} --max-steps 15 --train-dir {run} --resume"));
        assert_eq!(space.checkpoint(&run, 15).global_step, 15);
    }
}

/// Trains the tutorial network by a cluster and compares with 4 towers in one process.
#[test]
fn clusters_give_the_bits_of_four_local_towers() {
    const STEPS: u64 = 20;
    let space = Space::new();
    let small = SMALL.strip_prefix("cifar10 ").unwrap();
    let flags =
        format!("{small} --batch-size 2 --max-steps {STEPS} --threads 1 --set model=cifar10");
    space.ok(&format!(
        "cifar10 {small} --batch-size 2 --max-steps {STEPS} --train-dir local --num-towers 4"
    ));
    let expected = space.checkpoint("local", STEPS);
    space.ok(&format!(
        "cifar10 {small} --batch-size 2 --max-steps {STEPS} --train-dir four-in-one --accumulate 4"
    ));
    same(&expected, &space.checkpoint("four-in-one", STEPS));
    for (name, ps, workers, rest, more) in [
        ("one-ps", 1, 4, "  mode: ps-sync\n", ""),
        ("two-ps", 2, 4, "  mode: ps-sync\n", ""),
        ("greedy", 2, 2, "  mode: ps-sync\n  placement: greedy\n", "--num-towers 2"),
        ("collective", 0, 2, "  mode: collective\n", "--num-towers 2"),
        ("four", 0, 4, "  mode: collective\n", ""),
        ("in-graph", 0, 4, "  mode: in-graph\n", ""),
        ("in-graph-ps", 2, 2, "  mode: in-graph\n", "--num-towers 2"),
    ] {
        let file = format!("{name}.yaml");
        cluster(&space, &file, ps, workers, rest);
        space.ok(&format!("launch --config {file} -- {flags} --train-dir {name} {more}"));
        same(&expected, &space.checkpoint(name, STEPS));
    }
}

/// A residual network, whose moving statistics live where the variables do.
#[test]
fn clusters_agree_on_moving_statistics() {
    const STEPS: u64 = 3;
    let space = Space::new();
    let model = "model: {name: resnet, depth: 8}\n";
    std::fs::write(space.path("local.yaml"), model).unwrap();
    let flags = format!(
        "--synthetic --set data.examples=100 --summary-every 0 --batch-size 2 --max-steps {STEPS} --threads 1"
    );
    space.ok(&format!("train --config local.yaml {flags} --num-towers 4 --train-dir local"));
    let expected = space.checkpoint("local", STEPS);
    for (name, ps, workers, rest, more) in [
        ("two-ps", 2, 4, "  mode: ps-sync\n  placement: round-robin\n", ""),
        ("collective", 0, 2, "  mode: collective\n", "--num-towers 2"),
        ("in-graph", 0, 4, "  mode: in-graph\n", ""),
    ] {
        let file = format!("{name}.yaml");
        cluster(&space, &file, ps, workers, rest);
        let text = std::fs::read_to_string(space.path(&file)).unwrap();
        let text = text.replace("model: line\ndata: {name: line}\n", model);
        std::fs::write(space.path(&file), text).unwrap();
        space.ok(&format!("launch --config {file} -- {flags} --train-dir {name} {more}"));
        same(&expected, &space.checkpoint(name, STEPS));
    }
}
