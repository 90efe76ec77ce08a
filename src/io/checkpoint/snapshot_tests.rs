//! Tests of the snapshot's file: round trips and hostile files.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;

fn sample() -> Snapshot {
    let floats: Vec<f32> = (0..60).map(|i| i as f32 * 0.37 - 5.0).collect();
    Snapshot {
        global_step: 1000,
        tensors: vec![
            ("counts".to_owned(), HostTensor::i64(&[3], vec![1, -2, i64::MAX]).unwrap()),
            ("dense/kernel".to_owned(), HostTensor::f32(&[12, 5], floats).unwrap()),
            ("bias \"é\"".to_owned(), HostTensor::f32(&[], vec![f32::MIN_POSITIVE]).unwrap()),
            ("empty".to_owned(), HostTensor::f32(&[0, 4], vec![]).unwrap()),
        ],
        metadata: [("model", "lenet"), ("seed", "7"), ("position", "{\"epoch\": 3}")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into(),
    }
}

fn scratch() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.ckpt-1000.safetensors");
    (dir, path)
}

/// A file of `header` and `data`, the header's length as it is.
fn file_of(header: &str, data: &[u8]) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], header.as_bytes(), data].concat()
}

fn damage(path: &Path, bytes: &[u8]) -> String {
    fs::write(path, bytes).unwrap();
    match load(path) {
        Err(IoError::Damaged { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn round_trip() {
    let (_dir, path) = scratch();
    sample().save(&path).unwrap();
    assert_eq!(load(&path).unwrap(), sample());
}

#[test]
fn files_are_reproducible_and_other_readers_read_them() {
    let (_dir, path) = scratch();
    sample().save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    sample().save(&path).unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);

    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("global_step").unwrap().data(), 1000i64.to_le_bytes());
    assert_eq!(file.tensor("global_step").unwrap().shape(), [0usize; 0]);
    assert_eq!(file.tensor("dense/kernel").unwrap().shape(), [12, 5]);
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().as_ref().unwrap();
    assert_eq!(metadata["format"], "tftrain-1");
    // The digest of no data is well known.
    let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    assert_eq!(metadata["sha256:empty"], empty);
}

#[test]
fn integers_come_first_so_that_all_data_is_aligned() {
    let (_dir, path) = scratch();
    let mut snapshot = sample();
    snapshot.tensors.reverse();
    snapshot.save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.info("counts").unwrap().data_offsets.0 % 8, 0);
    let loaded = load(&path).unwrap();
    let mut names: Vec<&str> = loaded.tensors.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[0], "counts");
    names.sort_unstable();
    assert_eq!(names, ["bias \"é\"", "counts", "dense/kernel", "empty"]);
}

#[test]
fn a_tensor_that_is_not_row_major_is_saved_by_its_indices() {
    let (_dir, path) = scratch();
    let floats = ndarray::arr2(&[[1f32, 2., 3.], [4., 5., 6.]]).reversed_axes().into_dyn();
    let integers = ndarray::arr2(&[[1i64, 2, 3], [4, 5, 6]]).reversed_axes().into_dyn();
    let tensors = vec![
        ("i".to_owned(), HostTensor::I64(integers.clone())),
        ("f".to_owned(), HostTensor::F32(floats.clone())),
    ];
    Snapshot { tensors, ..Snapshot::default() }.save(&path).unwrap();
    let loaded = load(&path).unwrap().tensors;
    assert_eq!(loaded[0].1, HostTensor::I64(integers));
    assert_eq!(loaded[1].1, HostTensor::F32(floats));
}

#[test]
fn what_the_format_cannot_hold_is_refused() {
    let (_dir, path) = scratch();
    let scalar = || HostTensor::f32(&[], vec![0.0]).unwrap();
    let named = |names: &[&str]| Snapshot {
        tensors: names.iter().map(|name| ((*name).to_owned(), scalar())).collect(),
        ..Snapshot::default()
    };
    let keyed =
        |key: &str| Snapshot { metadata: [(key.to_owned(), String::new())].into(), ..named(&[]) };
    for snapshot in [
        named(&["a", "a"]),
        named(&["global_step"]),
        named(&["__metadata__"]),
        keyed("format"),
        keyed("sha256:x"),
        Snapshot { global_step: u64::MAX, ..Snapshot::default() },
    ] {
        assert!(matches!(snapshot.save(&path), Err(IoError::Unwritable { .. })), "{snapshot:?}");
        assert!(!path.exists());
    }
}

#[test]
fn every_truncation_and_extension_is_damage() {
    let (_dir, path) = scratch();
    sample().save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    for end in (0..bytes.len()).step_by(7).chain([bytes.len() - 1]) {
        damage(&path, &bytes[..end]);
    }
    damage(&path, &[&bytes[..], &[0]].concat());
}

#[test]
fn every_changed_byte_is_damage_or_harmless() {
    let (_dir, path) = scratch();
    sample().save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let mut found = 0;
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        fs::write(&path, &changed).unwrap();
        match load(&path) {
            Err(IoError::Damaged { .. }) => found += 1,
            // Only the shape of a tensor without data is under no digest.
            Ok(loaded) => assert_eq!(loaded.tensors.len(), 4, "byte {at}"),
            Err(other) => panic!("{other}"),
        }
    }
    assert!(found + 2 >= bytes.len(), "{found} of {}", bytes.len());
}

