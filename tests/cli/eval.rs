//! Judging checkpoints and telling the classes of pictures.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;

use crate::support::{Ended, Space, record};

/// Pictures that are held out: not a multiple of the batch.
const HELD_OUT: usize = 23;

/// A short run on a few pictures, whose brightness tells the class.
fn trained(space: &Space, flags: &str) {
    space.pictures("pictures", 8, HELD_OUT);
    space.ok(&format!(
        "cifar10 --data-dir pictures --batch-size 8 --set moving_average=0.9 --train-dir run {flags}"
    ));
}

/// Evaluations as objects.
#[track_caller]
fn objects(ended: &Ended) -> Vec<Value> {
    ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The first class that `predict` names, by picture.
#[track_caller]
fn predicted(ended: &Ended) -> Vec<String> {
    let first = |line: &str| {
        let (_, classes) = line.split_once(": ").unwrap();
        let (class, share) = classes.split(", ").next().unwrap().split_once(' ').unwrap();
        assert!((0.0..=1.0).contains(&share.parse::<f64>().unwrap()), "{line}");
        class.to_owned()
    };
    ended.out.lines().map(first).collect()
}

#[test]
fn every_picture_counts_once() {
    let space = Space::new();
    trained(&space, "--max-steps 40");
    let both = objects(&space.ok("eval --train-dir run --json"));
    assert_eq!(
        both.iter().map(|e| e["weights"].as_str().unwrap()).collect::<Vec<_>>(),
        ["raw", "averaged"]
    );
    for evaluation in &both {
        assert_eq!((&evaluation["step"], &evaluation["examples"]), (&40.into(), &HELD_OUT.into()));
        let classes = evaluation["classes"].as_array().unwrap();
        let totals: Vec<u64> = classes.iter().map(|c| c["total"].as_u64().unwrap()).collect();
        assert_eq!(totals, [3, 3, 3, 2, 2, 2, 2, 2, 2, 2]);
        let correct: u64 = classes.iter().map(|c| c["correct"].as_u64().unwrap()).sum();
        let precision = evaluation["precision"].as_f64().unwrap();
        assert_eq!(precision, correct as f64 / HELD_OUT as f64);
        let top5 = evaluation["top5"].as_f64().unwrap();
        assert!(top5 >= precision && top5 <= 1.0);
        assert!(evaluation["cross_entropy"].as_f64().is_some_and(f64::is_finite));
    }

    // Picture by picture it is the same.
    let picks = space.ok("predict pictures/test_batch.bin --train-dir run --records 100 --top 1");
    let names = names(&space);
    let classes = predicted(&picks);
    assert_eq!(classes.len(), HELD_OUT);
    let hits = classes.iter().enumerate().filter(|(i, class)| **class == names[i % 10]).count();
    assert_eq!(both[1]["precision"].as_f64().unwrap(), hits as f64 / HELD_OUT as f64);

    // Any batch and any number of threads: the same.
    let again = objects(&space.ok("eval --train-dir run --json --threads 1"));
    assert_eq!(again, both);
    for (flags, examples) in [
        ("--num-examples 5", 5),
        ("--num-examples 16", 16),
        ("--num-examples 1000", HELD_OUT),
        ("--run_once=True --eval_interval_secs 300", HELD_OUT),
        ("--eval-data train-eval", 40),
        ("--eval-data=train_eval", 40),
    ] {
        let some =
            objects(&space.ok(&format!("eval --train-dir run --json --weights raw {flags}")));
        assert_eq!(some.len(), 1, "{flags}");
        assert_eq!(some[0]["examples"], examples, "{flags}");
    }
}

/// The names of the classes, as the checkpoint has them.
fn names(space: &Space) -> Vec<String> {
    let snapshot = space.checkpoint("run", *space.checkpoints("run").last().unwrap());
    snapshot.metadata["classes"].split(',').map(str::to_owned).collect()
}

#[test]
fn lines_and_a_table() {
    let space = Space::new();
    trained(&space, "--max-steps 2");
    let ended = space.ok("eval --train-dir run --eval-dir judged");
    let lines: Vec<&str> =
        ended.out.lines().filter(|line| line.contains(": precision @ 1 = ")).collect();
    assert_eq!(lines.len(), 2, "{}", ended.out);
    for (line, weights) in lines.iter().zip(["raw", "averaged"]) {
        assert!(line.contains(", 23 examples, ") && line.contains("(top 5 "), "{line}");
        assert!(line.ends_with(&format!("{weights} weights, step 2)")), "{line}");
    }
    for name in names(&space) {
        let rows: Vec<_> =
            ended.out.lines().filter(|line| line.trim_start().starts_with(&name)).collect();
        assert_eq!(rows.len(), 2, "{name} in {}", ended.out);
        assert!(rows.iter().all(|row| row.contains(" / ")), "{rows:?}");
    }
    let events = space.ok("inspect events judged").out;
    assert!(events.contains("step 2: Precision @ 1 = "), "{events}");
    assert!(events.contains("step 2: Precision @ 1 (raw weights) = "), "{events}");
}

#[test]
fn a_run_without_averages() {
    let space = Space::new();
    trained(&space, "--max-steps 1 --set moving_average=off");
    let ended =
        space.ok("eval --train-dir run --json --weights averaged").says(&["no moving averages"]);
    let all = objects(&ended);
    assert_eq!((all.len(), &all[0]["weights"]), (1, &"raw".into()));
    assert_eq!(predicted(&space.ok("predict pictures/test_batch.bin --train-dir run")).len(), 10);
}

#[test]
fn a_running_job_is_followed() {
    let space = Space::new();
    space.pictures("pictures", 8, HELD_OUT);
    // Started first, it waits for the run.
    let follower = space.command(
        "eval --train-dir run --json --weights raw --eval-interval-secs 0.1 --until-step 60",
    );
    let follower = std::thread::spawn(move || {
        let mut follower = follower;
        Ended::from(follower.output().unwrap())
    });
    space.ok("cifar10 --data-dir pictures --batch-size 8 --save-steps 5 --keep 2 --max-steps 60 --train-dir run");
    let all = objects(&follower.join().unwrap().code(0));
    let steps: Vec<u64> = all.iter().map(|e| e["step"].as_u64().unwrap()).collect();
    assert!(steps.is_sorted_by(|a, b| a < b) && steps.last() == Some(&60), "{steps:?}");
    assert!(all.iter().all(|e| e["examples"] == HELD_OUT));
}

#[test]
fn a_follower_ends_at_a_signal() {
    let space = Space::new();
    trained(&space, "--max-steps 1");
    let mut live = space.start("eval --train-dir run --eval-dir judged --eval-interval-secs 0.1");
    // The evaluation is written only after the signals are listened to.
    live.until(|| space.run("inspect events judged").out.contains("Precision @ 1"));
    live.signal("TERM");
    live.ended().code(0);
}

#[test]
fn evaluation_while_training() {
    let space = Space::new();
    trained(&space, "--max-steps 5 --eval-every 2 --output json");
    let steps = space.steps("run", "evaluation");
    // Raw and averaged weights, and once more at the end.
    assert_eq!(steps, [2, 2, 4, 4, 5, 5]);
    let last = objects(&space.ok("eval --train-dir run --json"));
    let rows = space.rows("run", "evaluation");
    for (row, evaluation) in rows[4..].iter().zip(&last) {
        assert_eq!(row["precision"], evaluation["precision"]);
        assert_eq!(row["classes"], evaluation["classes"]);
    }
    // Resumed, none is lost and none comes twice.
    space.ok("cifar10 --train-dir run --resume --max-steps 7");
    assert_eq!(space.steps("run", "evaluation"), [2, 2, 4, 4, 5, 5, 6, 6, 7, 7]);
}

/// An RGB picture of any size as PNG.
fn png(width: u32, height: u32, pixels: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header().unwrap().write_image_data(pixels).unwrap();
    bytes
}

/// A grey ramp of 9 x 7 pixels, by libjpeg.
const JPEG: &str = "ffd8ffe000104a46494600010100000100010000ffdb004300140e0f120f0d14121012171514181e32211e1c1c1e3d2c2e24\
3249404c4b47404645505a736250556d5645466488656d777b8182814e608d978c7d96737e817cffc0000b08000700090101\
1100ffc4001500010100000000000000000000000000000406ffc400161001010100000000000000000000000000000642ff\
da0008010100003f001cde164fffd9";

#[test]
fn pictures_of_any_kind() {
    let space = Space::new();
    trained(&space, "--max-steps 3");
    // The same picture as a record and as a PNG.
    let own = record(3);
    let planes = &own[1..];
    let pixels: Vec<u8> =
        (0..1024).flat_map(|i| [planes[i], planes[1024 + i], planes[2048 + i]]).collect();
    let jpeg: Vec<u8> = (0..JPEG.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&JPEG[i..i + 2], 16).unwrap())
        .collect();
    for (name, bytes) in [
        ("one.bin", own.clone()),
        ("one.png", png(32, 32, &pixels)),
        ("wide.png", png(70, 40, &[9; 70 * 40 * 3])),
        ("dot.png", png(1, 1, &[255, 0, 0])),
        ("ramp.jpg", jpeg),
    ] {
        fs::write(space.path(name), bytes).unwrap();
    }
    let files = "one.bin one.png wide.png dot.png ramp.jpg";
    let ended = space.ok(&format!("predict {files} --train-dir run --top 10"));
    let shares: BTreeMap<&str, &str> =
        ended.out.lines().map(|line| line.split_once(": ").unwrap()).collect();
    assert_eq!(
        shares.keys().copied().collect::<Vec<_>>(),
        ["dot.png", "one.bin[0]", "one.png", "ramp.jpg", "wide.png"]
    );
    assert_eq!(shares["one.bin[0]"], shares["one.png"]);
    for line in shares.values() {
        let all: Vec<f64> = line
            .split(", ")
            .map(|class| class.split_once(' ').unwrap().1.parse().unwrap())
            .collect();
        assert_eq!(all.len(), 10);
        assert!((all.iter().sum::<f64>() - 1.0).abs() < 0.01 && all.is_sorted_by(|a, b| a >= b));
    }
}

