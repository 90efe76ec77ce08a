//! What goes wrong ends with its code and one message that names the thing.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use crate::support::{Ended, SMALL, Space, record, same};

#[test]
fn a_directory_with_a_run() {
    let space = Space::new();
    space.ok("line-fit --max-steps 5 --train-dir run");
    let before = fs::read(space.path("run/metrics.jsonl")).unwrap();
    space.run("line-fit --train-dir run").code(2).says(&["run", "--resume", "--overwrite"]);
    assert_eq!(fs::read(space.path("run/metrics.jsonl")).unwrap(), before);
    assert_eq!(space.checkpoints("run"), [5]);
}

#[test]
fn a_run_of_another_model_or_shape() {
    let space = Space::new();
    space.ok(&format!("{SMALL} --max-steps 2 --train-dir run"));
    let before = space.checkpoint("run", 2);
    space.run("line-fit --resume --train-dir run").code(8).says(&["run", "cifar10"]);
    let other = "model: line\ndata: {name: line, batch_size: 8}\ntrain: {dir: run}\n";
    fs::write(space.path("line.yaml"), other).unwrap();
    space.run("train --config line.yaml --resume").code(8).says(&["no tensor weight"]);

    let hundred: Vec<u8> = (0..20).flat_map(|i| [vec![0], record(i)].concat()).collect();
    fs::create_dir(space.path("hundred")).unwrap();
    fs::write(space.path("hundred/train.bin"), hundred).unwrap();
    space
        .run("cifar10 --resume --max-steps 9 --train-dir run --set data.name=cifar100 --data-dir hundred")
        .code(8)
        .says(&["softmax_linear/weights", "[192, 10]", "[192, 100]"]);
    let momentum = "--set optimizer.name=momentum --set optimizer.momentum=0.9";
    space
        .run(&format!("cifar10 --resume --max-steps 9 --train-dir run {momentum}"))
        .code(8)
        .says(&["conv1/weights/Momentum"]);
    // Nothing of this has touched the run, not even its settings.
    same(&before, &space.checkpoint("run", 2));
    space.ok("cifar10 --resume --max-steps 3 --train-dir run");
}

#[test]
fn a_run_whose_settings_are_damaged() {
    let space = Space::new();
    space.ok("line-fit --max-steps 5 --train-dir run --seed 7");
    fs::write(space.path("run/run.yaml"), "model: line\nsead: 7\n").unwrap();
    space.run("line-fit --resume --train-dir run").code(2).says(&[
        "run/run.yaml",
        "2",
        "sead",
        "seed",
    ]);
}

#[test]
fn a_run_that_is_alive() {
    let space = Space::new();
    let mut live = space.start(&format!("{SMALL} --train-dir run --log-every 1"));
    live.until(|| space.steps_so_far("run") > 0);
    for mode in ["", "--resume", "--overwrite"] {
        let words = format!("in use by process {}", live.id());
        space.run(&format!("{SMALL} --train-dir run {mode}")).code(7).says(&["run", &words]);
    }
    live.signal("TERM");
    live.ended().code(143);
}

#[test]
fn a_train_dir_that_is_a_file() {
    let space = Space::new();
    fs::write(space.path("file"), "mine").unwrap();
    space.run("line-fit --train-dir file").code(7).says(&["file is not a directory"]);
    let ended = space.run("line-fit --train-dir file/run").code(7).says(&["file/run"]);
    assert_eq!(ended.err.matches("Not a directory").count(), 1, "{}", ended.err);
    assert_eq!(fs::read(space.path("file")).unwrap(), b"mine");
}

#[test]
fn a_full_disk() {
    let space = Space::new();
    space.ok(&format!("{SMALL} --max-steps 2 --train-dir run"));
    let before = space.checkpoint("run", 2);
    // A limit on file sizes stands in for it: 4 MiB, or 8 where the shell counts in KiB; a checkpoint takes 8.5 MB.
    space
        .shell("ulimit -f 8192; exec $TFTRAIN cifar10 --resume --max-steps 4 --train-dir run")
        .code(7)
        .says(&["cannot write run/model.ckpt-4.safetensors"]);
    assert_eq!(space.checkpoints("run"), [2]);
    same(&before, &space.checkpoint("run", 2));
    assert!(!space.path("run/.model.ckpt-4.safetensors.tmp").exists());
    space.ok("cifar10 --resume --max-steps 4 --train-dir run");

    space.shell("ulimit -f 0; exec $TFTRAIN line-fit --train-dir none").code(7).says(&["none/"]);
    // Rows of metrics, from somewhere in the middle on.
    space
        .shell(
            "ulimit -f 8; exec $TFTRAIN line-fit --train-dir rows --log-every 1 --summary-every 0",
        )
        .code(7)
        .says(&["cannot write rows/"]);
}

