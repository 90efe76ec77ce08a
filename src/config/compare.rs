//! Comparing configurations: what a resume must keep, and what differs.

use serde_json::Value;

use super::resolve::flat;
use super::schema::RunConfig;

/// The keys, or sections, that decide the course of the training.
const COURSE: [&str; 8] = [
    "model.",
    "data.name",
    "data.batch_size",
    "optimizer.",
    "moving_average",
    "precision",
    "conv",
    "seed",
];

/// What must agree for a run to resume, as canonical text: one `key: value` a line.
///
/// The towers count by how many micro-batches they make a step together (towers × accumulate), so
/// that a run may move between devices.
pub fn fingerprint(config: &RunConfig) -> String {
    let mut out = String::new();
    for (key, value) in flat(config) {
        if COURSE.iter().any(|part| key == *part || part.ends_with('.') && key.starts_with(part)) {
            out.push_str(&format!("{key}: {value}\n"));
        }
    }
    let micro_batches = config.towers.count() as u128 * config.towers.accumulate as u128;
    out.push_str(&format!("towers: {micro_batches}\n"));
    out
}

/// The settings that differ, as (dotted key, old value, new value), in the order of the schema.
///
/// A key that only one side has reads `absent` on the other.
pub fn differences(old: &RunConfig, new: &RunConfig) -> Vec<(String, String, String)> {
    let (old, new) = (flat(old), flat(new));
    let only_new = new.iter().filter(|(key, _)| find(&old, key).is_none());
    old.iter()
        .chain(only_new)
        .map(|(key, _)| (key, find(&old, key), find(&new, key)))
        .filter(|(_, old, new)| old != new)
        .map(|(key, old, new)| (key.clone(), text(old), text(new)))
        .collect()
}

fn find<'a>(side: &'a [(String, Value)], key: &str) -> Option<&'a Value> {
    side.iter().find(|(name, _)| name == key).map(|(_, value)| value)
}

fn text(value: Option<&Value>) -> String {
    match value {
        None => "absent".into(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Layers;

    fn config(sets: &[&str]) -> RunConfig {
        let layers = sets.iter().fold(Layers::new(Some("cifar10")), |layers, set| layers.set(*set));
        layers.resolve().unwrap().config
    }

    #[test]
    fn the_fingerprint_is_canonical_text() {
        assert_eq!(
            fingerprint(&config(&["towers={gpus: 2, accumulate: 2}"])),
            "model.name: \"cifar10\"
data.name: \"cifar10\"
data.batch_size: 128
optimizer.name: \"sgd\"
optimizer.clip: null
optimizer.learning_rate.schedule: \"exponential\"
optimizer.learning_rate.initial: 0.1
optimizer.learning_rate.factor: 0.1
optimizer.learning_rate.epochs_per_decay: 350.0
optimizer.learning_rate.staircase: true
optimizer.learning_rate.tower_blind: false
optimizer.learning_rate.warmup_epochs: 0.0
moving_average: 0.9999
precision: \"f32\"
conv: \"auto\"
seed: 1
towers: 4
"
        );
    }

    #[test]
    fn only_what_decides_the_course_changes_the_fingerprint() {
        let base = fingerprint(&config(&["towers.cpus=4"]));
        for same in [
            &["towers.gpus=4", "train.max_steps=7"][..],
            &["towers={cpus: 2, accumulate: 2}", "train.dir=elsewhere", "data.threads=4"],
            &["towers.cpus=4", "data.dir=elsewhere", "reduce=cpu", "variables=replicated"],
        ] {
            assert_eq!(fingerprint(&config(same)), base, "{same:?}");
        }
        for other in [
            "seed=2",
            "data.batch_size=64",
            "precision=bf16",
            "conv=direct",
            "moving_average=off",
            "optimizer.clip=1",
            "optimizer.learning_rate=0.1",
            "towers.cpus=2",
            "data.name=cifar100",
        ] {
            assert_ne!(fingerprint(&config(&["towers.cpus=4", other])), base, "{other}");
        }
    }

    #[test]
    fn differences_name_keys_and_both_values() {
        let old = config(&["towers.cpus=2"]);
        assert_eq!(differences(&old, &old), []);
        let new = config(&["towers.gpus=4", "train.dir=runs/b", "moving_average=off"]);
        let expected = [
            ("moving_average", "0.9999", "null"),
            ("towers.cpus", "2", "absent"),
            ("train.dir", "runs/cifar10", "runs/b"),
            ("towers.gpus", "absent", "4"),
        ];
        let expected: Vec<_> = expected
            .iter()
            .map(|(k, a, b)| (k.to_string(), a.to_string(), b.to_string()))
            .collect();
        assert_eq!(differences(&old, &new), expected);
    }

    #[test]
    fn long_values_differ_in_full() {
        let (long, longer) = ("x".repeat(100), "x".repeat(101));
        let [old, new] = [&long, &longer].map(|dir| config(&[&format!("train.dir={dir}")]));
        assert_eq!(differences(&old, &new), [("train.dir".to_owned(), long, longer)]);
    }
}
