//! The exact text of every configuration error.

use serde_json::json;
use tftrain::config::{Layers, RunConfig};

/// The error of a file `configs/a.yaml`.
fn file_error(text: &str) -> String {
    Layers::new(None).file("configs/a.yaml", text).resolve().expect_err("it is refused").to_string()
}

fn set_error(argument: &str) -> String {
    Layers::new(None).set(argument).resolve().expect_err("it is refused").to_string()
}

#[test]
fn unknown_keys_are_named_with_line_and_suggestion() {
    assert_eq!(
        file_error("data:\n  name: cifar10\n  batchsize: 64\n"),
        "configs/a.yaml:3: unknown key `batchsize` in `data`; did you mean `batch_size`?"
    );
    assert_eq!(
        file_error("\nmodle: line\n"),
        "configs/a.yaml:2: unknown key `modle`; did you mean `model`?"
    );
    assert_eq!(
        file_error("batch_size: 64\n"),
        "configs/a.yaml:1: unknown key `batch_size`; did you mean `data.batch_size`?"
    );
    assert_eq!(
        file_error("threads: 2\n"),
        "configs/a.yaml:1: unknown key `threads`; did you mean `data.threads` or \
         `towers.threads`?"
    );
    assert_eq!(
        file_error("checkpoint: {keep: 2}\n"),
        "configs/a.yaml:1: unknown key `checkpoint`; did you mean `train.checkpoint`?"
    );
    assert_eq!(
        file_error("towers: {zebra: 2}\n"),
        "configs/a.yaml:1: unknown key `zebra` in `towers`; \
         known: gpus, cpus, gpu_indices, accumulate, threads, asynchronous"
    );
    assert_eq!(
        file_error("train:\n  checkpoint:\n    every_sec: 2\n"),
        "configs/a.yaml:3: unknown key `every_sec` in `train.checkpoint`; \
         did you mean `every_secs`?"
    );
}

#[test]
fn unknown_choices_list_the_known_names() {
    assert_eq!(
        file_error("model: cifar\n"),
        "configs/a.yaml:1: unknown `model.name` `cifar`; \
         did you mean `cifar10`? (known: cifar10, resnet, line)"
    );
    assert_eq!(
        file_error("model:\n  name: vgg\n"),
        "configs/a.yaml:2: unknown `model.name` `vgg`; known: cifar10, resnet, line"
    );
    assert_eq!(
        set_error("precision=f16"),
        "--set: unknown `precision` `f16`; did you mean `bf16`? (known: f32, tf32, bf16)"
    );
}

#[test]
fn values_of_the_wrong_type_are_named_with_line_and_key() {
    let cases = [
        (
            "data:\n  batch_size: many\n",
            "2: `data.batch_size` must be a whole number from 1 to 4294967295, not \"many\"",
        ),
        ("seed: 1.5\n", "1: `seed` must be a whole number of at least 0, not 1.5"),
        ("seed: -1\n", "1: `seed` must be a whole number of at least 0, not -1"),
        ("seed: 010\n", "1: `seed` must be a whole number of at least 0, not \"010\""),
        (
            "optimizer:\n  name: momentum\n  nesterov: yes\n",
            "3: `optimizer.nesterov` must be true or false, not \"yes\"",
        ),
        ("model: {name: 3}\n", "1: `model.name` must be one of cifar10, resnet, line, not 3"),
        (
            "model: 3\n",
            "1: `model` must be a name or a mapping of name, depth, version, lrn, not 3",
        ),
        (
            "optimizer:\n  learning_rate: fast\n",
            "2: `optimizer.learning_rate` must be a number or a mapping of schedule, initial, \
             factor, epochs_per_decay, staircase, tower_blind, values, boundaries_epochs, final, \
             power, epochs, warmup_epochs, not \"fast\"",
        ),
        (
            "data:\n",
            "1: `data` must be a mapping of name, dir, batch_size, threads, examples, on_device, not null",
        ),
        ("train: {dir: 2024}\n", "1: `train.dir` must be text that is not empty, not 2024"),
        ("train: {dir: ' '}\n", "1: `train.dir` must be text that is not empty, not \" \""),
        ("seed: {a: 1}\n", "1: `seed` must be a whole number of at least 0, not {\"a\":1}"),
        ("variables: [cpu]\n", "1: `variables` must be one of cpu, replicated, not [\"cpu\"]"),
    ];
    for (text, message) in cases {
        assert_eq!(file_error(text), format!("configs/a.yaml:{message}"));
    }
    assert_eq!(
        file_error("- 1\n- 2\n"),
        "configs/a.yaml: `configuration` must be a mapping of model, data, optimizer, \
         moving_average, towers, variables, reduce, precision, conv, seed, cluster, train, not [1,2]"
    );
}

