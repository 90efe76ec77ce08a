//! Where a configuration value came from.

use std::fmt;
use std::path::PathBuf;

/// The layer that decided a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The recipe or a built-in default.
    Default,
    /// A YAML file.
    File {
        /// The path as the user gave it.
        path: PathBuf,
        /// Line of the key, from 1, where known.
        line: Option<u64>,
    },
    /// A `--set key.path=value`.
    Set,
    /// A command-line flag, by its spelling (`--batch-size`).
    Flag(String),
    /// An environment variable, by its name.
    Environment(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line: Some(line) } => write!(f, "{}:{line}", path.display()),
            Self::File { path, line: None } => write!(f, "{}", path.display()),
            Self::Set => f.write_str("--set"),
            Self::Flag(flag) => f.write_str(flag),
            Self::Environment(name) => write!(f, "environment {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_origin_reads_as_its_place() {
        let file = |line| Origin::File { path: "configs/a.yaml".into(), line };
        assert_eq!(Origin::Default.to_string(), "default");
        assert_eq!(file(Some(3)).to_string(), "configs/a.yaml:3");
        assert_eq!(file(None).to_string(), "configs/a.yaml");
        assert_eq!(Origin::Set.to_string(), "--set");
        assert_eq!(Origin::Flag("--gpus".into()).to_string(), "--gpus");
        assert_eq!(
            Origin::Environment("TFTRAIN_SEED".into()).to_string(),
            "environment TFTRAIN_SEED"
        );
    }
}
