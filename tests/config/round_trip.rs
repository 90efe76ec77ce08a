//! The printed configuration reads back as itself.

use proptest::prelude::*;
use serde_json::{Value, json};
use tftrain::config::{Layers, differences, fingerprint, run_yaml};

#[test]
fn each_value_is_printed_with_its_origin() {
    let resolved = Layers::new(Some("line"))
        .file("a.yaml", "seed: 3\n")
        .set("moving_average=0.5")
        .flag("--gpus", "towers.gpus", json!(2))
        .resolve()
        .unwrap();
    assert_eq!(
        run_yaml(&resolved),
        "model:
  name: line  # default
data:
  name: line  # default
  dir: data/line  # default
  batch_size: 32  # default
  threads: 1  # default
  examples: null  # default
  on_device: auto  # default
optimizer:
  name: sgd  # default
  clip: null  # default
  learning_rate:
    schedule: constant  # default
    initial: 0.1  # default
    warmup_epochs: 0.0  # default
moving_average: 0.5  # --set
towers:
  gpus: 2  # --gpus
  accumulate: 1  # default
  threads: null  # default
  asynchronous: false  # default
variables: cpu  # default
reduce: auto  # default
precision: f32  # default
conv: auto  # default
seed: 3  # a.yaml:1
cluster:
  jobs: {}  # default
  mode: ps-sync  # default
  replicas_to_aggregate: null  # default
  max_staleness: null  # default
  placement: even  # default
  engine: auto  # default
  exchange: direct  # default
  wire: f32  # default
  overlap: true  # default
  run_id: null  # default
  token_file: null  # default
  tls:
    ca: null  # default
    cert: null  # default
    key: null  # default
train:
  dir: runs/line  # default
  max_steps: 1000  # default
  log_every: 100  # default
  summary_every: 100  # default
  eval_every: null  # default
  checkpoint:
    every_secs: 600.0  # default
    every_steps: null  # default
    keep: 5  # default
    keep_every_hours: null  # default
    format: safetensors  # default
"
    );
}

#[test]
fn a_hostile_path_stays_in_its_comment() {
    let layers = Layers::new(None).file("a\nseed: 9\u{2028}.yaml", "seed: 3\n");
    let resolved = layers.resolve().unwrap();
    let text = run_yaml(&resolved);
    assert!(text.contains("seed: 3  # a?seed: 9?.yaml:1\n"), "{text}");
    assert_eq!(Layers::new(None).file("b", text).resolve().unwrap().config, resolved.config);
}

fn optimizer() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!({"name": "sgd"})),
        (0.0..1.0, any::<bool>(), 1e-9..1e9).prop_map(|(momentum, nesterov, clip)| json!({
                "name": "momentum", "momentum": momentum, "nesterov": nesterov, "clip": clip})),
    ]
}

fn learning_rate() -> impl Strategy<Value = Value> {
    let positive = || prop_oneof![1e-12..1.0, 1.0..1e12, Just(f64::MIN_POSITIVE), Just(f64::MAX)];
    prop_oneof![
        positive().prop_map(|rate| json!(rate)),
        (positive(), positive(), positive(), any::<bool>(), any::<bool>()).prop_map(
            |(initial, factor, epochs, staircase, tower_blind)| json!({
                "schedule": "exponential", "initial": initial, "factor": factor,
                "epochs_per_decay": epochs, "staircase": staircase, "tower_blind": tower_blind})
        ),
        (proptest::collection::btree_set(1u32..1000, 0..5), positive(), positive()).prop_map(
            |(boundaries, value, warmup)| json!({
                "schedule": "piecewise", "values": vec![value; boundaries.len() + 1],
                "boundaries_epochs": boundaries, "warmup_epochs": warmup})
        ),
        (positive(), positive(), positive()).prop_map(|(r#final, power, epochs)| json!({
            "schedule": "polynomial", "final": r#final, "power": power, "epochs": epochs,
            "initial": 1})),
    ]
}

fn train() -> impl Strategy<Value = Value> {
    let dir = prop_oneof!["\\PC{1,12}", ".{1,12}", "[-0-9a-z.~:#]{1,6}", Just("null".to_owned())]
        .prop_filter("a folder has a name", |dir| !dir.trim().is_empty());
    let every = proptest::option::of(1..u64::MAX);
    (dir, 1..u64::MAX, any::<u64>(), every, proptest::option::of(1e-3..1e6)).prop_map(
        |(dir, max_steps, log_every, every, secs)| {
            json!({
            "dir": dir, "max_steps": max_steps, "log_every": log_every, "eval_every": every,
            "checkpoint": {"every_secs": secs, "every_steps": every, "keep": log_every}})
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn printed_text_reads_back_as_itself(
        recipe in prop_oneof![Just("cifar10"), Just("resnet"), Just("line")],
        optimizer in optimizer(),
        learning_rate in learning_rate(),
        average in proptest::option::of(0.001..0.9999),
        devices in prop_oneof![Just("towers.gpus"), Just("towers.cpus")],
        count in 1u32..=1024,
        seed in any::<u64>(),
        train in train(),
    ) {
        let resolved = Layers::new(Some(recipe))
            .flag("-a", "optimizer", optimizer)
            .flag("-b", "optimizer.learning_rate", learning_rate)
            .flag("-c", "moving_average", json!(average))
            .flag("-d", devices, json!(count))
            .flag("-e", "seed", json!(seed))
            .flag("-f", "train", train)
            .resolve()
            .unwrap();
        let text = run_yaml(&resolved);
        for reader in [None, Some("cifar10"), Some("resnet"), Some("line")] {
            let again = Layers::new(reader).file("run.yaml", text.clone()).resolve().unwrap();
            prop_assert_eq!(&again.config, &resolved.config, "{}", text);
            prop_assert_eq!(fingerprint(&again.config), fingerprint(&resolved.config));
            prop_assert_eq!(differences(&again.config, &resolved.config), []);
            prop_assert!(again.origins.keys().eq(resolved.origins.keys()));
        }
    }
}