#[test]
fn values_out_of_range_are_named_with_their_origin() {
    let cases = [
        (
            "data.batch_size=0",
            "data.batch_size` must be a whole number from 1 to 4294967295, not 0",
        ),
        (
            "optimizer.momentum=1",
            "optimizer.momentum` must be a number of at least 0 and below 1, not 1",
        ),
        (
            "moving_average=1",
            "moving_average` must be a number above 0 and below 1, or null, not 1",
        ),
        (
            "moving_average=0",
            "moving_average` must be a number above 0 and below 1, or null, not 0",
        ),
        (
            "optimizer.learning_rate.factor=0",
            "optimizer.learning_rate.factor` must be a number above 0, not 0",
        ),
        ("towers.accumulate=0", "towers.accumulate` must be a whole number from 1 to 1024, not 0"),
        ("towers.gpus=0", "towers.gpus` must be a whole number from 1 to 1024, not 0"),
        (
            "train.checkpoint.keep=-1",
            "train.checkpoint.keep` must be a whole number of at least 0, not -1",
        ),
        ("optimizer.clip=0", "optimizer.clip` must be a number above 0, or null, not 0"),
        (
            "train.eval_every=0",
            "train.eval_every` must be a whole number of at least 1, or null, not 0",
        ),
        (
            "optimizer.learning_rate=-0.1",
            "optimizer.learning_rate.initial` must be a number of at least 0, not -0.1",
        ),
        (
            "optimizer.learning_rate.boundaries_epochs=[82, 82]",
            "optimizer.learning_rate.boundaries_epochs` must be a list of ascending numbers, \
             each above 0, not [82,82]",
        ),
        (
            "optimizer.learning_rate.values=[]",
            "optimizer.learning_rate.values` must be a list of numbers, each of at least 0, not []",
        ),
    ];
    for (argument, message) in cases {
        assert_eq!(set_error(argument), format!("--set: `{message}"));
    }
    assert_eq!(
        Layers::new(None)
            .flag("--batch-size", "data.batch_size", json!(0))
            .resolve()
            .unwrap_err()
            .to_string(),
        "--batch-size: `data.batch_size` must be a whole number from 1 to 4294967295, not 0"
    );
    assert_eq!(
        Layers::new(None)
            .environment("TFTRAIN_SEED", "seed", json!("x"))
            .resolve()
            .unwrap_err()
            .to_string(),
        "environment TFTRAIN_SEED: `seed` must be a whole number of at least 0, not \"x\""
    );
}

