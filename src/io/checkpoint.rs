//! Checkpoints: snapshots in safetensors files or in TensorFlow's bundles, and TensorFlow's `checkpoint` state file that lists them.

mod latest;
mod snapshot;
mod state;
mod store;
mod tensorflow;

pub use latest::{latest, load_latest};
pub use snapshot::{Snapshot, load};
pub use store::{CheckpointStore, Format, Retention};
pub use tensorflow::bundle_prefix;

/// The state file's name in its directory.
pub(crate) const STATE_FILE: &str = "checkpoint";

/// What the name of every checkpoint begins with.
pub(crate) const PREFIX: &str = "model.ckpt-";

/// The name of the checkpoint of a step.
pub(crate) fn file_name(step: u64) -> String {
    format!("{PREFIX}{step}.safetensors")
}

/// The step of a checkpoint's name; `None` for any other name.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix(PREFIX)?.strip_suffix(".safetensors")?.parse().ok()?;
    // `parse` takes `+7` and `007` too, which this program never writes.
    (file_name(step) == name).then_some(step)
}

/// The step of the name of a bundle, or of a file of one; `None` for any other name.
pub(crate) fn bundle_step_of(name: &str) -> Option<u64> {
    let prefix = [".index", ".data-00000-of-00001"].iter().find_map(|end| name.strip_suffix(end));
    let name = prefix.unwrap_or(name);
    let step = name.strip_prefix(PREFIX)?.parse().ok()?;
    (format!("{PREFIX}{step}") == name).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_this_program_writes_have_a_step() {
        assert_eq!(step_of("model.ckpt-1000.safetensors"), Some(1000));
        assert_eq!(step_of(&file_name(u64::MAX)), Some(u64::MAX));
        for name in ["+7", "07", "-1", "", "99999999999999999999", "../1", "1/../2"] {
            assert_eq!(step_of(&format!("model.ckpt-{name}.safetensors")), None, "{name}");
        }
        assert_eq!(step_of("model.ckpt-1000.index"), None);
    }
}
