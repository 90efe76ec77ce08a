//! Clusters whose tasks die, fall silent, come late or come back: everybody ends soon, with the promised code.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::net::TcpListener;
use std::process::Command;

use crate::support::{Live, Space, cluster};

/// Steps that are never reached.
const ENDLESS: &str = "--max-steps 100000000";

/// The tasks of a cluster of the line model with two workers.
struct Tasks {
    space: Space,
    ps: Vec<Live>,
    chief: Live,
    worker: Live,
}

fn task(space: &Space, job: &str, index: usize, flags: &str) -> Live {
    let run = if (job, index) == ("worker", 0) { "--train-dir run --log-every 1" } else { "" };
    space.start(&format!(
        "train --config cluster.yaml --job-name {job} --task-index {index} --summary-every 0 {run} {flags}"
    ))
}

impl Tasks {
    /// Starts them and waits for some steps.
    fn start(mode: &str, ps: usize, flags: &str) -> Self {
        let space = Space::new();
        cluster(&space, "cluster.yaml", ps, 2, &format!("  mode: {mode}\n"));
        let ps = (0..ps).map(|index| task(&space, "ps", index, flags)).collect();
        let chief = task(&space, "worker", 0, flags);
        let worker = task(&space, "worker", 1, flags);
        let mut tasks = Self { space, ps, chief, worker };
        tasks.steps(10);
        tasks
    }

    /// Waits until the chief has logged so many more steps.
    #[track_caller]
    fn steps(&mut self, more: u64) {
        let steps = self.space.steps_so_far("run") + more;
        self.chief.until(|| self.space.steps_so_far("run") >= steps);
    }
}

/// No step twice, none backwards, and every checkpoint can be read.
#[track_caller]
fn consistent(space: &Space) {
    let steps = space.steps("run", "step");
    assert!(steps.windows(2).all(|pair| pair[0] < pair[1]), "{steps:?}");
    space.checkpoints("run").into_iter().for_each(|step| _ = space.checkpoint("run", step));
}

const MODES: [(&str, usize); 4] =
    [("ps-sync", 1), ("ps-sync", 2), ("ps-async", 1), ("collective", 0)];

#[test]
fn a_signal_to_any_task_ends_all_with_its_code() {
    for (mode, ps) in MODES {
        for role in 0..3 {
            if role == 0 && ps == 0 {
                continue;
            }
            let tasks = Tasks::start(mode, ps, ENDLESS);
            let target = [tasks.ps.first().unwrap_or(&tasks.chief), &tasks.chief, &tasks.worker];
            let (name, code) = [("TERM", 143), ("INT", 130)][role % 2];
            target[role].signal(name);
            let Tasks { space, ps, chief, worker } = tasks;
            for task in ps.into_iter().chain([chief, worker]) {
                task.ended().code(code);
            }
            consistent(&space);
            assert!(!space.checkpoints("run").is_empty(), "the chief saved");
        }
    }
}

#[test]
fn a_killed_task_is_named_or_left_behind() {
    for (mode, ps) in MODES {
        // A parameter server: nobody can go on.
        if ps > 0 {
            let mut tasks = Tasks::start(mode, ps, &format!("{ENDLESS} --save-steps 5"));
            tasks.ps.remove(0).kill();
            tasks.chief.ended().code(5).says(&["lost ps:0"]);
            // Asynchronous steps wait for nobody, so the worker may not have met the server yet.
            let worker = tasks.worker.ended();
            let met = mode != "ps-async" || worker.code != 4;
            worker.code(if met { 5 } else { 4 }).says(&["ps:0"]);
            tasks.ps.into_iter().for_each(|ps| _ = ps.ended().code(5).says(&["lost ps:0"]));
            consistent(&tasks.space);
        }
        // A worker.
        let mut tasks = Tasks::start(mode, ps, ENDLESS);
        tasks.worker.kill();
        if ps == 0 {
            tasks.chief.ended().code(5).says(&["worker:1"]);
        } else {
            let steps = tasks.space.steps_so_far("run") + 50;
            tasks.chief.until(|| tasks.space.steps_so_far("run") >= steps);
            tasks.chief.signal("TERM");
            tasks.chief.ended().code(143);
            tasks.ps.into_iter().for_each(|ps| _ = ps.ended().code(143));
        }
        consistent(&tasks.space);
    }
}

#[test]
fn a_silent_worker_is_left_out_and_stops_nobody_when_it_wakes() {
    let mut tasks = Tasks::start("ps-sync", 2, ENDLESS);
    tasks.worker.signal("STOP");
    // What was on its way, then nothing until it counts as lost.
    tasks.steps(100);
    tasks.worker.signal("CONT");
    let Tasks { space, ps, mut chief, worker } = tasks;
    worker.ended().code(5).says(&["lost ps:"]);
    let steps = space.steps_so_far("run") + 50;
    chief.until(|| space.steps_so_far("run") >= steps);
    chief.signal("TERM");
    chief.ended().code(143);
    ps.into_iter().for_each(|ps| _ = ps.ended().code(143));
    consistent(&space);
}