#[test]
fn what_is_no_picture() {
    let space = Space::new();
    trained(&space, "--max-steps 1");
    let good = png(3, 3, &[7; 27]);
    let mut label = record(0);
    label[0] = 77;
    for (name, bytes) in [
        ("noise", vec![1, 2, 3]),
        ("empty", Vec::new()),
        ("half.png", good[..good.len() / 2].to_vec()),
        ("magic.jpg", vec![0xFF, 0xD8, 0xFF]),
        (
            "half.jpg",
            (0..80).map(|i| u8::from_str_radix(&JPEG[i * 2..i * 2 + 2], 16).unwrap()).collect(),
        ),
        ("label.bin", label),
    ] {
        fs::write(space.path(name), bytes).unwrap();
        space.run(&format!("predict {name} --train-dir run")).code(3).says(&[name]);
    }
    space.run("predict absent.png --train-dir run").code(3).says(&["absent.png"]);
    space.run("predict . --train-dir run").code(3).says(&["."]);
    space.run("predict noise --train-dir nowhere").code(2).says(&["nowhere"]);
    space.ok("line-fit --max-steps 1 --train-dir line");
    space.run("predict noise --train-dir line").code(2).says(&["line", "no classes"]);
    space.run("eval --train-dir line").code(2).says(&["line", "no classes"]);
}

#[test]
fn data_that_went_away() {
    let space = Space::new();
    trained(&space, "--max-steps 1");
    fs::remove_file(space.path("pictures/test_batch.bin")).unwrap();
    space.run("eval --train-dir run").code(3).says(&["pictures/test_batch.bin"]);
    space.pictures("elsewhere", 1, 4);
    let all = objects(&space.ok("eval --train-dir run --data_dir elsewhere --json"));
    assert_eq!(all[0]["examples"], 4);
    fs::remove_file(space.path("run/model.ckpt-1.safetensors")).unwrap();
    fs::remove_file(space.path("run/checkpoint")).unwrap();
    space.run("eval --train-dir run --data-dir elsewhere").code(2).says(&["no checkpoint"]);
}
