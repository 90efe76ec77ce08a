//! From a parsed tree to settings: every key known, every value of its type and range.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::error::ConfigError;
use super::key::{INITIAL, KEYS, Key, SCHEDULE, children};
use super::kind::Kind;
use super::origin::Origin;
use super::suggest::{choice_help, nearest, shown};
use super::tree::Tree;
use crate::cluster::ClusterSpec;

/// One value and where it was written.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) key: &'static Key,
    /// In the canonical form of the key's kind.
    pub(crate) value: Value,
    pub(crate) origin: Origin,
}

impl Setting {
    /// "`towers.gpus: 4` (--gpus)", as errors name it.
    pub(crate) fn shown(&self) -> String {
        format!("`{}: {}` ({})", self.key.name, plain(&self.value), self.origin)
    }
}

/// Settings by dotted key, each key once.
pub(crate) type Settings = BTreeMap<&'static str, Setting>;

/// A value as messages show it: text without quotes, anything else as JSON.
pub(crate) fn plain(value: &Value) -> String {
    shown(&value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

/// Reads what `tree` sets under `section` ("" is the top) into `settings`.
///
/// # Errors
/// The first unknown key or misfit value, at `origin` (for files: with the line of the key).
pub(crate) fn read(
    tree: Tree,
    section: &str,
    origin: &Origin,
    settings: &mut Settings,
) -> Result<(), ConfigError> {
    let entries = match tree {
        Tree::Map(entries) => entries,
        Tree::Leaf(value) => return read_bare(section, value, origin, settings),
    };
    let mut jobs = Map::new();
    let mut first_job = None;
    for entry in entries {
        let origin = match (origin, entry.line) {
            (Origin::File { path, .. }, Some(line)) => {
                Origin::File { path: path.clone(), line: Some(line) }
            }
            _ => origin.clone(),
        };
        let known = children(section);
        let Some(name) = known.iter().find(|name| **name == entry.key) else {
            if section == "cluster" && is_addresses(&entry.tree) {
                first_job.get_or_insert(origin);
                jobs.insert(entry.key, entry.tree.into_value());
                continue;
            }
            return Err(unknown_key(origin, &entry.key, section, &known));
        };
        let dotted = if section.is_empty() { (*name).into() } else { format!("{section}.{name}") };
        match Key::find(&dotted) {
            Some(key) => insert(key, entry.tree.into_value(), origin, settings)?,
            None => read(entry.tree, &dotted, &origin, settings)?,
        }
    }
    match (first_job, Key::find("cluster.jobs")) {
        (Some(origin), Some(key)) => insert(key, jobs.into(), origin, settings),
        _ => Ok(()),
    }
}

/// The jobs of a cluster have names of their own; their values are lists, or addresses by index.
fn is_addresses(tree: &Tree) -> bool {
    matches!(tree, Tree::Map(_) | Tree::Leaf(Value::Array(_)))
}

/// The short forms: a model by its bare name, a constant learning rate by its bare number.
fn read_bare(
    section: &str,
    value: Value,
    origin: &Origin,
    settings: &mut Settings,
) -> Result<(), ConfigError> {
    let short = match (section, &value) {
        ("model", Value::String(_)) => vec![("model.name", value)],
        ("optimizer.learning_rate", Value::Number(_)) => {
            vec![(SCHEDULE, "constant".into()), (INITIAL, value)]
        }
        _ => {
            let bare = match section {
                "model" => "a name or ",
                "optimizer.learning_rate" => "a number or ",
                _ => "",
            };
            let keys = children(section).join(", ");
            return Err(ConfigError::BadValue {
                origin: origin.clone(),
                key: if section.is_empty() { "configuration".into() } else { section.into() },
                wanted: format!("{bare}a mapping of {keys}"),
                found: shown(&value.to_string()),
            });
        }
    };
    for (name, value) in short {
        let key = Key::find(name).expect("the short forms name keys of the table");
        insert(key, value, origin.clone(), settings)?;
    }
    Ok(())
}

fn insert(
    key: &'static Key,
    value: Value,
    origin: Origin,
    settings: &mut Settings,
) -> Result<(), ConfigError> {
    let none = key.nullable && (value.is_null() || value == "off");
    let checked = if none { Some(Value::Null) } else { key.kind.check(&value) };
    let Some(value) = checked else { return Err(misfit(key, &value, origin)) };
    settings.insert(key.name, Setting { key, value, origin });
    Ok(())
}

fn misfit(key: &Key, value: &Value, origin: Origin) -> ConfigError {
    let name = key.name.to_owned();
    match (key.kind, value) {
        (Kind::Choice(names), Value::String(found)) => ConfigError::UnknownChoice {
            origin,
            key: name,
            found: shown(found),
            help: choice_help(found, names),
        },
        (Kind::Jobs, value) => ConfigError::BadValue {
            origin,
            key: "cluster".into(),
            wanted: key.kind.wanted(),
            found: serde_json::from_value::<ClusterSpec>(value.clone())
                .map_or_else(|error| error.to_string(), |_| shown(&value.to_string())),
        },
        (kind, value) => ConfigError::BadValue {
            origin,
            key: name,
            wanted: format!("{}{}", kind.wanted(), if key.nullable { ", or null" } else { "" }),
            found: shown(&value.to_string()),
        },
    }
}

fn unknown_key(origin: Origin, key: &str, section: &str, known: &[&str]) -> ConfigError {
    let mut likely = elsewhere(key);
    if likely.is_empty() {
        likely.extend(nearest(key, known).map(str::to_owned));
    }
    let help = match likely.join("` or `") {
        none if none.is_empty() => format!("known: {}", known.join(", ")),
        likely => format!("did you mean `{likely}`?"),
    };
    let section = if section.is_empty() { String::new() } else { format!(" in `{section}`") };
    ConfigError::UnknownKey { origin, key: shown(key), section, help }
}

/// The dotted names that end in `key`: often the right name is in the wrong section.
fn elsewhere(key: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for known in KEYS {
        let mut parts = known.name.split('.');
        if let Some(depth) = parts.position(|part| part == key) {
            names.push(known.name.split('.').take(depth + 1).collect::<Vec<_>>().join("."));
        }
    }
    names.dedup();
    names
}