#[test]
fn contradictions_name_both_origins() {
    let cases = [
        (
            "model: {name: resnet, depth: 21}\n",
            "`model.depth: 21` (configs/a.yaml:1) contradicts `model.name: resnet` \
             (configs/a.yaml:1): residual networks have 6n + 2 layers: 20, 32, 44, 56, 110",
        ),
        (
            "model: {name: cifar10, depth: 20}\n",
            "`model.depth: 20` (configs/a.yaml:1) contradicts `model.name: cifar10` \
             (configs/a.yaml:1): `model.depth` needs `model.name: resnet`",
        ),
        (
            "optimizer:\n  momentum: 0.9\n",
            "`optimizer.momentum: 0.9` (configs/a.yaml:2) contradicts `optimizer.name: sgd` \
             (default): `optimizer.momentum` needs `optimizer.name: momentum`",
        ),
        (
            "data: {name: cifar100, examples: 7}\n",
            "`data.examples: 7` (configs/a.yaml:1) contradicts `data.name: cifar100` \
             (configs/a.yaml:1): `data.examples` needs `data.name: synthetic` or `line`",
        ),
        (
            "towers:\n  gpus: 2\n  cpus: 3\n",
            "`towers.cpus: 3` (configs/a.yaml:3) contradicts `towers.gpus: 2` \
             (configs/a.yaml:2): set one of them",
        ),
        (
            "towers: {asynchronous: true, accumulate: 2}\n",
            "`towers.asynchronous: true` (configs/a.yaml:1) contradicts `towers.accumulate: 2` \
             (configs/a.yaml:1): asynchronous towers apply every micro-batch at once",
        ),
        (
            "variables: replicated\ntowers: {asynchronous: true}\n",
            "`towers.asynchronous: true` (configs/a.yaml:2) contradicts `variables: replicated` \
             (configs/a.yaml:1): asynchronous towers share one copy of the variables, \
             `variables: cpu`",
        ),
        (
            "reduce: none\ntowers: {gpus: 2}\n",
            "`reduce: none` (configs/a.yaml:1) contradicts `towers.gpus: 2` (configs/a.yaml:2): \
             several towers can only share `variables: cpu` if their gradients are averaged",
        ),
        (
            "reduce: nccl\ntowers: {cpus: 1}\n",
            "`reduce: nccl` (configs/a.yaml:1) contradicts `towers.cpus: 1` (configs/a.yaml:2): \
             nccl averages between gpus only",
        ),
        (
            "towers: {gpus: 2, gpu_indices: [1]}\n",
            "`towers.gpu_indices: [1]` (configs/a.yaml:1) contradicts `towers.gpus: 2` \
             (configs/a.yaml:1): each tower has one gpu",
        ),
        (
            "towers: {cpus: 1, gpu_indices: [1]}\n",
            "`towers.gpu_indices: [1]` (configs/a.yaml:1) contradicts `towers.cpus: 1` \
             (configs/a.yaml:1): they are numbers of gpus",
        ),
        (
            "precision: tf32\ntowers: {cpus: 1}\n",
            "`precision: tf32` (configs/a.yaml:1) contradicts `towers.cpus: 1` (configs/a.yaml:2): \
             tf32 is a way of gpus to multiply",
        ),
        (
            "model: line\ndata: {name: synthetic}\n",
            "`model.name: line` (configs/a.yaml:1) contradicts `data.name: synthetic` \
             (configs/a.yaml:2): the line model and the line data go together",
        ),
        (
            "optimizer:\n  learning_rate:\n    schedule: piecewise\n    values: [0.1, 0.01]\n    \
             boundaries_epochs: [1, 2]\n",
            "`optimizer.learning_rate.values: [0.1,0.01]` (configs/a.yaml:4) contradicts \
             `optimizer.learning_rate.boundaries_epochs: [1.0,2.0]` (configs/a.yaml:5): \
             n values need n - 1 boundaries",
        ),
    ];
    for (text, message) in cases {
        assert_eq!(file_error(text), message);
    }
    let flags = Layers::new(None).flag("--gpus", "towers.gpus", json!(2)).flag(
        "--cpus",
        "towers.cpus",
        json!(2),
    );
    assert_eq!(
        flags.resolve().expect_err("it is refused").to_string(),
        "`towers.cpus: 2` (--cpus) contradicts `towers.gpus: 2` (--gpus): set one of them"
    );
}

#[test]
fn what_a_choice_needs_is_asked_for() {
    assert_eq!(
        file_error("optimizer:\n  learning_rate: {schedule: polynomial, final: 0}\n"),
        "`optimizer.learning_rate.epochs` is missing: \
         `optimizer.learning_rate.schedule: polynomial` (configs/a.yaml:2) needs it"
    );
}

#[test]
fn bad_sets_are_explained() {
    for argument in ["data.batch_size", "", "=", "=3", "seed=", "data..dir=x", ".seed=1", "seed= "]
    {
        assert_eq!(
            set_error(argument),
            format!("--set `{argument}`: write it as key.path=value, such as data.batch_size=64")
        );
    }
    assert_eq!(
        set_error("data.batchsize=64"),
        "--set: unknown key `batchsize` in `data`; did you mean `batch_size`?"
    );
    assert_eq!(
        set_error("seed.value=64"),
        "--set: `seed` must be a whole number of at least 0, not {\"value\":64}"
    );
}

#[test]
fn yaml_that_does_not_parse_names_its_line() {
    let error = file_error("data:\n  name: [cifar10\nseed: 1\n");
    assert_eq!(error, "configs/a.yaml:3: illegal placement of ':' indicator");
}

#[test]
fn recipes_are_checked_by_name() {
    assert_eq!(
        RunConfig::recipe("lines").unwrap_err().to_string(),
        "unknown recipe `lines`; did you mean `line`? (known: cifar10, resnet, line)"
    );
}
