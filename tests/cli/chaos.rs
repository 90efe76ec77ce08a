//! Clusters whose tasks die, fall silent, come late or come back: everybody ends soon, with the promised code.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::net::{TcpListener, TcpStream};
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

/// What a worker that is not chief prints: a line for each of its steps.
const WORKER: &str = "worker.out";

fn task(space: &Space, job: &str, index: usize, flags: &str) -> Live {
    let run = if (job, index) == ("worker", 0) { "--train-dir run" } else { "" };
    let file = if (job, index) == ("worker", 1) { WORKER } else { "other.out" };
    space.start_into(file, &format!(
        "train --config cluster.yaml --job-name {job} --task-index {index} --summary-every 0 --log-every 1 {run} {flags}"
    ))
}

impl Tasks {
    /// Starts them and waits for some steps of both workers.
    fn start(mode: &str, ps: usize, flags: &str) -> Self {
        let space = Space::new();
        cluster(&space, "cluster.yaml", ps, 2, &format!("  mode: {mode}\n"));
        let ps = (0..ps).map(|index| task(&space, "ps", index, flags)).collect();
        let chief = task(&space, "worker", 0, flags);
        let worker = task(&space, "worker", 1, flags);
        let mut tasks = Self { space, ps, chief, worker };
        tasks.steps(10);
        tasks.worker.until(|| tasks.space.lines(WORKER) > 3);
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
        // A parameter server that does not come back: nobody can go on.
        if ps > 0 {
            let flags = format!("{ENDLESS} --save-steps 5 --rendezvous-timeout 2");
            let mut tasks = Tasks::start(mode, ps, &flags);
            tasks.ps.remove(0).kill();
            let words =
                ["waiting for it to come back", "did not come back within 2 s", "lost ps:0"];
            tasks.chief.ended().code(5).says(&words);
            tasks.worker.ended().code(5).says(&words);
            tasks.ps.into_iter().for_each(|ps| _ = ps.ended().code(5));
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
fn a_parameter_server_that_comes_back_empty_is_restored() {
    for (mode, ps) in [("ps-sync", 1), ("ps-sync", 2), ("ps-async", 1)] {
        let flags = format!("{ENDLESS} --save-steps 5");
        let mut tasks = Tasks::start(mode, ps, &flags);
        tasks.chief.until(|| tasks.space.checkpoints("run").len() > 1);
        tasks.ps.remove(0).kill();
        let saved = *tasks.space.checkpoints("run").last().unwrap();
        tasks.ps.insert(0, task(&tasks.space, "ps", 0, &flags));
        let seen = tasks.space.lines(WORKER);
        // Both go on from where the last checkpoint was, never from step 0.
        tasks.chief.until(|| *tasks.space.steps("run", "step").last().unwrap() > saved + 50);
        tasks.worker.until(|| tasks.space.lines(WORKER) > seen + 20);
        tasks.chief.signal("TERM");
        let Tasks { space, ps, chief, worker } = tasks;
        chief.ended().code(143).says(&["lost ps:0", "restoring the parameter servers at step"]);
        worker.ended().code(143).says(&["lost ps:0"]);
        ps.into_iter().for_each(|ps| _ = ps.ended().code(143));
        consistent(&space);
    }
}

#[test]
fn variables_that_were_never_saved_are_not_made_anew() {
    let mut tasks = Tasks::start("ps-sync", 1, ENDLESS);
    tasks.ps.remove(0).kill();
    let ps = task(&tasks.space, "ps", 0, ENDLESS);
    let words = ["ps:0", "no checkpoint to restore"];
    tasks.chief.ended().code(5).says(&words);
    tasks.worker.ended().code(5).says(&words);
    ps.ended().code(5);
}

#[test]
fn a_silent_worker_is_left_out_and_joins_again_when_it_wakes() {
    let mut tasks = Tasks::start("ps-sync", 2, ENDLESS);
    tasks.worker.signal("STOP");
    // What was on its way, then nothing until it counts as lost.
    tasks.steps(100);
    let seen = tasks.space.lines(WORKER);
    tasks.worker.signal("CONT");
    tasks.worker.until(|| tasks.space.lines(WORKER) > seen + 20);
    tasks.steps(20);
    tasks.chief.signal("TERM");
    let Tasks { space, ps, chief, worker } = tasks;
    chief.ended().code(143);
    worker.ended().code(143).says(&["lost ps:"]);
    ps.into_iter().for_each(|ps| _ = ps.ended().code(143));
    consistent(&space);
}

#[test]
fn a_silent_parameter_server_is_found_again_with_its_variables() {
    let mut tasks = Tasks::start("ps-sync", 1, ENDLESS);
    tasks.ps[0].signal("STOP");
    let seen = tasks.space.lines(WORKER);
    std::thread::sleep(std::time::Duration::from_secs(5));
    tasks.ps[0].signal("CONT");
    tasks.worker.until(|| tasks.space.lines(WORKER) > seen + 20);
    tasks.steps(20);
    tasks.chief.signal("TERM");
    let Tasks { space, ps, chief, worker } = tasks;
    chief.ended().code(143).says(&["live at step"]);
    worker.ended().code(143);
    ps.into_iter().for_each(|ps| _ = ps.ended().code(143));
    consistent(&space);
}

#[test]
fn a_client_and_those_who_compute_for_it_end_together() {
    let start = || {
        let space = Space::new();
        cluster(&space, "cluster.yaml", 0, 2, "  mode: in-graph\n");
        let serve = |index| {
            space.start(&format!(
                "serve --config cluster.yaml {ENDLESS} --job-name worker --task-index {index}"
            ))
        };
        let workers = [serve(0), serve(1)];
        let mut client = space.start(&format!(
            "train --config cluster.yaml {ENDLESS} --train-dir run --log-every 1 --summary-every 0"
        ));
        client.until(|| space.steps_so_far("run") > 10);
        (space, client, workers)
    };
    let (space, client, workers) = start();
    workers[1].signal("TERM");
    client.ended().code(143).says(&["saved in run"]);
    workers.into_iter().for_each(|worker| _ = worker.ended().code(143));
    assert_eq!(space.checkpoints("run").len(), 1);

    let (_space, client, [one, other]) = start();
    other.kill();
    client.ended().code(5).says(&["lost worker:1"]);
    one.ended().code(5).says(&["lost worker:1"]);

    let (_space, client, workers) = start();
    client.kill();
    workers.into_iter().for_each(|worker| _ = worker.ended().code(5).says(&["client:0 is gone"]));
}

#[test]
fn a_step_that_does_not_end_is_given_up_after_a_signal() {
    for (mode, ps) in [("collective", 0), ("ps-sync", 1)] {
        let space = Space::new();
        cluster(&space, "cluster.yaml", ps, 2, &format!("  mode: {mode}\n"));
        let servers: Vec<Live> = (0..ps).map(|i| task(&space, "ps", i, ENDLESS)).collect();
        let mut chief = task(&space, "worker", 0, ENDLESS);
        // It beats, but its lines are never read, so that it stops within a step.
        let stuck = format!(
            "train --config cluster.yaml --job-name worker --task-index 1 {ENDLESS} --log-every 1"
        );
        let stuck = space.spawn_unread(&stuck);
        chief.until(|| space.steps_so_far("run") > 10);
        let mut last = 0;
        // The pipe is full when no step comes any more.
        while last != space.steps_so_far("run") {
            last = space.steps_so_far("run");
            std::thread::sleep(std::time::Duration::from_millis(700));
        }
        chief.signal("TERM");
        chief.ended().code(143).says(&["saved in run"]);
        stuck.signal("KILL");
        servers.into_iter().for_each(|ps| _ = ps.ended().code(143));
        assert_eq!(space.checkpoints("run"), [last], "{mode}");
    }
}

#[test]
fn who_stands_still_says_where() {
    let flags = format!("{ENDLESS} --stall-timeout 1");
    let tasks = Tasks::start("ps-sync", 1, &flags);
    tasks.worker.signal("STOP");
    std::thread::sleep(std::time::Duration::from_millis(2500));
    tasks.worker.signal("CONT");
    tasks.chief.signal("TERM");
    let Tasks { ps, chief, .. } = tasks;
    chief.ended().code(143).says(&[
        "worker:0 on ",
        "nothing has moved for",
        "updating the variables",
    ]);
    ps.into_iter().for_each(|ps| {
        ps.ended().code(143).says(&["nothing has moved", "waiting for gradients of worker:1"]);
    });
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
fn launch_starts_a_killed_task_again() {
    for (mode, job, index) in [
        ("ps-sync", "worker", 1),
        ("ps-sync", "worker", 0),
        ("ps-async", "worker", 1),
        ("ps-sync", "ps", 1),
    ] {
        let space = Space::new();
        cluster(&space, "cluster.yaml", 2, 2, &format!("  mode: {mode}\n"));
        let mut launch = space.start(
            "launch --config cluster.yaml --restart 1 -- --train-dir run --log-every 1 --max-steps 3000 \
             --summary-every 0 --save-steps 10",
        );
        launch.until(|| space.checkpoints("run").len() > 1);
        let kill = format!("kill -KILL {}", child(&launch, job, index));
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
        launch.ended().code(0).says(&[&format!("restarting {job}:{index}")]);
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
        // It listens after it hears signals.
        let text = fs::read_to_string(space.path("cluster.yaml")).unwrap();
        let address = text.rsplit('"').nth(1).unwrap().to_owned();
        let mut worker = worker;
        worker.until(|| TcpStream::connect(&address).is_ok());
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
