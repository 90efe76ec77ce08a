//! Runs that end early go on as if they had not.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;

use crate::support::{SMALL, Space, same};

/// Trains to 20 at once and with stops at `cuts`.
#[track_caller]
fn cut(flags: &str, cuts: &[u64]) {
    let space = Space::new();
    let run = format!("{SMALL} --log-every 1 {flags}");
    space.ok(&format!("{run} --max-steps 20 --train-dir whole"));
    for &at in cuts {
        let dir = format!("cut{at}");
        space.ok(&format!("{run} --max-steps {at} --train-dir {dir}"));
        // What was given at the start need not be given again.
        let resumed = space.ok(&format!("cifar10 --max-steps 20 --train-dir {dir} --resume"));
        assert!(resumed.err.contains(&format!("at step {at}")), "{}", resumed.err);
        same(&space.checkpoint("whole", 20), &space.checkpoint(&dir, 20));
        assert_eq!(space.steps(&dir, "step"), (0..20).collect::<Vec<_>>());
        let losses = |run| {
            let rows = space.rows(run, "step");
            rows.iter().map(|row| row["loss"].as_f64().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(losses("whole"), losses(&dir));
    }
}

#[test]
fn at_any_step() {
    cut("", &[1, 7, 13, 19]);
}

#[test]
fn with_momentum() {
    cut("--set optimizer.name=momentum --set optimizer.momentum=0.9 --learning-rate 0.01", &[7]);
}

#[test]
fn with_towers_and_input_threads() {
    cut("--batch-size=4 --num-towers 2 --input-threads 3 --variables replicated", &[7]);
}

#[test]
fn after_kill_9() {
    let space = Space::new();
    let flags = format!("{SMALL} --log-every 1 --save-steps 3 --keep 3");
    let mut last = 0;
    for round in 0..3 {
        let resume = if round == 0 { "" } else { "--resume" };
        let mut live = space.start(&format!("{flags} --max-steps 100000 --train-dir run {resume}"));
        // Rows beyond the checkpoint, which will be computed again.
        live.until(|| {
            let saved = space.checkpoints("run").last().copied().unwrap_or(0);
            saved > last && space.steps_so_far("run") > saved
        });
        live.kill();
        last = space.checkpoints("run").last().copied().unwrap();
    }
    let end = last + 4;
    space.ok(&format!("{flags} --max-steps {end} --train-dir run --resume"));
    space.ok(&format!("{flags} --max-steps {end} --train-dir whole"));
    same(&space.checkpoint("whole", end), &space.checkpoint("run", end));
    assert_eq!(space.steps("run", "step"), (0..end).collect::<Vec<_>>());
    let left = fs::read_dir(space.path("run")).unwrap();
    let names: Vec<_> = left.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(!names.iter().any(|name| name.ends_with(".tmp")), "{names:?}");
    assert_eq!(space.checkpoints("run").len(), 3, "{names:?}");
}

#[test]
fn after_a_signal() {
    let space = Space::new();
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let mut live =
            space.start(&format!("{SMALL} --log-every 1 --max-steps 100000 --train-dir {name}"));
        live.until(|| space.steps_so_far(name) > 3);
        live.signal(name);
        live.ended().code(code).says(&["interrupted: step ", "saved in"]);
        let saved = space.checkpoints(name);
        assert_eq!(saved.len(), 1);
        assert_eq!(space.steps(name, "step"), (0..saved[0]).collect::<Vec<_>>());
        let end = saved[0] + 3;
        space.ok(&format!("cifar10 --resume --max-steps {end} --train-dir {name}"));
        space.ok(&format!("{SMALL} --max-steps {end} --train-dir whole-{name}"));
        same(&space.checkpoint(name, end), &space.checkpoint(&format!("whole-{name}"), end));
    }
}

#[test]
fn a_second_signal_corrupts_nothing() {
    let space = Space::new();
    for round in 0..6 {
        let run = format!("run{round}");
        let mut live =
            space.start(&format!("{SMALL} --save-steps 1 --log-every 1 --train-dir {run}"));
        live.until(|| !space.checkpoints(&run).is_empty());
        live.signal("INT");
        if round % 2 == 0 {
            live.signal("INT");
        } else {
            live.signal("TERM");
            live.signal("INT");
        }
        // The code is that of whichever signal ended it.
        let ended = live.ended();
        assert!([130, 143].contains(&ended.code), "{}: {}", ended.code, ended.err);
        let checkpoints = space.checkpoints(&run);
        checkpoints.iter().for_each(|&step| drop(space.checkpoint(&run, step)));
        let end = checkpoints.last().unwrap() + 1;
        space.ok(&format!("cifar10 --resume --max-steps {end} --train-dir {run}"));
        assert_eq!(space.checkpoint(&run, end).global_step, end);
    }
}

#[test]
fn asynchronous_towers_save_at_a_signal() {
    let space = Space::new();
    let mut live = space
        .start(&format!("{SMALL} --async-towers --num-towers 2 --log-every 1 --train-dir run"));
    live.until(|| space.steps_so_far("run") > 3);
    live.signal("INT");
    live.ended().code(130);
    assert_eq!(space.checkpoints("run").len(), 1);
}

#[test]
fn a_finished_run_has_nothing_to_do() {
    let space = Space::new();
    space.ok("line-fit --max-steps 5 --train-dir run");
    let before = space.checkpoint("run", 5);
    space
        .ok("line-fit --max-steps 5 --train-dir run --resume")
        .says(&["nothing to do", "--max-steps"]);
    assert_eq!(space.checkpoint("run", 5), before);
    assert_eq!(space.checkpoints("run"), [5]);
}

#[test]
fn resuming_nothing_starts_at_step_0() {
    let space = Space::new();
    space.ok("line-fit --max-steps 5 --train-dir run --resume").says(&["no checkpoint"]);
    assert_eq!(space.checkpoints("run"), [5]);
}

#[test]
fn a_changed_setting_is_told() {
    let space = Space::new();
    space.ok("line-fit --max-steps 5 --train-dir run");
    space
        .ok("line-fit --max-steps 9 --train-dir run --resume --batch-size 16")
        .says(&["data.batch_size was 32, is 16", "train.max_steps was 5, is 9"]);
}

#[test]
fn overwriting_starts_anew() {
    let space = Space::new();
    space.ok("line-fit --max-steps 9 --train-dir run");
    // Not as long as it cannot start.
    space.run("line-fit --train-dir run --overwrite --num-gpus 1000").code(9);
    space.run("line-fit --train-dir run --overwrite --set data.examples=3").code(3);
    assert_eq!(space.checkpoints("run"), [9]);
    space.ok("line-fit --max-steps 5 --log-every 1 --train-dir run --overwrite");
    assert_eq!(space.checkpoints("run"), [5]);
    assert_eq!(space.steps("run", "step"), [0, 1, 2, 3, 4]);
}

/// What TensorFlow's own program would read and write in between changes nothing.
#[test]
fn by_way_of_tensorflows_files() {
    let space = Space::new();
    let run = format!("{SMALL} --log-every 1");
    space.ok(&format!("{run} --max-steps 20 --train-dir whole"));
    space.ok(&format!(
        "{run} --max-steps 7 --train-dir cut --set train.checkpoint.format=tensorflow"
    ));
    assert!(space.path("cut/model.ckpt-7.index").is_file());
    assert!(!space.path("cut/model.ckpt-7.safetensors").exists());
    let shown = space.ok("inspect checkpoint cut").out;
    for line in ["global_step [] i64 7", "conv1/weights/ExponentialMovingAverage [5, 5, 3, 64] f32"]
    {
        assert!(shown.contains(line), "{shown}");
    }
    let to_the_end = "cifar10 --max-steps 20 --train-dir cut --resume";
    let resumed = space.ok(&format!("{to_the_end} --set train.checkpoint.format=safetensors"));
    assert!(resumed.err.contains("model.ckpt-7 at step 7"), "{}", resumed.err);
    same(&space.checkpoint("whole", 20), &space.checkpoint("cut", 20));

    // Where TensorFlow trained there is no run.yaml: its network is the tutorial's.
    fs::remove_file(space.path("cut/run.yaml")).unwrap();
    fs::remove_file(space.path("cut/model.ckpt-20.safetensors")).unwrap();
    fs::write(space.path("cut/checkpoint"), "model_checkpoint_path: \"model.ckpt-7\"\n").unwrap();
    let resumed = space.ok(&format!("{run} --max-steps 9 --train-dir cut --resume"));
    assert!(resumed.err.contains("model.ckpt-7 at step 7"), "{}", resumed.err);
    assert_eq!(space.checkpoint("cut", 9).global_step, 9);
}
