//! Clusters of real processes on loopback.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::net::TcpListener;

use crate::support::{Space, cluster, ports, same};

/// The last weight and bias that a run printed.
fn fitted(out: &str) -> (f64, f64) {
    let line = out.lines().rev().find(|line| line.contains("weight:")).unwrap();
    let after = |word: &str| {
        let rest = line.split(word).nth(1).unwrap().trim_start();
        rest.split(',').next().unwrap().parse::<f64>().unwrap()
    };
    (after("weight:"), after("bias:"))
}

#[test]
fn every_mode_fits_the_line() {
    for (mode, ps) in [
        ("ps-sync", 1),
        ("ps-async", 1),
        ("collective", 0),
        ("collective\n  wire: bf16", 0),
        ("collective\n  wire: f16\n  exchange: ring", 0),
        ("in-graph", 0),
        ("in-graph", 1),
    ] {
        let space = Space::new();
        cluster(&space, "cluster.yaml", ps, 2, &format!("  mode: {mode}\n"));
        let ended = space.ok("launch --config cluster.yaml -- --train-dir run --max-steps 600");
        let (weight, bias) = fitted(&ended.out);
        assert!(
            (weight - 5.0).abs() < 0.05 && (bias - 8.0).abs() < 0.05,
            "{mode}: {weight} {bias}"
        );
        assert_eq!(space.checkpoints("run"), [600], "{mode}");
        assert!(!ended.err.contains("exit code"), "{}", ended.err);
    }
}

#[test]
fn jobs_may_have_any_names_and_sparse_indices() {
    for (mode, job) in [("ps-sync", "worker"), ("in-graph", "work")] {
        let space = Space::new();
        let [a, b, c, d] = ports(4).try_into().unwrap();
        let at = |port: u16| format!("\"127.0.0.1:{port}\"");
        let text = format!(
            "model: line\ndata: {{name: line}}\ncluster:\n  mode: {mode}\n  ps: {{2: {}, 5: {}}}\n  {job}: {{0: {}, 7: {}}}\n",
            at(a),
            at(b),
            at(c),
            at(d)
        );
        fs::write(space.path("cluster.yaml"), text).unwrap();
        space.ok("launch --config cluster.yaml -- --train-dir run --max-steps 50");
        assert_eq!(space.checkpoints("run"), [50], "{mode}");
    }
}

#[test]
fn an_evaluator_that_fails_ends_nobody() {
    let space = Space::new();
    let [a, b] = ports(2).try_into().unwrap();
    let text = format!(
        "model: line\ndata: {{name: line}}\ncluster: {{worker: [\"127.0.0.1:{a}\"], evaluator: [\"127.0.0.1:{b}\"]}}\n"
    );
    fs::write(space.path("cluster.yaml"), text).unwrap();
    let ended = space.ok("launch --config cluster.yaml -- --train-dir run --max-steps 300");
    assert!(ended.err.contains("evaluator:0 ended with exit code"), "{}", ended.err);
    assert_eq!(space.checkpoints("run"), [300]);
}

#[test]
fn a_task_that_is_another_one_is_refused() {
    let space = Space::new();
    let [port] = ports(1).try_into().unwrap();
    // One address by two names.
    let hosts = format!("--worker-hosts localhost:{port},127.0.0.1:{port}");
    space
        .run(&format!("line-fit {hosts} --job-name worker --task-index 0 --train-dir run"))
        .code(8)
        .says(&["the address of worker:1 is that of worker:0"]);
}

#[test]
fn a_cluster_resumes_from_its_checkpoint() {
    let space = Space::new();
    for (mode, ps) in [("ps-sync", 2), ("collective", 0)] {
        let (whole, parts) = (format!("{mode}-whole"), format!("{mode}-parts"));
        for (dir, steps) in [(&whole, "20"), (&parts, "7"), (&parts, "20 --resume")] {
            // New ports each time: the old ones may linger.
            cluster(&space, "cluster.yaml", ps, 2, &format!("  mode: {mode}\n"));
            space.ok(&format!(
                "launch --config cluster.yaml -- --train-dir {dir} --max-steps {steps}"
            ));
        }
        same(&space.checkpoint(&whole, 20), &space.checkpoint(&parts, 20));
    }
}

#[test]
fn who_is_missing_is_named() {
    let space = Space::new();
    cluster(&space, "cluster.yaml", 1, 2, "  mode: ps-sync\n");
    space
        .run("train --config cluster.yaml --job-name worker --task-index 1 --rendezvous-timeout 1")
        .code(4)
        .says(&["ps:0", "did not come"]);
    cluster(&space, "equal.yaml", 0, 2, "  mode: collective\n");
    space
        .run("train --config equal.yaml --job-name worker --task-index 1 --rendezvous-timeout 1")
        .code(4)
        .says(&["worker:0", "did not come"]);
}

