//! Round trips, a checkpoint that TensorFlow wrote, and damage.

use std::path::Path;

use proptest::prelude::*;

use super::*;

/// A checkpoint of TensorFlow 2.21's `Saver`.
fn by_tensorflow() -> Bundle {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    Bundle::open(&root.join("tests/data/bundle/tensorflow.ckpt-42")).unwrap()
}

#[test]
fn what_tensorflow_wrote_is_read() {
    let bundle = by_tensorflow();
    let all: Vec<_> = bundle.entries().map(|(n, e)| (n, e.dtype, e.shape.clone())).collect();
    let expected = [
        ("conv1/biases", 1, vec![2]),
        ("conv1/weights", 1, vec![2, 3, 4]),
        ("count", 3, vec![]),
        ("double", 2, vec![1, 1]),
        ("empty", 1, vec![0, 3]),
        ("flags", 10, vec![3]),
        ("global_step", 9, vec![]),
        ("names", 7, vec![3]),
    ];
    assert_eq!(all, expected);
    let weights: Vec<u8> = (0..24u8).flat_map(|i| (f32::from(i) / 8.0).to_le_bytes()).collect();
    assert_eq!(bundle.read("conv1/weights").unwrap(), weights);
    assert_eq!(bundle.read("global_step").unwrap(), 42i64.to_le_bytes());
    assert_eq!(bundle.read("count").unwrap(), (-7i32).to_le_bytes());
    assert_eq!(bundle.read("flags").unwrap(), [1, 0, 1]);
    assert!(bundle.read("empty").unwrap().is_empty());
    let names = ["".to_owned(), "ab".to_owned(), "é".repeat(100)].map(String::into_bytes);
    assert_eq!(bundle.read_strings("names").unwrap(), names);
}

#[test]
fn the_same_tensors_give_tensorflows_bytes() {
    let bundle = by_tensorflow();
    let strings = bundle.read_strings("names").unwrap();
    let bytes: Vec<_> = bundle.entries().map(|(name, _)| bundle.read(name).unwrap()).collect();
    let tensors: Vec<_> = bundle
        .entries()
        .zip(&bytes)
        .map(|((name, entry), bytes)| {
            let data = match entry.dtype {
                DT_STRING => BundleData::Strings(&strings),
                _ => BundleData::Bytes(bytes),
            };
            (name, entry.dtype, entry.shape.as_slice(), data)
        })
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("ours");
    write_bundle(&prefix, &tensors).unwrap();
    for (ours, theirs) in [
        (index_path(&prefix), index_path(&bundle.prefix)),
        (data_path(&prefix, 0, 1), data_path(&bundle.prefix, 0, 1)),
    ] {
        assert_eq!(fs::read(ours).unwrap(), fs::read(theirs).unwrap());
    }
    remove_bundle(&prefix).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_large_table_has_several_blocks() {
    let entries: Vec<(Vec<u8>, Vec<u8>)> = (0..20_000)
        .map(|i| (format!("layer{i:06}/weights").into_bytes(), vec![i as u8; 30]))
        .collect();
    let file = table::encode(entries.iter().map(|(k, v)| (k.as_slice(), v.as_slice())));
    assert!(file.len() > 2 * (256 << 10));
    assert_eq!(table::decode(&file).unwrap(), entries);
}

#[test]
fn a_checkpoint_cut_short_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("cut");
    let data = BundleData::Bytes(&[1; 400]);
    write_bundle(&prefix, &[("a", 1, &[100], data), ("b", 1, &[100], data)]).unwrap();
    let path = data_path(&prefix, 0, 1);
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..500]).unwrap();
    let bundle = Bundle::open(&prefix).unwrap();
    assert_eq!(bundle.read("a").unwrap(), [1; 400]);
    let error = bundle.read("b").unwrap_err().to_string();
    assert!(
        error.contains("tensor `b` takes 400 bytes from 400 on, but the file has 500"),
        "{error}"
    );
    let mut changed = whole;
    changed[7] ^= 1;
    fs::write(&path, changed).unwrap();
    let error = bundle.read("a").unwrap_err().to_string();
    assert!(error.contains("the checksum of tensor `a` is wrong"), "{error}");
    assert!(bundle.read("c").unwrap_err().to_string().contains("it has no tensor `c`"));
    let twice = write_bundle(&prefix, &[("a", 1, &[100], data), ("a", 1, &[100], data)]);
    assert!(twice.unwrap_err().to_string().contains("given twice"));
}

proptest! {
    #[test]
    fn round_trip(
        tensors in prop::collection::btree_map("[a-z/]{1,12}", prop::collection::vec(any::<i64>(), 0..20), 0..40),
        strings in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..6),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let prefix = dir.path().join("model.ckpt-1");
        let bytes: Vec<Vec<u8>> =
            tensors.values().map(|v| v.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
        let shapes: Vec<[usize; 1]> = tensors.values().map(|v| [v.len()]).collect();
        let count = [strings.len()];
        let mut all: Vec<_> = tensors
            .keys()
            .zip(&bytes)
            .zip(&shapes)
            .map(|((name, bytes), shape)| (name.as_str(), 9, &shape[..], BundleData::Bytes(bytes)))
            .collect();
        all.push(("STRINGS", DT_STRING, &count[..], BundleData::Strings(&strings)));
        write_bundle(&prefix, &all).unwrap();
        let bundle = Bundle::open(&prefix).unwrap();
        prop_assert_eq!(bundle.entries().count(), all.len());
        for (name, bytes) in tensors.keys().zip(&bytes) {
            prop_assert_eq!(&bundle.read(name).unwrap(), bytes);
        }
        prop_assert_eq!(bundle.read_strings("STRINGS").unwrap(), strings);
    }

    #[test]
    fn any_index_is_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_index(&bytes);
        let _ = parse_strings(&bytes, 3, 7);
    }

    #[test]
    fn a_changed_index_is_parsed_or_refused(at: prop::sample::Index, flip in 1u8..) {
        let mut index = fs::read(index_path(&by_tensorflow().prefix)).unwrap();
        let at = at.index(index.len());
        index[at] ^= flip;
        let _ = parse_index(&index);
    }

    /// Blocks of any content under right checksums, so that what lies behind these is reached.
    #[test]
    fn any_block_is_parsed_or_refused(block in prop::collection::vec(any::<u8>(), 0..80), entry in prop::collection::vec(any::<u8>(), 0..60)) {
        let mut file = table::encode([(&b""[..], entry.as_slice()), (&b"a"[..], block.as_slice())]);
        let _ = parse_index(&file);
        file.splice(0..0, block);
        let _ = parse_index(&file);
    }
}
