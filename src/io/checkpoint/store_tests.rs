//! Tests of saving, deleting and falling back.

use std::time::Duration;

use super::*;
use crate::io::checkpoint::{latest, load, load_latest};
use crate::tensor::HostTensor;
use crate::util::clock::ManualClock;

const HOUR: f64 = 3600.0;

fn snapshot(global_step: u64) -> Snapshot {
    let values = (0..300).map(|i| (i * global_step) as f32).collect();
    Snapshot {
        global_step,
        tensors: vec![("w".to_owned(), HostTensor::f32(&[3, 100], values).unwrap())],
        metadata: [("model".to_owned(), "m".to_owned())].into(),
    }
}

struct Run {
    dir: tempfile::TempDir,
    clock: Arc<ManualClock>,
}

impl Run {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), clock: Arc::default() }
    }

    fn open(&self, newest: usize, every_hours: Option<f64>) -> CheckpointStore {
        let retention = Retention { newest, every_hours };
        CheckpointStore::open(self.dir.path(), retention, self.clock.clone()).unwrap()
    }

    fn path(&self, step: u64) -> PathBuf {
        self.dir.path().join(file_name(step))
    }

    fn steps(&self) -> Vec<u64> {
        on_disk(self.dir.path()).unwrap().into_iter().map(|(step, _)| step).collect()
    }

    fn state(&self) -> StateFile {
        StateFile::read(self.dir.path()).unwrap().unwrap()
    }

    /// Every file but checkpoints and state.
    fn others(&self) -> Vec<String> {
        let names = fs::read_dir(self.dir.path()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| step_of(name).is_none() && name != STATE_FILE).collect()
    }
}

#[test]
fn saving_lists_and_loads() {
    let run = Run::new();
    assert_eq!(latest(run.dir.path()).unwrap(), None);
    assert_eq!(load_latest(run.dir.path()).unwrap().map(|l| l.0), None);
    let mut store = run.open(5, None);
    for step in [10, 20] {
        assert_eq!(store.save(&snapshot(step)).unwrap(), run.path(step));
    }
    let text = fs::read_to_string(run.dir.path().join("checkpoint")).unwrap();
    assert_eq!(
        text,
        "model_checkpoint_path: \"model.ckpt-20.safetensors\"\n\
         all_model_checkpoint_paths: \"model.ckpt-10.safetensors\"\n\
         all_model_checkpoint_paths: \"model.ckpt-20.safetensors\"\n"
    );
    assert_eq!(latest(run.dir.path()).unwrap(), Some(run.path(20)));
    let (path, loaded, skipped) = load_latest(run.dir.path()).unwrap().unwrap();
    assert_eq!((path, loaded), (run.path(20), snapshot(20)));
    assert!(skipped.is_empty());
    assert!(run.others().is_empty());
}

#[test]
fn the_newest_are_kept_also_after_a_restart() {
    let run = Run::new();
    let mut store = run.open(2, None);
    (1..=3).for_each(|step| drop(store.save(&snapshot(step)).unwrap()));
    assert_eq!(run.steps(), [2, 3]);
    let mut store = run.open(2, None);
    store.save(&snapshot(4)).unwrap();
    assert_eq!(run.steps(), [3, 4]);
    // The same step again: replaced, not listed twice.
    store.save(&snapshot(4)).unwrap();
    assert_eq!(run.steps(), [3, 4]);
    assert_eq!(run.state().all, [file_name(3), file_name(4)]);

    let mut all = run.open(0, None);
    (5..=15).for_each(|step| drop(all.save(&snapshot(step)).unwrap()));
    assert_eq!(run.steps().len(), 13);
}

#[test]
fn one_is_kept_every_hours() {
    let run = Run::new();
    let mut store = run.open(1, Some(2.0));
    // Saved after 0.5, 1.0, ... hours; each falls out when the next is saved.
    for step in 1..=6 {
        run.clock.advance(Duration::from_secs_f64(0.5 * HOUR));
        store.save(&snapshot(step)).unwrap();
    }
    // Step 5, of 2.5 hours, is the first after the mark of 2; the next mark is 4.
    assert_eq!(run.steps(), [5, 6]);
    assert_eq!(run.state().all, [file_name(6)]);
    assert_eq!(run.state().last_preserved, Some(2.0 * HOUR));
    // A restart goes on with the mark.
    drop(store);
    let mut store = run.open(1, Some(2.0));
    for step in 7..=10 {
        run.clock.advance(Duration::from_secs_f64(0.5 * HOUR));
        store.save(&snapshot(step)).unwrap();
    }
    // Step 9 is of 4.5 hours.
    assert_eq!(run.steps(), [5, 9, 10]);
}