#[test]
fn nowhere_to_print() {
    let space = Space::new();
    if Path::new("/dev/full").exists() {
        space
            .shell("$TFTRAIN line-fit --train-dir run > /dev/full")
            .code(7)
            .says(&["standard output"]);
    }
}

#[test]
fn a_reader_that_goes_away() {
    let space = Space::new();
    for args in ["line-fit --train-dir run --log-every 1", "man", "inspect model cifar10"] {
        let mut command = space.command(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        let ended = Ended::from(child.wait_with_output().unwrap());
        assert!(!first.is_empty());
        // Short output may be out before.
        assert!([0, 141].contains(&ended.code), "{args}: {}", ended.code);
        assert!(!ended.err.contains("panicked") && !ended.err.contains("error"), "{}", ended.err);
    }
    let ended = space.shell("$TFTRAIN line-fit --train-dir other | head -n 1").code(0);
    assert_eq!(ended.out.lines().count(), 1);
}

#[test]
fn a_damaged_checkpoint() {
    let space = Space::new();
    space.ok(&format!("{SMALL} --max-steps 6 --save-steps 2 --train-dir run --log-every 1"));
    let good = space.checkpoint("run", 6);
    let newest = space.path("run/model.ckpt-6.safetensors");
    let mut bytes = fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&newest, bytes).unwrap();
    space.ok("cifar10 --resume --max-steps 6 --train-dir run").says(&[
        "WARNING: skipped run/model.ckpt-6.safetensors",
        "model.ckpt-4.safetensors at step 4",
    ]);
    same(&good, &space.checkpoint("run", 6));
    assert_eq!(space.steps("run", "step"), [0, 1, 2, 3, 4, 5]);

    for step in [2, 4, 6] {
        fs::write(space.path(&format!("run/model.ckpt-{step}.safetensors")), "short").unwrap();
    }
    space.run("cifar10 --resume --max-steps 9 --train-dir run").code(7).says(&["none of the 3"]);
    space.run("eval --train-dir run --num-examples 1").code(7).says(&["none of the 3"]);
    space.run("inspect checkpoint run").code(7).says(&["model.ckpt-6.safetensors is damaged"]);
}

#[test]
fn missing_and_damaged_data() {
    let space = Space::new();
    let train = |dir: &str| {
        space.run(&format!(
            "cifar10 --data-dir {dir} --batch-size 8 --max-steps 1 --train-dir run-{dir}"
        ))
    };
    let spoil = |dir: &str, name: &str, spoil: fn(&mut Vec<u8>)| {
        space.pictures(dir, 2, 1);
        let path = space.path(dir).join(name);
        let mut bytes = fs::read(&path).unwrap();
        spoil(&mut bytes);
        fs::write(path, bytes).unwrap();
    };
    space.pictures("missing", 2, 1);
    fs::remove_file(space.path("missing/data_batch_4.bin")).unwrap();
    train("missing").code(3).says(&["missing/data_batch_4.bin"]);
    spoil("short", "data_batch_3.bin", |bytes| bytes.truncate(4000));
    train("short").code(3).says(&["short/data_batch_3.bin", "record 1"]);
    spoil("label", "data_batch_2.bin", |bytes| bytes[3073] = 10);
    train("label").code(3).says(&["label/data_batch_2.bin", "record 1", "label 10"]);
    spoil("empty", "data_batch_5.bin", Vec::clear);
    train("empty").code(3).says(&["empty/data_batch_5.bin", "empty"]);
    space.pictures("few", 1, 1);
    train("few").code(3).says(&["5 examples", "8 of one batch"]);
    // Nobody finds a run where none began.
    for dir in ["missing", "short", "label", "empty", "few"] {
        assert!(!space.path(&format!("run-{dir}/metrics.jsonl")).exists(), "{dir}");
    }
    space.run("inspect dataset missing").code(3).says(&["missing/data_batch_4.bin"]);
}

#[test]
fn no_network() {
    let space = Space::new();
    // A proxy that is not there: no machine gets farther.
    let mut command = space.command("cifar10 --data-dir absent --max-steps 1 --train-dir run");
    for name in ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "http_proxy", "HTTP_PROXY"]
    {
        command.env(name, "http://127.0.0.1:1");
    }
    for name in ["no_proxy", "NO_PROXY"] {
        command.env_remove(name);
    }
    let ended = Ended::from(command.output().unwrap());
    ended.code(3).says(&["cannot download http", "--synthetic"]);
}

