//! Layering and origins.

use serde_json::json;
use tftrain::config::{
    DataName, Layers, LearningRateConfig, ModelName, Origin, Reduce, Resolved, TowerDevices,
    UpdateRule, VariablePlacement,
};

fn file(text: &str) -> Layers {
    Layers::new(None).file("a.yaml", text)
}

fn at(line: u64) -> Origin {
    Origin::File { path: "a.yaml".into(), line: Some(line) }
}

/// The example of the documentation.
const EXAMPLE: &str = "
model: cifar10
data: {name: cifar10, dir: data/cifar10, batch_size: 128}
optimizer:
  name: momentum
  momentum: 0.8
  nesterov: true
  clip: 1.0
  learning_rate: {schedule: exponential, initial: 0.2, factor: 0.1, epochs_per_decay: 350,
    staircase: false}
moving_average: 0.999
towers: {gpus: 4, threads: 2}
variables: replicated
reduce: nccl
precision: bf16
seed: 7
train: {dir: runs/a, max_steps: 100_000, log_every: 10, summary_every: 0, eval_every: null,
  checkpoint: {every_secs: 600, every_steps: null, keep: 5, keep_every_hours: null}}
";

#[test]
fn the_documented_example_is_read() {
    let Resolved { config, origins } = file(EXAMPLE).resolve().unwrap();
    assert_eq!(config.optimizer.rule, UpdateRule::Momentum { momentum: 0.8, nesterov: true });
    assert_eq!(config.optimizer.clip, Some(1.0));
    assert_eq!(
        config.optimizer.learning_rate,
        LearningRateConfig::Exponential {
            initial: 0.2,
            factor: 0.1,
            epochs_per_decay: 350.0,
            staircase: false,
            tower_blind: false,
            warmup_epochs: 0.0
        }
    );
    assert_eq!(config.towers.devices, TowerDevices::Gpus(4));
    assert_eq!((config.towers.count(), config.towers.threads), (4, Some(2)));
    assert_eq!((config.variables, config.reduce), (VariablePlacement::Replicated, Reduce::Nccl));
    assert_eq!((config.train.max_steps, config.train.summary_every), (100_000, 0));
    assert_eq!(origins["model.name"], at(2));
    assert_eq!(origins["optimizer.momentum"], at(6));
    assert_eq!(origins["optimizer.learning_rate.staircase"], at(10));
    assert_eq!(origins["optimizer.learning_rate.tower_blind"], Origin::Default);
    assert_eq!(origins["train.checkpoint.keep"], at(18));
    assert!(!origins.contains_key("towers.cpus"));
}

#[test]
fn an_empty_file_changes_nothing() {
    let defaults = Layers::new(None).resolve().unwrap();
    for text in ["", "# nothing\n", "---\n", "{}", "null"] {
        assert_eq!(file(text).resolve().unwrap(), defaults, "{text:?}");
    }
    assert!(defaults.origins.values().all(|origin| *origin == Origin::Default));
}

#[test]
fn each_layer_wins_over_the_ones_below() {
    let set = |layers: Layers| layers.set("seed=4");
    let flag = |layers: Layers| layers.flag("--seed", "seed", json!(5));
    let env = |layers: Layers| layers.environment("SEED", "seed", json!(3));
    let two = || file("seed: 1").file("b.yaml", "\nseed: 2");
    let b = Origin::File { path: "b.yaml".into(), line: Some(2) };
    // The order of the calls must not matter between kinds of layers.
    let cases = [
        (file("seed: 1"), 1, at(1)),
        (two(), 2, b),
        (env(two()), 3, Origin::Environment("SEED".into())),
        (env(set(two())), 4, Origin::Set),
        (env(set(flag(two()))), 5, Origin::Flag("--seed".into())),
    ];
    for (layers, seed, origin) in cases {
        let resolved = layers.resolve().unwrap();
        assert_eq!(resolved.config.seed, seed);
        assert_eq!(resolved.origins["seed"], origin);
    }
}

#[test]
fn the_last_set_of_a_key_counts() {
    let resolved = Layers::new(None).set("seed=2").set("seed=3").resolve().unwrap();
    assert_eq!(resolved.config.seed, 3);
}