#[test]
fn a_missing_or_damaged_newest_falls_back() {
    let run = Run::new();
    let mut store = run.open(5, None);
    (1..=3).for_each(|step| drop(store.save(&snapshot(step)).unwrap()));
    fs::remove_file(run.path(3)).unwrap();
    fs::write(run.path(2), "torn").unwrap();
    assert_eq!(latest(run.dir.path()).unwrap(), Some(run.path(2)));
    let (path, loaded, skipped) = load_latest(run.dir.path()).unwrap().unwrap();
    assert_eq!((path, loaded.global_step), (run.path(1), 1));
    assert!(matches!(&skipped[..], [
        (a, IoError::Io { .. }),
        (b, IoError::Damaged { .. }),
    ] if *a == run.path(3) && *b == run.path(2)));

    fs::write(run.path(1), "").unwrap();
    let error = load_latest(run.dir.path()).unwrap_err();
    assert!(matches!(error, IoError::NoneUsable { tried: 3, .. }), "{error}");
}

#[test]
fn every_torn_checkpoint_falls_back() {
    let run = Run::new();
    let mut store = run.open(5, None);
    (1..=2).for_each(|step| drop(store.save(&snapshot(step)).unwrap()));
    let whole = fs::read(run.path(2)).unwrap();
    for end in (0..whole.len()).step_by(97) {
        fs::write(run.path(2), &whole[..end]).unwrap();
        assert!(matches!(load(&run.path(2)), Err(IoError::Damaged { .. })), "{end}");
        let (path, _, skipped) = load_latest(run.dir.path()).unwrap().unwrap();
        assert_eq!((path, skipped.len()), (run.path(1), 1));
    }
}

#[test]
fn without_a_state_file_the_directory_decides() {
    let run = Run::new();
    let mut store = run.open(5, None);
    [9, 10, 8].iter().for_each(|&step| drop(store.save(&snapshot(step)).unwrap()));
    assert_eq!(latest(run.dir.path()).unwrap(), Some(run.path(8)), "the last saved");
    let state = run.dir.path().join("checkpoint");
    for damage in [None, Some(&b""[..]), Some(b"\xff\xfe"), Some(b"model_checkpoint_path: \"mo")] {
        match damage {
            None => fs::remove_file(&state).unwrap(),
            Some(bytes) => fs::write(&state, bytes).unwrap(),
        }
        assert_eq!(latest(run.dir.path()).unwrap(), Some(run.path(10)));
        let (path, _, skipped) = load_latest(run.dir.path()).unwrap().unwrap();
        assert_eq!(path, run.path(10));
        assert_eq!(skipped.len(), usize::from(damage.is_some()));
    }
    // The store takes the newest for listed and leaves the rest alone.
    let mut store = run.open(2, None);
    store.save(&snapshot(11)).unwrap();
    assert_eq!(run.state().all, [file_name(10), file_name(11)]);
    assert_eq!(run.steps(), [8, 10, 11]);
}

#[test]
fn a_damaged_state_file_alone_is_no_checkpoint() {
    let run = Run::new();
    fs::write(run.dir.path().join("checkpoint"), "?").unwrap();
    assert!(load_latest(run.dir.path()).unwrap().is_none());
    fs::write(run.dir.path().join("checkpoint"), "model_checkpoint_path: \"gone\"").unwrap();
    assert!(matches!(load_latest(run.dir.path()), Err(IoError::NoneUsable { .. })));
}

#[test]
fn a_hostile_state_file_deletes_nothing_else() {
    let run = Run::new();
    let victim = run.dir.path().join("victim");
    fs::write(&victim, "mine").unwrap();
    let inner = run.dir.path().join("run");
    fs::create_dir(&inner).unwrap();
    let state = StateFile {
        latest: "../victim".to_owned(),
        all: vec![
            "../victim".to_owned(),
            victim.to_str().unwrap().to_owned(),
            "../model.ckpt-1.safetensors".to_owned(),
        ],
        ..StateFile::default()
    };
    state.write(&inner).unwrap();
    let retention = Retention { newest: 1, every_hours: None };
    let mut store = CheckpointStore::open(&inner, retention, run.clock.clone()).unwrap();
    (1..=3).for_each(|step| drop(store.save(&snapshot(step)).unwrap()));
    assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
    assert_eq!(on_disk(&inner).unwrap(), [(3, file_name(3))]);
}

