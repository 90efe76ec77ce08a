//! What can be wrong with a configuration.

use super::origin::Origin;

/// A configuration that cannot be used; each message names the place and the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not YAML, repeats a key, or is larger or deeper than a configuration can be.
    #[error("{origin}: {message}")]
    Syntax {
        /// The file and line, or `--set`.
        origin: Origin,
        /// What the parser found.
        message: String,
    },
    /// A key the schema does not have.
    #[error("{origin}: unknown key `{key}`{section}; {help}")]
    UnknownKey {
        /// Where it was written.
        origin: Origin,
        /// The key as written.
        key: String,
        /// " in `data`", or nothing at the top.
        section: String,
        /// The nearest known key, or all of them.
        help: String,
    },
    /// A name that is none of a key's choices.
    #[error("{origin}: unknown `{key}` `{found}`; {help}")]
    UnknownChoice {
        /// Where it was written.
        origin: Origin,
        /// The dotted key.
        key: String,
        /// The name as written.
        found: String,
        /// The nearest name and all of them.
        help: String,
    },
    /// A value of the wrong type or out of range.
    #[error("{origin}: `{key}` must be {wanted}, not {found}")]
    BadValue {
        /// Where it was written.
        origin: Origin,
        /// The dotted key.
        key: String,
        /// What the key takes.
        wanted: String,
        /// The value as JSON.
        found: String,
    },
    /// Two settings that cannot both hold.
    #[error("{first} contradicts {second}: {why}")]
    Contradiction {
        /// One setting, its value and origin.
        first: String,
        /// The other.
        second: String,
        /// What to change.
        why: String,
    },
    /// A choice made without a setting that it needs.
    #[error("`{key}` is missing: {choice} needs it")]
    Missing {
        /// The dotted key to add.
        key: String,
        /// The choice, with its origin.
        choice: String,
    },
    /// A `--set` argument that is not `key.path=value`.
    #[error("--set `{argument}`: write it as key.path=value, such as data.batch_size=64")]
    BadSet {
        /// The argument.
        argument: String,
    },
    /// A recipe that does not exist.
    #[error("unknown recipe `{name}`; {help}")]
    UnknownRecipe {
        /// The name as given.
        name: String,
        /// The nearest name and all of them.
        help: String,
    },
    /// The values fit their keys one by one but not the schema as a whole.
    #[error("the configuration does not fit its schema: {0}")]
    Schema(String),
}