#[test]
fn a_chief_that_comes_back_goes_on_from_the_living_step() {
    let flags = "--max-steps 2000 --save-steps 5";
    let Tasks { space, ps, chief, worker } = Tasks::start("ps-sync", 2, flags);
    chief.kill();
    let before = *space.steps("run", "step").last().unwrap();
    task(&space, "worker", 0, &format!("{flags} --resume")).ended().code(0).says(&["live at step"]);
    worker.ended().code(0);
    ps.into_iter().for_each(|ps| _ = ps.ended().code(0));
    consistent(&space);
    let steps = space.steps("run", "step");
    assert!(steps.contains(&before) && steps.last() == Some(&1999), "{steps:?}");
    assert_eq!(space.checkpoints("run").last(), Some(&2000));
}

/// The process of a launched task.
fn child(launch: &Live, job: &str, index: usize) -> u32 {
    let wanted = format!("--job-name\0{job}\0--task-index\0{index}\0");
    let is_child = |id: u32| {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        let command = fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default();
        parent == Some(&launch.id().to_string()) && command.contains(&wanted)
    };
    let ids = fs::read_dir("/proc").unwrap().flatten();
    let mut ids = ids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.find(|id| is_child(*id)).unwrap()
}

#[test]
fn launch_starts_a_killed_worker_again() {
    for (mode, index) in [("ps-sync", 1), ("ps-sync", 0), ("ps-async", 1)] {
        let space = Space::new();
        cluster(&space, "cluster.yaml", 2, 2, &format!("  mode: {mode}\n"));
        let mut launch = space.start(
            "launch --config cluster.yaml --restart 1 -- --train-dir run --log-every 1 --max-steps 3000 \
             --summary-every 0",
        );
        launch.until(|| space.steps_so_far("run") > 10);
        let kill = format!("kill -KILL {}", child(&launch, "worker", index));
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
        launch.ended().code(0).says(&["restarting worker"]);
        consistent(&space);
        assert_eq!(space.checkpoints("run").last(), Some(&3000));
    }
}

#[test]
fn backup_workers_and_staleness_end_at_the_last_step() {
    for (ps, workers, rest) in [
        (2, 2, "  mode: ps-sync\n  replicas_to_aggregate: 1\n"),
        (1, 3, "  mode: ps-sync\n  replicas_to_aggregate: 2\n"),
        (2, 2, "  mode: ps-async\n  max_staleness: 0\n"),
    ] {
        let space = Space::new();
        cluster(&space, "cluster.yaml", ps, workers, rest);
        space.ok("launch --config cluster.yaml -- --train-dir run --log-every 1 --max-steps 300");
        assert_eq!(space.checkpoints("run"), [300], "{rest}");
        consistent(&space);
    }
}

#[test]
fn who_never_comes_is_named_to_all() {
    let space = Space::new();
    cluster(&space, "cluster.yaml", 1, 2, "  mode: ps-sync\n");
    let ps = task(&space, "ps", 0, "--rendezvous-timeout 2");
    task(&space, "worker", 0, "").ended().code(4).says(&["worker:1 did not come"]);
    ps.ended().code(4).says(&["worker:1 did not come"]);
}

#[test]
fn a_signal_is_heard_while_others_are_awaited() {
    for (mode, ps) in [("ps-sync", 1), ("collective", 0)] {
        let space = Space::new();
        cluster(&space, "cluster.yaml", ps, 2, &format!("  mode: {mode}\n"));
        let worker = task(&space, "worker", 1, "");
        // Its address is taken once it listens, which it does after it hears signals.
        let text = fs::read_to_string(space.path("cluster.yaml")).unwrap();
        let address = text.rsplit('"').nth(1).unwrap().to_owned();
        let mut worker = worker;
        worker.until(|| TcpListener::bind(&address).is_err());
        worker.signal("TERM");
        worker.ended().code(143).says(&["interrupted by signal 15"]);
    }
}

#[test]
fn a_peer_that_accepts_and_never_answers_is_missing() {
    let space = Space::new();
    cluster(&space, "cluster.yaml", 1, 1, "  mode: ps-sync\n");
    let text = fs::read_to_string(space.path("cluster.yaml")).unwrap();
    let _mute = TcpListener::bind(text.split('"').nth(1).unwrap()).unwrap();
    task(&space, "worker", 0, "--rendezvous-timeout 1").ended().code(4).says(&["ps:0"]);
}

#[test]
fn a_diverged_worker_ends_all_before_it_is_applied() {
    for (mode, ps) in [("ps-sync", 1), ("ps-async", 1), ("collective", 0)] {
        let space = Space::new();
        cluster(&space, "cluster.yaml", ps, 2, &format!("  mode: {mode}\n"));
        let flags = "--learning-rate 1e30";
        let servers: Vec<Live> = (0..ps).map(|index| task(&space, "ps", index, flags)).collect();
        let workers = [0, 1].map(|index| task(&space, "worker", index, flags));
        servers.into_iter().for_each(|ps| _ = ps.ended().code(6).says(&["worker:", "diverged"]));
        workers.into_iter().for_each(|worker| _ = worker.ended().code(6).says(&["diverged"]));
        consistent(&space);
    }
}
