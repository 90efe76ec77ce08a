//! The layers of a configuration, lowest first: recipe, files, environment, `--set`, flags.

use std::path::PathBuf;

use serde_json::Value;

use super::choice::ModelName;
use super::error::ConfigError;
use super::origin::Origin;
use super::resolve::{Resolved, resolve};
use super::settings::{Settings, read};
use super::suggest::{choice_help, shown};
use super::tree::Tree;

/// Collects what the user gave; [`Layers::resolve`] decides.
///
/// Files are layers of their own, a later one above an earlier one. All environment variables
/// make one layer, so do all `--set` and all flags; within it the last word on a key counts. A
/// layer that makes a choice (`towers.gpus` or `towers.cpus`, an optimizer, a schedule, a data
/// set) drops what lower layers set for the other choices.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    recipe: Option<String>,
    files: Vec<(PathBuf, String)>,
    environment: Vec<Given>,
    sets: Vec<String>,
    flags: Vec<Given>,
}

/// A value for a dotted key.
#[derive(Clone, Debug)]
struct Given {
    origin: Origin,
    key: String,
    value: Value,
}

impl Layers {
    /// Starts from the defaults of a recipe; with `None`, of the model that the layers choose, or
    /// `cifar10`.
    pub fn new(recipe: Option<&str>) -> Self {
        Self { recipe: recipe.map(str::to_owned), ..Self::default() }
    }

    /// Adds a YAML file by its text; `path` is only for messages.
    #[must_use]
    pub fn file(mut self, path: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        self.files.push((path.into(), text.into()));
        self
    }

    /// Adds the environment variable `name`, whose value (converted by the caller) is for the
    /// dotted `key`.
    #[must_use]
    pub fn environment(mut self, name: &str, key: &str, value: Value) -> Self {
        let origin = Origin::Environment(name.to_owned());
        self.environment.push(Given { origin, key: key.to_owned(), value });
        self
    }

    /// Adds the argument of a `--set`: `key.path=value`, the value in YAML.
    #[must_use]
    pub fn set(mut self, argument: impl Into<String>) -> Self {
        self.sets.push(argument.into());
        self
    }

    /// Adds the command-line flag spelt `flag`, whose value is for the dotted `key`.
    #[must_use]
    pub fn flag(mut self, flag: &str, key: &str, value: Value) -> Self {
        let origin = Origin::Flag(flag.to_owned());
        self.flags.push(Given { origin, key: key.to_owned(), value });
        self
    }

    /// Merges the layers, fills in the defaults and checks the whole.
    ///
    /// # Errors
    /// The first [`ConfigError`] found, lower layers first.
    pub fn resolve(self) -> Result<Resolved, ConfigError> {
        let mut layers = Vec::new();
        for (path, text) in self.files {
            layers.push(read_file(path, &text)?);
        }
        layers.push(read_given(self.environment)?);
        layers.push(read_sets(&self.sets)?);
        layers.push(read_given(self.flags)?);

        let model = match self.recipe {
            Some(name) => recipe_model(&name)?,
            None => chosen_model(&layers),
        };
        let mut recipe = Settings::new();
        read(parse(model.recipe_yaml(), &Origin::Default)?, "", &Origin::Default, &mut recipe)?;
        layers.insert(0, recipe);
        resolve(layers)
    }
}

fn parse(text: &str, origin: &Origin) -> Result<Tree, ConfigError> {
    Tree::parse(text).map_err(|error| {
        let origin = match origin {
            Origin::File { path, .. } => Origin::File { path: path.clone(), line: error.line },
            other => other.clone(),
        };
        ConfigError::Syntax { origin, message: error.message }
    })
}

fn read_file(path: PathBuf, text: &str) -> Result<Settings, ConfigError> {
    let origin = Origin::File { path, line: None };
    let mut settings = Settings::new();
    read(parse(text, &origin)?, "", &origin, &mut settings)?;
    Ok(settings)
}

fn read_given(given: Vec<Given>) -> Result<Settings, ConfigError> {
    let mut settings = Settings::new();
    for Given { origin, key, value } in given {
        read(Tree::from(value).under(&key), "", &origin, &mut settings)?;
    }
    Ok(settings)
}

fn read_sets(arguments: &[String]) -> Result<Settings, ConfigError> {
    let mut settings = Settings::new();
    for argument in arguments {
        let bad = || ConfigError::BadSet { argument: shown(argument) };
        let (key, value) = argument.split_once('=').ok_or_else(bad)?;
        let key = key.trim();
        if value.trim().is_empty() || key.split('.').any(str::is_empty) {
            return Err(bad());
        }
        read(parse(value, &Origin::Set)?.under(key), "", &Origin::Set, &mut settings)?;
    }
    Ok(settings)
}

fn recipe_model(name: &str) -> Result<ModelName, ConfigError> {
    ModelName::from_name(name).ok_or_else(|| ConfigError::UnknownRecipe {
        name: shown(name),
        help: choice_help(name, ModelName::NAMES),
    })
}

fn chosen_model(layers: &[Settings]) -> ModelName {
    let chosen = layers.iter().rev().find_map(|layer| layer.get("model.name"));
    chosen
        .and_then(|setting| setting.value.as_str())
        .and_then(ModelName::from_name)
        .unwrap_or(ModelName::Cifar10)
}