#[test]
fn the_chosen_model_selects_the_defaults_unless_a_recipe_is_named() {
    let config = file("model: line").resolve().unwrap().config;
    assert_eq!((config.data.name, config.data.batch_size), (DataName::Line, 32));
    assert_eq!((config.data.dir.as_str(), config.train.dir.as_str()), ("data/line", "runs/line"));
    assert_eq!(Layers::new(None).set("model=line").resolve().unwrap().config, config);

    let named = Layers::new(Some("cifar10")).file("a.yaml", "model: line\ndata: {name: line}");
    let config = named.resolve().unwrap().config;
    assert_eq!((config.model.name, config.data.batch_size), (ModelName::Line, 128));
    assert_eq!(config.train.dir, "runs/line");
}

#[test]
fn folders_follow_the_names_unless_given() {
    let config = file("data: {name: cifar100}").resolve().unwrap().config;
    assert_eq!(config.data.dir, "data/cifar100");
    let config = file("data: {name: cifar100, dir: mine}").resolve().unwrap().config;
    assert_eq!(config.data.dir, "mine");
}

#[test]
fn bare_forms_are_accepted() {
    let resolved =
        file("model: {name: cifar10}\noptimizer: {learning_rate: 1}\nmoving_average: off")
            .resolve()
            .unwrap();
    assert_eq!(
        resolved.config.optimizer.learning_rate,
        LearningRateConfig::Constant { initial: 1.0, warmup_epochs: 0.0 }
    );
    assert_eq!(resolved.config.moving_average, None);
    assert_eq!(resolved.origins["optimizer.learning_rate.schedule"], at(2));
    assert_eq!(resolved.origins["moving_average"], at(3));
    for text in ["moving_average: null", "moving_average: ~", "moving_average:"] {
        assert_eq!(file(text).resolve().unwrap().config.moving_average, None);
    }
}

#[test]
fn a_choice_in_a_higher_layer_drops_what_it_leaves_without_a_meaning() {
    let resolved =
        file("towers: {cpus: 2}").flag("--gpus", "towers.gpus", json!(4)).resolve().unwrap();
    assert_eq!(resolved.config.towers.devices, TowerDevices::Gpus(4));
    assert_eq!(resolved.origins["towers.gpus"], Origin::Flag("--gpus".into()));

    let momentum = || file("optimizer: {name: momentum, momentum: 0.5}");
    let config = momentum().set("optimizer.name=sgd").resolve().unwrap().config;
    assert_eq!(config.optimizer.rule, UpdateRule::Sgd);
    let config = momentum().set("optimizer.nesterov=true").resolve().unwrap().config;
    assert_eq!(config.optimizer.rule, UpdateRule::Momentum { momentum: 0.5, nesterov: true });

    let config = file("data: {name: synthetic, examples: 9}").set("data.name=cifar10");
    assert_eq!(config.resolve().unwrap().config.data.examples, None);
}

#[test]
fn schedules_replace_each_other_and_keep_what_they_share() {
    let piecewise = "schedule: piecewise, values: [0.1, 0.01], boundaries_epochs: [82]";
    let text = format!("optimizer: {{learning_rate: {{{piecewise}, warmup_epochs: 5}}}}");
    let config = file(&text).resolve().unwrap().config;
    assert_eq!(
        config.optimizer.learning_rate,
        LearningRateConfig::Piecewise {
            values: vec![0.1, 0.01],
            boundaries_epochs: vec![82.0],
            warmup_epochs: 5.0
        }
    );
    let config = file(&text).set("optimizer.learning_rate=0.3").resolve().unwrap().config;
    assert_eq!(
        config.optimizer.learning_rate,
        LearningRateConfig::Constant { initial: 0.3, warmup_epochs: 5.0 }
    );
    let polynomial = "optimizer.learning_rate={schedule: polynomial, initial: 0.2, final: 0.001, \
                      epochs: 100}";
    let config = file(&text).set(polynomial).resolve().unwrap().config;
    assert_eq!(
        config.optimizer.learning_rate,
        LearningRateConfig::Polynomial {
            initial: 0.2,
            r#final: 0.001,
            power: 1.0,
            epochs: 100.0,
            warmup_epochs: 5.0
        }
    );
}

#[test]
fn combinations_near_a_contradiction_are_fine() {
    for text in [
        "reduce: none\nvariables: replicated\ntowers: {cpus: 2}",
        "reduce: none",
        "towers: {asynchronous: true, cpus: 4}",
        "data: {examples: null}",
        "model: line\ndata: {examples: 100}",
    ] {
        assert!(file(text).resolve().is_ok(), "{text}");
    }
}
