//! What a run prints and leaves behind, and the commands that look at it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;

use serde_json::Value;

use crate::support::{Ended, SMALL, Space};

/// `2026-11-29 19:27:40.337271: step 100, loss = 4.05 (2151.3 examples/sec; 0.059 sec/batch)`, taken apart.
fn step_line(line: &str) -> Option<(u64, f64)> {
    let (stamp, rest) = line.split_at_checked(26)?;
    let shape: String = stamp.chars().map(|c| if c.is_ascii_digit() { 'd' } else { c }).collect();
    if shape != "dddd-dd-dd dd:dd:dd.dddddd" {
        return None;
    }
    let (step, rest) = rest.strip_prefix(": step ")?.split_once(", loss = ")?;
    let (loss, rest) = rest.split_once(" (")?;
    let (rate, rest) = rest.split_once(" examples/sec; ")?;
    let seconds = rest.strip_suffix(" sec/batch)")?;
    let decimals = |text: &str| text.split_once('.').map(|(_, after)| after.len());
    let positive =
        |text: &str| text.parse::<f64>().is_ok_and(|value| value.is_finite() && value >= 0.0);
    let good = decimals(loss) == Some(2)
        && decimals(rate) == Some(1)
        && decimals(seconds) == Some(3)
        && positive(rate)
        && positive(seconds);
    if good { Some((step.parse().ok()?, loss.parse().ok()?)) } else { None }
}