#[test]
fn lying_headers_are_damage() {
    let (_dir, path) = scratch();
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!("{{\"a\":{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{offsets}}}}}")
    };
    let huge = "[9223372036854775807,9223372036854775807]";
    for (header, data) in [
        (String::new(), 0),
        ("{".to_owned(), 0),
        ("[]".to_owned(), 0),
        ("{}".to_owned(), 0),
        ("[".repeat(100_000), 0),
        (entry("F32", "[2]", "[0,4]"), 4),
        (entry("F32", "[1]", "[4,8]"), 8),
        (entry("F32", "[1]", "[4,0]"), 4),
        (entry("F32", "[-1]", "[0,4]"), 4),
        (entry("F32", huge, "[0,4]"), 4),
        (entry("F32", "[0,9223372036854775807]", "[0,0]"), 0),
        (entry("F32", "[1152921504606846976]", "[0,4611686018427387904]"), 4),
        (entry("F99", "[1]", "[0,4]"), 4),
        (entry("F4", "[1]", "[0,1]"), 1),
    ] {
        damage(&path, &file_of(&header, &vec![0; data]));
    }
    // Eight tensors whose sizes add up to almost 2^64.
    let size = (1u64 << 61) - 1;
    let many: Vec<String> = (0..8)
        .map(|i| {
            let offsets = format!("[{},{}]", i * size, (i + 1) * size);
            let entry = entry("U8", &format!("[{size}]"), &offsets);
            entry[1..entry.len() - 1].replace("\"a\"", &format!("\"a{i}\""))
        })
        .collect();
    damage(&path, &file_of(&format!("{{{}}}", many.join(",")), &[0; 64]));
    for length in [0, 1, 9, u64::MAX, u64::MAX - 7, 1 << 40] {
        damage(&path, &[&length.to_le_bytes()[..], b"{}"].concat());
    }
}

/// A header in due form over any tensors, to reach the checks behind the digests.
fn signed(mut metadata: BTreeMap<String, String>, tensors: serde_json::Value) -> String {
    let digest = metadata_digest(&metadata);
    metadata.insert("sha256:__metadata__".to_owned(), digest);
    let mut header = tensors;
    header["__metadata__"] = json!(metadata);
    header.to_string()
}

#[test]
fn well_formed_files_with_wrong_content_are_damage() {
    let (_dir, path) = scratch();
    let tensor = |name: &str, dtype: &str, shape: &[usize], data: &[u8]| {
        let metadata = BTreeMap::from([
            ("format".to_owned(), "tftrain-1".to_owned()),
            (format!("sha256:{name}"), hex(&Sha256::digest(data))),
        ]);
        let info = json!({ "dtype": dtype, "shape": shape, "data_offsets": [0, data.len()] });
        file_of(&signed(metadata, json!({ name: info })), data)
    };
    let whole = tensor("global_step", "I64", &[], &7i64.to_le_bytes());
    fs::write(&path, &whole).unwrap();
    assert_eq!(load(&path).unwrap().global_step, 7);

    for (file, reason) in [
        (tensor("global_step", "I64", &[], &(-7i64).to_le_bytes()), "global_step"),
        (tensor("global_step", "I64", &[1], &7i64.to_le_bytes()), "global_step"),
        (tensor("global_step", "I64", &[0], &[]), "global_step"),
        (tensor("global_step", "F32", &[], &7f32.to_le_bytes()), "global_step"),
        (tensor("other", "I64", &[], &7i64.to_le_bytes()), "global_step"),
        (tensor("other", "BF16", &[1], &[0; 2]), "tensor `other`: its type"),
        (tensor("other", "F32", &[0, usize::MAX], &[]), "cannot be"),
        (file_of(&signed(BTreeMap::new(), json!({})), &[]), "format"),
        (
            file_of(&signed([("format".to_owned(), "pt".to_owned())].into(), json!({})), &[]),
            "\"pt\"",
        ),
    ] {
        let found = damage(&path, &file);
        assert!(found.contains(reason), "{found}");
    }
    let mut changed = whole;
    *changed.last_mut().unwrap() ^= 1;
    assert!(damage(&path, &changed).contains("does not match its digest"));
}

proptest! {
    #[test]
    fn any_bytes_are_damage(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let (_dir, path) = scratch();
        damage(&path, &bytes);
        damage(&path, &file_of(&String::from_utf8_lossy(&bytes), &bytes));
    }

    #[test]
    fn any_snapshot_comes_back(
        global_step in 0..=i64::MAX as u64,
        tensors in prop::collection::btree_map(".{1,20}", prop::collection::vec(any::<f32>(), 1..20), 0..6),
        metadata in prop::collection::btree_map("[^s].*", ".*", 0..5),
    ) {
        prop_assume!(!metadata.contains_key("format"));
        let (_dir, path) = scratch();
        let tensors = tensors
            .into_iter()
            .filter(|(name, _)| name != "global_step")
            .map(|(name, values)| {
                // NaN does not equal itself.
                let values: Vec<f32> = values.into_iter().map(|v| if v.is_nan() { 0.0 } else { v }).collect();
                (name, HostTensor::f32(&[1, values.len()], values).unwrap())
            })
            .collect();
        let snapshot = Snapshot { global_step, tensors, metadata };
        snapshot.save(&path).unwrap();
        prop_assert_eq!(load(&path).unwrap(), snapshot);
    }
}

#[test]
fn a_missing_file_is_an_io_error() {
    let (dir, path) = scratch();
    assert!(matches!(load(&path), Err(IoError::Io { action: "read", .. })));
    assert!(load(dir.path()).is_err());
}