#[test]
fn other_settings_are_refused_with_both_values() {
    let space = Space::new();
    cluster(&space, "cluster.yaml", 1, 1, "  mode: ps-sync\n");
    let ps = space.start("train --config cluster.yaml --job-name ps --task-index 0");
    space
        .run("train --config cluster.yaml --job-name worker --task-index 0 --batch-size 7 --train-dir run")
        .code(8)
        .says(&["data.batch_size", "7", "32"]);
    space
        .run("train --config cluster.yaml --job-name worker --task-index 0 --max-steps 7 --overwrite --train-dir run")
        .code(8)
        .says(&["train.max_steps", "7"]);
    space
        .run("train --config cluster.yaml --job-name worker --task-index 0 --set cluster.wire=bf16 --overwrite --train-dir run")
        .code(2)
        .says(&["cluster.wire", "bf16", "for collectives"]);
    space
        .run("train --config cluster.yaml --job-name worker --task-index 0 --set cluster.run_id=new --overwrite --train-dir run")
        .code(8)
        .says(&["cluster.run_id", "new", "none"]);
    drop(ps);
}

#[test]
fn a_dead_parameter_server_is_named() {
    let space = Space::new();
    cluster(&space, "cluster.yaml", 1, 1, "  mode: ps-sync\n");
    let ps = space
        .start("train --config cluster.yaml --job-name ps --task-index 0 --max-steps 100000000");
    let mut worker = space.start(
        "train --config cluster.yaml --job-name worker --task-index 0 --train-dir run --log-every 1 \
         --max-steps 100000000 --rendezvous-timeout 2",
    );
    worker.until(|| space.steps_so_far("run") > 5);
    ps.kill();
    worker.ended().code(5).says(&["lost ps:0"]);
}

#[test]
fn synchronous_rounds_go_on_without_a_dead_worker() {
    let space = Space::new();
    cluster(&space, "cluster.yaml", 1, 2, "  mode: ps-sync\n");
    let ps =
        space.start("train --config cluster.yaml --job-name ps --task-index 0 --max-steps 3000");
    let mut chief = space.start(
        "train --config cluster.yaml --job-name worker --task-index 0 --train-dir run --log-every 1 \
         --max-steps 3000",
    );
    let other = space
        .start("train --config cluster.yaml --job-name worker --task-index 1 --max-steps 3000");
    chief.until(|| space.steps_so_far("run") > 5);
    other.kill();
    chief.ended().code(0);
    assert_eq!(space.checkpoints("run"), [3000]);
    drop(ps);
}

#[test]
fn a_signal_to_a_worker_ends_and_saves_the_run() {
    for (mode, ps) in [("ps-sync", 1), ("collective", 0)] {
        let space = Space::new();
        cluster(&space, "cluster.yaml", ps, 2, &format!("  mode: {mode}\n"));
        let server = (ps > 0).then(|| {
            space.start(
                "train --config cluster.yaml --job-name ps --task-index 0 --max-steps 100000000",
            )
        });
        let mut chief = space.start(
            "train --config cluster.yaml --job-name worker --task-index 0 --train-dir run --log-every 1 \
             --max-steps 100000000",
        );
        let other = space.start(
            "train --config cluster.yaml --job-name worker --task-index 1 --max-steps 100000000",
        );
        chief.until(|| space.steps_so_far("run") > 5);
        other.signal("TERM");
        chief.ended().code(143);
        other.ended().code(143);
        server.into_iter().for_each(|ps| _ = ps.ended().code(143));
        assert_eq!(space.checkpoints("run").len(), 1, "{mode}");
    }
}

#[test]
fn nothing_is_left_of_a_launch() {
    let space = Space::new();
    cluster(&space, "cluster.yaml", 1, 2, "  mode: ps-async\n");
    let mut launch = space.start(
        "launch --config cluster.yaml -- --train-dir run --log-every 1 --max-steps 100000000",
    );
    launch.until(|| space.steps_so_far("run") > 5);
    launch.kill();
    for _ in 0..1000 {
        if TcpListener::bind(first_address(&space)).is_ok() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("the parameter server outlived its launcher");
}

/// The address of the first ps task.
pub(crate) fn first_address(space: &Space) -> String {
    let text = fs::read_to_string(space.path("cluster.yaml")).unwrap();
    text.split('"').nth(1).unwrap().to_owned()
}

#[test]
fn contradictions_name_both_sources() {
    let space = Space::new();
    cluster(&space, "cluster.yaml", 1, 2, "");
    space.run("train --config cluster.yaml --job-name worker").code(2).says(&["task_index"]);
    space
        .run("train --config cluster.yaml --job-name wroker --task-index 0")
        .code(2)
        .says(&["wroker", "worker"]);
    space
        .run("line-fit --ps-hosts a:1 --worker-hosts a:1 --job-name ps --task-index 0")
        .code(2)
        .says(&["a:1", "ps:0", "worker:0"]);
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap();
    space
        .run(&format!(
            "line-fit --ps-hosts {address} --worker-hosts b:1 --job-name ps --task-index 0"
        ))
        .code(2)
        .says(&["cannot listen", "in use"]);
}
