//! The table of keys: what YAML, `--set` and flags may name.

use std::ops::Bound;

use serde_json::Value;

use super::choice::{
    CheckpointFormat, ClusterMode, Convolution, DataName, Engine, Exchange, ModelName, OnDevice,
    OptimizerName, Placement, Precision, Reduce, ScheduleName, VariablePlacement, Wire,
};
use super::kind::{Kind, NOT_NEGATIVE, POSITIVE};

/// A setting by its dotted name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    /// The dotted name, such as `data.batch_size`.
    pub(crate) name: &'static str,
    /// What it takes.
    pub(crate) kind: Kind,
    /// Whether `null` (or `off`) is a value.
    pub(crate) nullable: bool,
    /// The choice it belongs to: a key and the values under which this one has a meaning.
    pub(crate) only: Option<(&'static str, &'static [&'static str])>,
    /// Whether that choice cannot do without it.
    pub(crate) needed: bool,
    /// The key that cannot be set beside it.
    pub(crate) excludes: Option<&'static str>,
}

const fn key(name: &'static str, kind: Kind) -> Key {
    Key { name, kind, nullable: false, only: None, needed: false, excludes: None }
}

impl Key {
    const fn nullable(mut self) -> Self {
        self.nullable = true;
        self
    }

    const fn only(mut self, chooser: &'static str, values: &'static [&'static str]) -> Self {
        self.only = Some((chooser, values));
        self
    }

    const fn needed(mut self) -> Self {
        self.needed = true;
        self
    }

    const fn excludes(mut self, other: &'static str) -> Self {
        self.excludes = Some(other);
        self
    }

    /// The key called `name`.
    pub(crate) fn find(name: &str) -> Option<&'static Self> {
        KEYS.iter().find(|key| key.name == name)
    }

    /// Whether this key has a meaning when `chooser` is `choice`; true for unrelated keys.
    pub(crate) fn fits(&self, chooser: &str, choice: &Value) -> bool {
        self.only.is_none_or(|(name, values)| {
            name != chooser || choice.as_str().is_some_and(|choice| values.contains(&choice))
        })
    }
}

/// The names directly under `section` ("" is the top), in order, each once.
pub(crate) fn children(section: &str) -> Vec<&'static str> {
    let mut names = Vec::new();
    for key in KEYS {
        let rest = match section {
            "" => Some(key.name),
            _ => key.name.strip_prefix(section).and_then(|rest| rest.strip_prefix('.')),
        };
        if let Some(name) = rest.and_then(|rest| rest.split('.').next())
            && names.last() != Some(&name)
        {
            names.push(name);
        }
    }
    names
}

/// Counts are held as `usize` and multiplied with each other, so they stay well below its end.
const COUNT: Kind = Kind::Whole { min: 1, max: u32::MAX as u64 };
/// Of threads, or of what has threads or slabs of its own.
const FEW: Kind = Kind::Whole { min: 1, max: 1024 };
const FROM_ONE: Kind = Kind::Whole { min: 1, max: u64::MAX };
const FROM_ZERO: Kind = Kind::Whole { min: 0, max: u64::MAX };

pub(crate) const SCHEDULE: &str = "optimizer.learning_rate.schedule";
pub(crate) const INITIAL: &str = "optimizer.learning_rate.initial";