#[test]
fn left_over_temporaries_are_removed_at_open() {
    let run = Run::new();
    for name in [".checkpoint.tmp", ".model.ckpt-3.safetensors.tmp", ".notes.tmp", "a.tmp"] {
        fs::write(run.dir.path().join(name), "half").unwrap();
    }
    run.open(5, None);
    let mut others = run.others();
    others.sort();
    assert_eq!(others, [".notes.tmp", "a.tmp"]);
}

/// A temporary's name that leads to a device which is always full.
#[cfg(unix)]
fn no_space_for(run: &Run, name: &str) -> bool {
    let temporary = run.dir.path().join(format!(".{name}.tmp"));
    Path::new("/dev/full").exists() && std::os::unix::fs::symlink("/dev/full", temporary).is_ok()
}

#[test]
#[cfg(unix)]
fn a_full_disk_leaves_earlier_checkpoints() {
    let run = Run::new();
    let mut store = run.open(1, None);
    store.save(&snapshot(1)).unwrap();
    let before = run.state();
    if !no_space_for(&run, &file_name(2)) {
        return;
    }
    let error = store.save(&snapshot(2)).unwrap_err();
    assert!(matches!(error, IoError::Io { action: "write", .. }), "{error}");
    assert_eq!((run.steps(), run.state()), (vec![1], before.clone()));
    assert!(run.others().is_empty(), "the temporary is gone");

    // The checkpoint fits, the state file does not: the old one is still listed and still there.
    assert!(no_space_for(&run, STATE_FILE));
    assert!(store.save(&snapshot(2)).is_err());
    assert_eq!((run.steps(), run.state()), (vec![1, 2], before));
    let (path, _, _) = load_latest(run.dir.path()).unwrap().unwrap();
    assert_eq!(path, run.path(1));
    // With space again all is well.
    store.save(&snapshot(2)).unwrap();
    assert_eq!((run.steps(), run.state().all), (vec![2], vec![file_name(2)]));
}

#[test]
fn places_that_cannot_be_are_errors() {
    let run = Run::new();
    let file = run.dir.path().join("file");
    fs::write(&file, "").unwrap();
    for dir in [file, run.dir.path().join("none")] {
        let store = CheckpointStore::open(&dir, Retention::default(), run.clock.clone());
        assert!(matches!(store, Err(IoError::Io { action: "list", .. })));
        assert!(latest(&dir).is_err());
        assert!(load_latest(&dir).is_err());
    }
}

#[test]
fn a_directory_that_vanishes_is_an_error() {
    let run = Run::new();
    let inner = run.dir.path().join("run");
    fs::create_dir(&inner).unwrap();
    let mut store = CheckpointStore::open(&inner, Retention::default(), run.clock.clone()).unwrap();
    fs::remove_dir(&inner).unwrap();
    let error = store.save(&snapshot(1)).unwrap_err();
    assert!(error.to_string().contains("model.ckpt-1.safetensors"), "{error}");
}

#[test]
fn tensorflows_format_is_kept_beside_ours() {
    let run = Run::new();
    let mut store = run.open(2, None);
    store.save(&snapshot(1)).unwrap();
    let mut store = run.open(2, None).with_format(Format::TensorFlow);
    let metadata = std::collections::BTreeMap::from([("position".to_owned(), "128".to_owned())]);
    for step in 2..=4 {
        let snapshot = Snapshot { metadata: metadata.clone(), ..snapshot(step) };
        let path = store.save(&snapshot).unwrap();
        assert_eq!(path, run.dir.path().join(format!("model.ckpt-{step}")));
    }
    assert_eq!(run.state().latest, "model.ckpt-4");
    assert_eq!(run.state().all, ["model.ckpt-3", "model.ckpt-4"]);
    assert_eq!(run.steps(), [3, 4], "older ones of either format are gone");
    let (path, loaded, skipped) = load_latest(run.dir.path()).unwrap().unwrap();
    assert_eq!((path, skipped.len()), (run.dir.path().join("model.ckpt-4"), 0));
    let mut expected = snapshot(4).tensors;
    expected.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!((loaded.global_step, loaded.tensors, loaded.metadata), (4, expected, metadata));

    // Cut short, it is passed over.
    fs::write(run.dir.path().join("model.ckpt-4.index"), "").unwrap();
    let (path, _, skipped) = load_latest(run.dir.path()).unwrap().unwrap();
    assert_eq!(path, run.dir.path().join("model.ckpt-3"));
    assert!(skipped[0].1.to_string().contains("too short for a table"), "{}", skipped[0].1);
}
