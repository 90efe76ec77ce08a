//! Merging layers of settings into one typed, checked configuration.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::check::check;
use super::error::ConfigError;
use super::key::{KEYS, Key};
use super::origin::Origin;
use super::schema::RunConfig;
use super::settings::{Setting, Settings};
use super::towers::TowerDevices;

/// A usable configuration and where each value came from.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// The configuration.
    pub config: RunConfig,
    /// The origin of every value, by dotted key.
    pub origins: BTreeMap<String, Origin>,
}

impl Resolved {
    /// Whether nobody said which devices the towers are on.
    pub fn leaves_towers_open(&self) -> bool {
        self.origins.get("towers.cpus") == Some(&Origin::Default)
    }

    /// The towers are on these devices, as `origin` says.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`] where another setting does not go with them.
    pub fn place_towers(
        &mut self,
        devices: TowerDevices,
        origin: Origin,
    ) -> Result<(), ConfigError> {
        self.config.towers.devices = devices;
        self.config.towers.gpu_indices = None;
        ["towers.gpus", "towers.cpus", "towers.gpu_indices"].iter().for_each(|key| {
            self.origins.remove(*key);
        });
        let key = match devices {
            TowerDevices::Gpus(_) => "towers.gpus",
            TowerDevices::Cpus(_) => "towers.cpus",
        };
        self.origins.insert(key.to_owned(), origin);
        let mut all = Settings::new();
        for (name, value) in flat(&self.config) {
            let Some(key) = Key::find(&name) else { continue };
            let origin = self.origins.get(&name).cloned().unwrap_or(Origin::Default);
            all.insert(key.name, Setting { key, value, origin });
        }
        check(&self.config, &all)
    }
}

/// Resolves layers given lowest first.
pub(crate) fn resolve(layers: Vec<Settings>) -> Result<Resolved, ConfigError> {
    let mut settings = Settings::new();
    for layer in layers {
        merge(layer, &mut settings)?;
    }
    check_choices(&settings)?;
    fill_dir(&mut settings, "data.dir", "data", "data.name");
    fill_dir(&mut settings, "train.dir", "runs", "data.name");

    let config: RunConfig = serde_json::from_value(nested(&settings))
        .map_err(|error| ConfigError::Schema(error.to_string()))?;
    let values = flat(&config);
    let all = complete(&values, &settings);
    check(&config, &all)?;
    let origins = all.into_iter().map(|(key, setting)| (key.to_owned(), setting.origin)).collect();
    Ok(Resolved { config, origins })
}

/// Lays `layer` over `settings`: its choices first drop what they leave without a meaning.
fn merge(layer: Settings, settings: &mut Settings) -> Result<(), ConfigError> {
    for setting in layer.values() {
        if let Some(other) = setting.key.excludes {
            if let Some(other) = layer.get(other) {
                return Err(ConfigError::Contradiction {
                    first: setting.shown(),
                    second: other.shown(),
                    why: "set one of them".into(),
                });
            }
            settings.remove(other);
        }
        settings.retain(|_, lower| lower.key.fits(setting.key.name, &setting.value));
    }
    settings.extend(layer);
    Ok(())
}

/// Every setting must belong to the choices made, and every choice have what it needs.
fn check_choices(settings: &Settings) -> Result<(), ConfigError> {
    for key in KEYS {
        let Some((chooser, choices)) = key.only else { continue };
        let Some(choice) = settings.get(chooser) else { continue };
        let fits = key.fits(chooser, &choice.value);
        match settings.get(key.name) {
            Some(setting) if !fits && !setting.value.is_null() => {
                return Err(ConfigError::Contradiction {
                    first: setting.shown(),
                    second: choice.shown(),
                    why: format!("`{}` needs `{chooser}: {}`", key.name, choices.join("` or `")),
                });
            }
            None if fits && key.needed => {
                return Err(ConfigError::Missing { key: key.name.into(), choice: choice.shown() });
            }
            _ => {}
        }
    }
    Ok(())
}

/// A folder that nobody named is called after the choice it belongs to.
fn fill_dir(settings: &mut Settings, dir: &'static str, parent: &str, named_after: &str) {
    let name = settings.get(named_after).and_then(|setting| setting.value.as_str());
    let (Some(name), Some(key)) = (name, Key::find(dir)) else { return };
    let value = format!("{parent}/{name}").into();
    settings.entry(dir).or_insert(Setting { key, value, origin: Origin::Default });
}

/// The settings as the nested mapping that the schema reads.
fn nested(settings: &Settings) -> Value {
    let mut root = Map::new();
    for setting in settings.values() {
        let mut parts: Vec<&str> = setting.key.name.split('.').collect();
        let leaf = parts.pop().expect("split yields at least one part");
        let mut section = &mut root;
        for part in parts {
            let child = section.entry(part).or_insert_with(|| Map::new().into());
            section = child.as_object_mut().expect("no key of the table is a section of another");
        }
        section.insert(leaf.to_owned(), setting.value.clone());
    }
    root.into()
}

/// The values of a configuration by dotted key, in the order of the schema.
pub(crate) fn flat(config: &RunConfig) -> Vec<(String, Value)> {
    fn walk(prefix: &str, value: Value, out: &mut Vec<(String, Value)>) {
        match value {
            Value::Object(map) if Key::find(prefix).is_none() => {
                for (name, value) in map {
                    let dotted = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
                    walk(&dotted, value, out);
                }
            }
            leaf => out.push((prefix.to_owned(), leaf)),
        }
    }
    let value = serde_json::to_value(config).expect("the schema has only text keys");
    let mut out = Vec::new();
    walk("", value, &mut out);
    out
}

/// All values of the configuration as settings; those of no layer are defaults.
fn complete(values: &[(String, Value)], settings: &Settings) -> Settings {
    let mut all = Settings::new();
    for (name, value) in values {
        let key = Key::find(name).expect("the table has every field of the schema");
        let origin = settings.get(key.name).map_or(Origin::Default, |given| given.origin.clone());
        all.insert(key.name, Setting { key, value: value.clone(), origin });
    }
    all
}