/// Every key, section by section.
pub(crate) const KEYS: &[Key] = &[
    key("model.name", Kind::Choice(ModelName::NAMES)),
    key("model.depth", Kind::Whole { min: 8, max: 1202 }).only("model.name", &["resnet"]).needed(),
    key("model.version", Kind::Whole { min: 1, max: 2 }).only("model.name", &["resnet"]).needed(),
    key("model.lrn", Kind::Switch).only("model.name", &["cifar10"]),
    key("data.name", Kind::Choice(DataName::NAMES)),
    key("data.dir", Kind::Text),
    key("data.batch_size", COUNT),
    key("data.threads", FEW),
    key("data.examples", FROM_ONE).nullable().only("data.name", &["synthetic", "line"]),
    key("data.on_device", Kind::Choice(OnDevice::NAMES)),
    key("optimizer.name", Kind::Choice(OptimizerName::NAMES)),
    key("optimizer.momentum", Kind::Real((Bound::Included(0.0), Bound::Excluded(1.0))))
        .only("optimizer.name", &["momentum"]),
    key("optimizer.nesterov", Kind::Switch).only("optimizer.name", &["momentum"]),
    key("optimizer.clip", Kind::Real(POSITIVE)).nullable(),
    key(SCHEDULE, Kind::Choice(ScheduleName::NAMES)),
    key(INITIAL, Kind::Real(NOT_NEGATIVE))
        .only(SCHEDULE, &["constant", "exponential", "polynomial"])
        .needed(),
    key("optimizer.learning_rate.factor", Kind::Real(POSITIVE))
        .only(SCHEDULE, &["exponential"])
        .needed(),
    key("optimizer.learning_rate.epochs_per_decay", Kind::Real(POSITIVE))
        .only(SCHEDULE, &["exponential"])
        .needed(),
    key("optimizer.learning_rate.staircase", Kind::Switch).only(SCHEDULE, &["exponential"]),
    key("optimizer.learning_rate.tower_blind", Kind::Switch).only(SCHEDULE, &["exponential"]),
    key(
        "optimizer.learning_rate.values",
        Kind::List { each: NOT_NEGATIVE, least: 1, ascending: false },
    )
    .only(SCHEDULE, &["piecewise"])
    .needed(),
    key(
        "optimizer.learning_rate.boundaries_epochs",
        Kind::List { each: POSITIVE, least: 0, ascending: true },
    )
    .only(SCHEDULE, &["piecewise"])
    .needed(),
    key("optimizer.learning_rate.final", Kind::Real(NOT_NEGATIVE))
        .only(SCHEDULE, &["polynomial"])
        .needed(),
    key("optimizer.learning_rate.power", Kind::Real(POSITIVE)).only(SCHEDULE, &["polynomial"]),
    key("optimizer.learning_rate.epochs", Kind::Real(POSITIVE))
        .only(SCHEDULE, &["polynomial"])
        .needed(),
    key("optimizer.learning_rate.warmup_epochs", Kind::Real(NOT_NEGATIVE)),
    key("moving_average", Kind::Real((Bound::Excluded(0.0), Bound::Excluded(1.0)))).nullable(),
    key("towers.gpus", FEW).excludes("towers.cpus"),
    key("towers.cpus", FEW).excludes("towers.gpus"),
    key("towers.gpu_indices", Kind::Ordinals),
    key("towers.accumulate", FEW),
    key("towers.threads", FEW).nullable(),
    key("towers.asynchronous", Kind::Switch),
    key("variables", Kind::Choice(VariablePlacement::NAMES)),
    key("reduce", Kind::Choice(Reduce::NAMES)),
    key("precision", Kind::Choice(Precision::NAMES)),
    key("conv", Kind::Choice(Convolution::NAMES)),
    key("seed", FROM_ZERO),
    key("cluster.jobs", Kind::Jobs),
    key("cluster.mode", Kind::Choice(ClusterMode::NAMES)),
    key("cluster.replicas_to_aggregate", FROM_ONE).nullable().only("cluster.mode", &["ps-sync"]),
    key("cluster.max_staleness", FROM_ZERO).nullable().only("cluster.mode", &["ps-async"]),
    key("cluster.placement", Kind::Choice(Placement::NAMES)),
    key("cluster.engine", Kind::Choice(Engine::NAMES)),
    key("cluster.exchange", Kind::Choice(Exchange::NAMES)),
    key("cluster.wire", Kind::Choice(Wire::NAMES)),
    key("cluster.overlap", Kind::Switch),
    key("cluster.run_id", Kind::Text).nullable(),
    key("cluster.token_file", Kind::Text).nullable(),
    key("cluster.tls.ca", Kind::Text).nullable(),
    key("cluster.tls.cert", Kind::Text).nullable(),
    key("cluster.tls.key", Kind::Text).nullable(),
    key("train.dir", Kind::Text),
    key("train.max_steps", FROM_ONE),
    key("train.log_every", FROM_ZERO),
    key("train.summary_every", FROM_ZERO),
    key("train.eval_every", FROM_ONE).nullable(),
    key("train.checkpoint.every_secs", Kind::Real(POSITIVE)).nullable(),
    key("train.checkpoint.every_steps", FROM_ONE).nullable(),
    key("train.checkpoint.keep", FROM_ZERO),
    key("train.checkpoint.keep_every_hours", Kind::Real(POSITIVE)).nullable(),
    key("train.checkpoint.format", Kind::Choice(CheckpointFormat::NAMES)),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::resolve::flat;
    use crate::config::{Layers, RunConfig};
    use std::collections::BTreeSet;

    /// One configuration per choice of each chooser, so that together they have every field.
    fn samples() -> Vec<RunConfig> {
        [
            "towers={gpus: 2, gpu_indices: [1, 0]}",
            "optimizer={name: momentum, learning_rate: 0.1}",
            "optimizer.learning_rate={schedule: piecewise, values: [1], boundaries_epochs: []}",
            "optimizer.learning_rate={schedule: polynomial, final: 0, epochs: 10}",
            "towers.cpus=2",
            "model=resnet",
            "model.lrn=false",
        ]
        .map(|set| Layers::new(None).set(set).resolve().unwrap().config)
        .into()
    }

    #[test]
    fn the_table_and_the_schema_have_the_same_keys() {
        let fields: BTreeSet<String> =
            samples().iter().flat_map(flat).map(|(name, _)| name).collect();
        let table: BTreeSet<String> = KEYS.iter().map(|key| key.name.to_owned()).collect();
        assert_eq!(fields, table);
        assert_eq!(table.len(), KEYS.len());
    }

    #[test]
    fn every_value_of_the_schema_is_canonical_for_its_key() {
        for (name, value) in samples().iter().flat_map(flat) {
            let key = Key::find(&name).unwrap();
            let checked = key.kind.check(&value);
            assert!(checked == Some(value.clone()) || key.nullable && value.is_null(), "{name}");
        }
    }

    #[test]
    fn choosers_and_exclusions_name_keys() {
        for key in KEYS {
            if let Some((chooser, choices)) = key.only {
                let Kind::Choice(names) = Key::find(chooser).unwrap().kind else {
                    unreachable!("{chooser} is no choice")
                };
                assert!(choices.iter().all(|choice| names.contains(choice)), "{}", key.name);
            }
            if let Some(other) = key.excludes {
                assert_eq!(Key::find(other).unwrap().excludes, Some(key.name));
            }
            assert!(!key.needed || key.only.is_some(), "{}", key.name);
        }
    }

    #[test]
    fn sections_list_their_children_once() {
        assert_eq!(
            children("data"),
            ["name", "dir", "batch_size", "threads", "examples", "on_device"]
        );
        assert_eq!(children("train").last(), Some(&"checkpoint"));
        let top = children("");
        assert_eq!(top.len(), top.iter().collect::<BTreeSet<_>>().len());
        assert!(children("dat").is_empty() && children("seed").is_empty());
    }
}