#[test]
fn flags_and_keys_nobody_knows() {
    let space = Space::new();
    fs::write(space.path("bad.yaml"), "model: line\ndata: {name: line}\ntrain:\n  max_step: 5\n")
        .unwrap();
    fs::write(space.path("torn.yaml"), "model: [line\n").unwrap();
    for (args, words) in [
        ("cifar10 --trian-dir x", &["--trian-dir", "--train-dir"][..]),
        ("cifar10 --num_gpu 1", &["--num-gpus"]),
        ("cifar", &["cifar10"]),
        ("cifar10 stray", &["stray"]),
        ("cifar10 --batch-size many", &["--batch-size", "many"]),
        ("cifar10 --batch-size 0", &["--batch-size", "0"]),
        ("cifar10 --num-gpus 1 --num-towers 1", &["--num-gpus", "--num-towers"]),
        ("cifar10 --resume --overwrite", &["--resume", "--overwrite"]),
        ("cifar10 --learning-rate -1", &["-1"]),
        ("cifar10 --learning-rate nan", &["--learning-rate"]),
        ("cifar10 --variables everywhere", &["--variables", "everywhere", "replicated"]),
        ("cifar10 --async-towers --accumulate 2", &["--async-towers", "--accumulate"]),
        ("cifar10 --set data.batchsize=3", &["batchsize", "`data`", "batch_size"]),
        ("cifar10 --set 3", &["--set", "key.path=value"]),
        ("train --config bad.yaml", &["bad.yaml", "4", "max_step", "max_steps"]),
        ("--config torn.yaml", &["torn.yaml"]),
        ("--config absent.yaml", &["absent.yaml"]),
        ("inspect config bad.yaml", &["bad.yaml", "max_steps"]),
        ("inspect model cifra10", &["cifar10"]),
        ("inspect events .", &["no event file"]),
        ("data info mnist", &["mnist", "cifar10"]),
        ("line-fit --eval-every 2", &["--eval-every", "line"]),
        ("eval --train-dir absent", &["absent", "run.yaml"]),
        ("eval --train-dir absent --until-step 3", &["--eval-interval-secs"]),
        ("eval --train-dir absent --eval-interval-secs nan", &["--eval-interval-secs"]),
        ("eval --train-dir absent --eval-interval-secs=-1", &["--eval-interval-secs"]),
        ("bench step --model vgg", &["vgg", "resnet"]),
    ] {
        space.run(args).code(2).says(words);
    }
    assert!(!space.path("runs").exists());
}

#[test]
fn a_folder_for_data_that_needs_none_is_refused() {
    let space = Space::new();
    space.pictures("pictures", 4, 10);
    space.run("train --config c.yaml --data-dir pictures").code(2).says(&["c.yaml"]);
    std::fs::write(space.path("c.yaml"), "model: cifar10\ndata: {name: synthetic}\n").unwrap();
    space.run("train --config c.yaml --data-dir pictures --train-dir run").code(2).says(&[
        "--data-dir",
        "data.name is synthetic",
        "data.name=cifar10",
    ]);
}

#[test]
fn a_run_that_diverges() {
    let space = Space::new();
    let ended = space.run(&format!(
        "{SMALL} --learning-rate 1e6 --max-steps 50 --save-steps 1 --num-towers 2 --train-dir run"
    ));
    ended.code(6).says(&["diverged", "at step ", "in tower_", "conv1/weights", "--learning-rate"]);
    let last = *space.checkpoints("run").last().unwrap();
    for (name, tensor) in &space.checkpoint("run", last).tensors {
        assert!(tensor.as_f32().unwrap().iter().all(|v| v.is_finite()), "{name}");
    }
    space.ok("inspect checkpoint run");
    // From there with another rate.
    let end = last + 1;
    let ended =
        space.run(&format!("cifar10 --resume --train-dir run --max-steps {end} --learning-rate 0"));
    assert!([0, 6].contains(&ended.code), "{}", ended.err);

    let ended = space.run(&format!(
        "{SMALL} --learning-rate 1e6 --max-steps 50 --num-towers 2 --async-towers --train-dir async"
    ));
    ended.code(6).says(&["diverged", "in tower_"]);
    assert!(space.checkpoints("async").is_empty());
}