#[test]
fn the_first_steps_are_drawn_when_asked_for() {
    let space = Space::new();
    space.ok(&format!("{SMALL} --num-towers 2 --max-steps 5 --trace-steps 3 --train-dir run"));
    let text = std::fs::read_to_string(space.path("run/trace.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let count = |name: &str| events.iter().filter(|e| e["ph"] == "X" && e["name"] == name).count();
    assert_eq!(["input", "compute", "reduce", "apply"].map(count), [3; 4]);
    assert_eq!(count("gradients"), 2 * 3);
    let spans = || events.iter().filter(|e| e["ph"] == "X");
    let lanes: Vec<&str> = events
        .iter()
        .filter(|e| e["name"] == "thread_name")
        .map(|e| e["args"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(lanes, ["step", "tower_0", "tower_1"]);
    // The parts of the step lie one after the other.
    let steps: Vec<_> = spans().filter(|e| e["tid"] == 0).collect();
    let time = |e: &serde_json::Value, key: &str| e[key].as_f64().unwrap();
    assert!(
        steps.windows(2).all(|p| time(p[0], "ts") + time(p[0], "dur") <= time(p[1], "ts") + 1.0)
    );
}

#[test]
fn fewer_instructions_give_the_same_bits() {
    let space = Space::new();
    let run = |limit: &str| {
        let args = format!("{SMALL} --max-steps 3 --train-dir {limit}");
        let mut command = space.command(&args);
        let ended = Ended::from(command.env("TFTRAIN_MAX_CPU_ISA", limit).output().unwrap());
        (ended, space.path(limit).join("model.ckpt-3.safetensors"))
    };
    let (portable, amx) = (run("portable"), run("amx"));
    assert!(portable.0.code(0).out.contains("portable") && !amx.0.code(0).out.contains("portable"));
    assert!(fs::read(portable.1).unwrap() == fs::read(amx.1).unwrap());
    run("sse5").0.code(2).says(&["TFTRAIN_MAX_CPU_ISA", "sse5", "avx512_bf16"]);
}

#[test]
fn a_header_then_a_line_every_ten_steps() {
    let space = Space::new();
    let ended = space.ok(&format!("{SMALL} --max-steps 25 --num-towers 2 --train-dir run"));
    let (heads, lines): (Vec<&str>, Vec<&str>) =
        ended.out.lines().partition(|line| step_line(line).is_none());
    let steps: Vec<u64> = lines.iter().filter_map(|line| step_line(line)).map(|(s, _)| s).collect();
    assert_eq!(steps, [0, 10, 20, 24]);
    for head in [
        "Model:         cifar10 (1,068,298 parameters, 4.27 MB)",
        "Data:          synthetic (100 training examples)",
        "Batch size:    8 per tower, 16 per update",
        "Learning rate: 0.1, x 0.1 every 350 epochs in stairs",
        "Averages:      decay 0.9999",
        "Precision:     f32",
        "Seed:          1",
        "Train dir:     run",
    ] {
        assert!(heads.contains(&head), "no {head} in {heads:?}");
    }
    let towers = heads.iter().find(|head| head.starts_with("Towers:")).unwrap();
    assert!(towers.contains("2 on ") && towers.contains("device:CPU:1"), "{towers}");
    for name in ["Variables:", "Reduce:"] {
        assert!(heads.iter().any(|head| head.starts_with(name)), "{heads:?}");
    }
    assert!(ended.err.contains("done: step 25"), "{}", ended.err);
}

#[test]
fn a_run_leaves_its_files() {
    let space = Space::new();
    let flags = "cifar10 --synthetic --batch-size 8 --set data.examples=100 --set seed=3";
    space.ok(&format!("{flags} --max_steps=7 --log_frequency 2 --save-steps 3 --train_dir run"));

    assert_eq!(space.steps("run", "step"), [0, 2, 4, 6]);
    for row in space.rows("run", "step") {
        for key in ["time", "loss", "examples_per_sec", "sec_per_batch", "learning_rate"] {
            assert!(row[key].as_f64().is_some_and(f64::is_finite), "{key} in {row}");
        }
    }
    let state = fs::read_to_string(space.path("run/checkpoint")).unwrap();
    let names = ["model.ckpt-7", "model.ckpt-3", "model.ckpt-6", "model.ckpt-7"];
    let lines: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(i, name)| {
            let field = if i == 0 { "model_checkpoint_path" } else { "all_model_checkpoint_paths" };
            format!("{field}: \"{name}.safetensors\"\n")
        })
        .collect();
    assert_eq!(state, lines.concat());
    let yaml = fs::read_to_string(space.path("run/run.yaml")).unwrap();
    for line in [
        "name: synthetic  # --synthetic",
        "seed: 3  # --set",
        "max_steps: 7  # --max-steps",
        "  cpus: 1  # default",
    ] {
        assert!(yaml.contains(line), "no {line} in {yaml}");
    }

    let events = space.ok("inspect events run").out;
    for what in [
        "file_version brain.Event:2",
        "session start",
        "step 6: total_loss = ",
        "step 6: total_loss (raw) = ",
        "step 0: learning_rate = 0.1",
        "step 0: cross_entropy (raw) = ",
        "step 0: examples_per_sec = ",
        "step 0: conv1/sparsity = ",
        "step 0: conv1/activations: histogram of 294912 values",
        "step 0: conv1/weights/gradients: histogram of 4800 values",
        "step 0: conv1/weights: histogram of 4800 values",
        "step 0: images/image/0: picture 24x24",
        "checkpoint ",
        "session stop",
    ] {
        assert!(events.contains(what), "no {what} in {events}");
    }

    for path in ["run", "run/model.ckpt-6.safetensors"] {
        let text = space.ok(&format!("inspect checkpoint {path}")).out;
        for line in
            ["conv1/weights [5, 5, 3, 64] f32 mean ", "local3/weights/ExponentialMovingAverage ["]
        {
            assert!(text.contains(line), "no {line} in {text}");
        }
        let step = if path == "run" { "global_step: 7" } else { "global_step: 6" };
        assert!(text.contains(step), "{text}");
    }
    let again = space.ok("inspect config run/run.yaml --set data.batch_size=9").out;
    assert!(again.contains("batch_size: 9  # --set"), "{again}");
    // What a run wrote trains the same again.
    space.ok("--config run/run.yaml --train-dir other");
    let (a, b) = (space.checkpoint("run", 7), space.checkpoint("other", 7));
    assert_eq!(a.tensors, b.tensors);
}

#[test]
fn the_newest_checkpoints_are_kept() {
    let space = Space::new();
    space.ok("line-fit --max-steps 10 --save-steps 1 --keep 2 --train-dir two");
    assert_eq!(space.checkpoints("two"), [9, 10]);
    space.ok("line-fit --max-steps 4 --save-steps 1 --keep 0 --train-dir all");
    assert_eq!(space.checkpoints("all"), [1, 2, 3, 4]);
}

#[test]
fn line_fit_finds_the_line() {
    let space = Space::new();
    let ended = space.ok("line-fit --train-dir run");
    let last = ended.out.lines().last().unwrap();
    let values: Vec<(&str, f64)> = last
        .split(", ")
        .map(|part| part.split_once(": ").unwrap())
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect();
    let [("step", step), ("weight", weight), ("bias", bias), ("loss", loss)] = values[..] else {
        panic!("{last}")
    };
    assert_eq!(step, 999.0);
    assert!((weight - 5.0).abs() < 0.05 && (bias - 8.0).abs() < 0.05, "{last}");
    // The noise of 0.22 remains.
    assert!((0.02..0.09).contains(&loss), "{last}");
}

#[test]
fn objects_instead_of_lines() {
    let space = Space::new();
    let ended = space.ok(&format!(
        "{SMALL} --max-steps 11 --output json --log-device-placement --train-dir run"
    ));
    let lines: Vec<Value> =
        ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().map(|l| l["step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 10]);
    assert!(lines.iter().all(|line| line["loss"].as_f64().is_some_and(f64::is_finite)));
    assert!(ended.err.contains("Batch size:    8 per tower"), "{}", ended.err);
}

#[test]
fn lines_of_tf_cnn_benchmarks() {
    let space = Space::new();
    let ended = space.ok("line-fit --max-steps 201 --output benchmark --train-dir run");
    let mut steps = Vec::new();
    assert!(ended.out.contains("Done warm up\nStep\tImg/sec\ttotal_loss\n"), "{}", ended.out);
    assert!(ended.out.contains("total images/sec: "), "{}", ended.out);
    for line in ended.out.lines().filter(|line| line.contains("\timages/sec")) {
        let [step, speed, loss] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let numbers: Vec<f64> = speed
            .strip_prefix("images/sec: ")
            .and_then(|rest| rest.strip_suffix(')'))
            .unwrap()
            .replace(" +/- ", " ")
            .replace(" (jitter = ", " ")
            .split(' ')
            .map(|number| number.parse().unwrap())
            .collect();
        assert!(numbers.len() == 3 && numbers[0] > 0.0, "{line}");
        assert!(loss.parse::<f64>().unwrap().is_finite());
        steps.push(step.parse::<u64>().unwrap());
    }
    // Counted from the end of the warm-up.
    assert_eq!(steps, [1, 100]);
}

#[test]
fn the_placement_of_every_operation() {
    let space = Space::new();
    let run = "line-fit --max-steps 1 --num-towers 2 --log_device_placement=True --train-dir run";
    let out = space.ok(run).out;
    let cpu = |i| format!("/job:localhost/replica:0/task:0/device:CPU:{i}");
    for line in [
        "Device mapping: no known devices.".to_owned(),
        format!("weight: (VariableV2): {}", cpu(0)),
        format!("tower_0/MatMul: (MatMul): {}", cpu(0)),
        format!("tower_1/MatMul: (MatMul): {}", cpu(1)),
    ] {
        assert_eq!(out.lines().filter(|l| *l == line).count(), 1, "{line} in {out}");
    }
    let run =
        "line-fit --max-steps 1 --num-towers 2 --log-device-placement=false --train-dir other";
    assert!(!space.ok(run).out.contains("MatMul"));
}

#[test]
fn gpus_that_are_not_there() {
    let space = Space::new();
    // More than any machine has.
    space.run(&format!("{SMALL} --num-gpus 1000 --train-dir run")).code(9).says(&[
        "1000 GPUs were asked for",
        "visible",
        "--num-towers",
        "--allow-soft-placement",
    ]);
    assert!(space.checkpoints("run").is_empty());

    let run = format!("{SMALL} --max-steps 1 --num_gpus=4 --allow_soft_placement --train-dir soft");
    let ended = space.ok(&run);
    let loud: Vec<_> = ended.err.lines().filter(|line| line.starts_with("WARNING")).collect();
    assert!(loud.len() == 1 && loud[0].contains("4 GPU towers run on the CPU"), "{}", ended.err);
    assert!(
        ended.out.contains("device:CPU:3") && ended.out.contains("32 per update"),
        "{}",
        ended.out
    );
    // It goes on as it ran.
    let ended = space.ok("cifar10 --resume --max-steps 2 --train-dir soft");
    assert!(ended.out.contains("32 per update"), "{}", ended.out);
}

#[test]
fn commands_that_only_print() {
    let space = Space::new();
    space.pictures("pictures", 2, 3);
    for (args, words) in [
        ("devices", &["/job:localhost/replica:0/task:0/device:CPU:0", "cudnn: ", "nccl: "][..]),
        ("data info cifar10", &["http", "test_batch.bin"]),
        ("data info cifar100", &["cifar-100", "train.bin"]),
        ("data info synthetic", &["ten classes"]),
        ("data info line", &["y = 5x + 8"]),
        (
            "inspect model cifar10",
            &["1,068,298 parameters", "conv2/weights [5, 5, 64, 64]", "(Conv2D)"],
        ),
        ("inspect model line --batch-size 4", &["2 parameters", "MatMul: (MatMul) [4, 1]"]),
        ("inspect dataset pictures", &["10 pictures", "3 pictures", "airplane: 1", "truck: 0"]),
        ("completions bash", &["complete", "--num-towers"]),
        ("completions zsh", &["#compdef tftrain"]),
        ("completions fish", &["complete -c tftrain"]),
        ("man", &[".TH tftrain", "cifar10"]),
        ("--help", &["cifar10", "line-fit", "Exit codes"]),
        ("--version", &[env!("CARGO_PKG_VERSION")]),
    ] {
        let out = space.ok(args).out;
        words.iter().for_each(|word| assert!(out.contains(word), "no {word} in {args}: {out}"));
    }
}

#[test]
fn of_a_flag_given_twice_the_last_counts() {
    let space = Space::new();
    space.ok("line-fit --max-steps 5 --train-dir run --max-steps 3 --seed 1 --seed=2");
    assert_eq!(space.checkpoints("run"), [3]);
}

/// The object of a benchmark.
#[track_caller]
fn benchmark(space: &Space, args: &str, code: i32) -> Value {
    serde_json::from_str(&space.run(args).code(code).out).unwrap()
}

#[test]
fn a_benchmark_of_steps() {
    let space = Space::new();
    let args = "bench step --batch-size 8 --num-batches 3 --num-warmup-batches 1 --num-towers 2";
    let result = benchmark(&space, &format!("{args} --json"), 0);
    assert_eq!(result["valid"], true);
    assert_eq!((&result["steps"], &result["global_batch"]), (&3.into(), &16.into()));
    for key in ["images_per_sec", "total_images_per_sec", "loss"] {
        assert!(result[key].as_f64().is_some_and(|v| v.is_finite() && v > 0.0), "{result}");
    }
    for key in ["uncertainty", "jitter"] {
        assert!(result[key].as_f64().is_some_and(|v| v.is_finite() && v >= 0.0), "{result}");
    }
    let parts = result["median"].as_object().unwrap();
    for part in ["input_ms", "forward-backward_ms", "reduce_ms", "apply_ms", "step_ms"] {
        assert!(parts[part].as_f64().is_some_and(|v| v.is_finite() && v > 0.0), "{result}");
    }
    let lines = space.ok(&format!("{args} --display-every 1")).out;
    assert_eq!(lines.matches("images/sec: ").count(), 3 + 1, "{lines}");
    assert!(lines.contains("total images/sec: ") && lines.contains("(jitter = "), "{lines}");
    assert!(lines.contains("forward-backward "), "{lines}");
}

#[test]
fn a_profile_names_every_operation_and_what_is_possible() {
    let space = Space::new();
    let args =
        "bench step --batch-size 8 --num-batches 3 --num-warmup-batches 1 --threads 1 --profile";
    let result = benchmark(&space, &format!("{args} --json"), 0);
    let profile = &result["profile"];
    assert!(
        profile["peak_gflops"].as_f64().unwrap() > 0.0
            && profile["peak_gbytes"].as_f64().unwrap() > 0.0
    );
    assert!(profile["handover_ns"].is_null(), "one thread hands nothing over");
    let rows = profile["operations"].as_array().unwrap();
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap();
    assert!(rows.iter().all(|row| number(row, "gflops") >= 0.0 && number(row, "gbytes") > 0.0));
    assert!(rows.windows(2).all(|pair| number(&pair[0], "ms") >= number(&pair[1], "ms")));
    let conv2 = rows.iter().find(|row| row["name"] == "conv2/Relu").unwrap();
    // 25 taps, 64 channels in and out, 12 x 12 places, 8 pictures.
    let flops = 2.0 * 25.0 * 64.0 * 64.0 * 144.0 * 8.0;
    let counted = number(conv2, "gflops") * number(conv2, "ms") * 1e6;
    assert!((counted / flops - 1.0).abs() < 1e-6, "{counted} {flops}");
    let text = space.ok(&args.replace("--threads 1", "--threads 2")).out;
    for words in ["GB/s of copies, ", "ns until a core sees", "conv2/Relu (FusedConv2D)"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn a_benchmark_that_diverges_is_invalid() {
    let space = Space::new();
    let args =
        "bench step --batch-size 8 --num-batches 9 --json --set optimizer.learning_rate=1e30";
    for warm in [0, 9] {
        let result = benchmark(&space, &format!("{args} --num-warmup-batches {warm}"), 6);
        assert_eq!(result["valid"], false);
    }
}

#[test]
fn a_benchmark_of_the_mean_over_processes() {
    let space = Space::new();
    for (flags, ranks) in [("", 2), ("--ranks 3 --exchange ring --wire bf16", 3)] {
        let args = format!("bench reduce --sizes 4,300000 --rounds 2 {flags}");
        let result = benchmark(&space, &format!("{args} --json"), 0);
        assert_eq!(result["ranks"], ranks);
        for (size, bytes) in [4, 300_000].into_iter().enumerate() {
            let size = &result["sizes"][size];
            assert_eq!(size["bytes"], bytes);
            assert_eq!(size["rounds"].as_array().map(Vec::len), Some(2));
            assert!(size["gb_per_sec"].as_f64().is_some_and(|v| v.is_finite() && v > 0.0));
        }
        assert_eq!(space.ok(&args).out.matches("GB/s").count(), 2);
    }
}

#[test]
fn a_benchmark_of_a_round_with_a_parameter_server() {
    let space = Space::new();
    let result = benchmark(&space, "bench rpc --rounds 1 --json", 0);
    for key in ["tcp_ms", "pull_ms", "push_ms", "round_ms", "ratio"] {
        assert!(result[key].as_f64().is_some_and(|v| v.is_finite() && v > 0.0), "{result}");
    }
    assert!(space.ok("bench rpc --rounds 1").out.contains("times plain TCP"));
}

#[test]
fn a_benchmark_of_the_input() {
    let space = Space::new();
    space.pictures("pictures", 4, 1);
    for data in ["", "--data-dir pictures"] {
        let args = format!("bench input --num-batches 5 --batch-size 8 --input-threads 2 {data}");
        let result = benchmark(&space, &format!("{args} --json"), 0);
        assert_eq!((&result["batches"], &result["batch_size"]), (&5.into(), &8.into()));
        assert!(result["images_per_sec"].as_f64().is_some_and(|v| v.is_finite() && v > 0.0));
        assert!(space.ok(&args).out.contains("images/sec: "));
    }
    for args in ["input --batch-size 0", "input --num-batches 0", "step --num-batches 0"] {
        space.run(&format!("bench {args}")).code(2).says(&["0"]);
    }
}
