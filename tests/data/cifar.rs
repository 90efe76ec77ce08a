//! Reading CIFAR folders, whole and damaged.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use tftrain::data::{CifarSet, DataError, Pictures, Split, load};

const TEN: usize = 1 + Pictures::PIXELS;

/// A CIFAR-10 record: the pixels tell the file and the record.
fn record(label: u8, file: u8, number: u8) -> Vec<u8> {
    let mut record = vec![label];
    record.extend((0..Pictures::PIXELS).map(|i| (i as u8).wrapping_add(file * 16 + number)));
    record
}

/// Five batches of two records and a test batch of one.
fn write_ten(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    for file in 1..=5u8 {
        let bytes = [record(file, file, 0), record(9 - file, file, 1)].concat();
        fs::write(dir.join(format!("data_batch_{file}.bin")), bytes).unwrap();
    }
    fs::write(dir.join("test_batch.bin"), record(3, 7, 0)).unwrap();
}

fn error(dir: &Path) -> (DataError, String) {
    let error = load(CifarSet::Ten, dir, Split::Train).err().expect("must fail");
    let message = error.to_string();
    (error, message)
}

#[test]
fn reads_the_batches_in_order_from_the_folder_or_the_one_around_it() {
    let around = tempfile::tempdir().unwrap();
    let inner = around.path().join("cifar-10-batches-bin");
    write_ten(&inner);
    for dir in [around.path(), &inner] {
        let train = load(CifarSet::Ten, dir, Split::Train).unwrap();
        assert_eq!((train.name(), train.len()), ("cifar10", 10));
        for i in 0..10u8 {
            let (file, number) = (i / 2 + 1, i % 2);
            let expected = record(if number == 0 { file } else { 9 - file }, file, number);
            assert_eq!(train.label(i.into()), expected[0]);
            assert_eq!(train.planes(i.into()), &expected[1..]);
        }
        let test = load(CifarSet::Ten, dir, Split::Test).unwrap();
        assert_eq!((test.len(), test.label(0)), (1, 3));
    }
}

#[test]
fn a_hundred_uses_the_fine_labels() {
    let dir = tempfile::tempdir().unwrap();
    for (name, label) in [("train.bin", 99), ("test.bin", 42)] {
        let mut bytes = vec![200, label];
        bytes.extend([5; Pictures::PIXELS]);
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    for (split, label) in [(Split::Train, 99), (Split::Test, 42)] {
        let pictures = load(CifarSet::Hundred, dir.path(), split).unwrap();
        assert_eq!((pictures.len(), pictures.label(0), pictures.planes(0)[0]), (1, label, 5));
        assert_eq!(pictures.classes().len(), 100);
        assert_eq!(pictures.classes()[42], "class_42");
    }
}

#[test]
fn class_names_come_from_the_folder_when_well_formed() {
    let dir = tempfile::tempdir().unwrap();
    write_ten(dir.path());
    let names = |text: &[u8]| {
        fs::write(dir.path().join("batches.meta.txt"), text).unwrap();
        load(CifarSet::Ten, dir.path(), Split::Test).unwrap().classes().to_vec()
    };
    let standard = load(CifarSet::Ten, dir.path(), Split::Test).unwrap().classes().to_vec();
    assert_eq!((standard[0].as_str(), standard[9].as_str()), ("airplane", "truck"));
    assert_eq!(names(b"a\nb\r\nc\nd\ne\nf\ng\nh\ni\nj\n\n")[1], "b");
    for malformed in [
        b"a\nb\n".as_slice(),
        b"",
        b"a\na\nc\nd\ne\nf\ng\nh\ni\nj\n",
        b"a\nb\nc\nd\ne\nf\ng\nh\ni\nj\nk\n",
        b"a\nb\nc\nd\ne\nf\ng\nh\ni\n\x1b[2J\n",
        b"a\nb\nc\nd\ne\nf\ng\nh\ni\n\xff\xfe\n",
        &[b'x'; 1 << 17],
    ] {
        assert_eq!(names(malformed), standard);
    }
}

#[test]
fn a_missing_file_is_named_with_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    write_ten(dir.path());
    fs::remove_file(dir.path().join("data_batch_4.bin")).unwrap();
    let (error, message) = error(dir.path());
    assert!(matches!(error, DataError::Missing { .. }));
    assert!(message.starts_with("failed to find file: "), "{message}");
    assert!(message.contains("data_batch_4.bin (its folder holds data_batch_1.bin, "), "{message}");

    let nowhere = self::error(&dir.path().join("nowhere")).1;
    assert!(nowhere.contains("nowhere/data_batch_1.bin"), "{nowhere}");
    assert!(nowhere.contains("no such folder"), "{nowhere}");

    let crowded = tempfile::tempdir().unwrap();
    (0..40).for_each(|i| fs::write(crowded.path().join(format!("file{i:02}")), "").unwrap());
    let crowded = self::error(crowded.path()).1;
    assert!(crowded.contains("file11 and 28 more"), "{crowded}");
}

#[test]
fn damaged_files_are_named_with_the_record() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data_batch_2.bin");
    let two = [record(1, 2, 0), record(2, 2, 1)].concat();
    let mut long = two.clone();
    long.extend([0; 5]);
    let mut bad_label = two.clone();
    bad_label[TEN] = 10;
    for (bytes, expected) in [
        (&[][..], "data_batch_2.bin is empty"),
        (&two[..TEN - 1], "data_batch_2.bin: record 0 is cut short: 3072 bytes"),
        (&two[..2 * TEN - 3], "record 1 is cut short: 3070 bytes are left over"),
        (&long, "record 2 is cut short: 5 bytes are left over where a record takes 3073"),
        (&bad_label, "data_batch_2.bin: record 1 has label 10, but labels are 0 to 9"),
    ] {
        write_ten(dir.path());
        fs::write(&path, bytes).unwrap();
        let message = error(dir.path()).1;
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_huge_file_is_refused_before_any_memory_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    write_ten(dir.path());
    // Sparse: takes no room on the disk.
    let file = fs::File::create(dir.path().join("data_batch_5.bin")).unwrap();
    file.set_len(1 << 42).unwrap();
    let (error, message) = error(dir.path());
    let over = (1u64 << 42) - 10_000 * TEN as u64;
    assert!(matches!(error, DataError::TooLong { over: o, .. } if o == over), "{message}");
    assert!(message.contains("follow record 9999"), "{message}");
}

#[test]
fn a_folder_in_place_of_a_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    write_ten(dir.path());
    fs::remove_file(dir.path().join("data_batch_3.bin")).unwrap();
    fs::create_dir(dir.path().join("data_batch_3.bin")).unwrap();
    let message = error(dir.path()).1;
    assert!(message.contains("data_batch_3.bin: it is not a plain file"), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_bytes_give_whole_pictures_or_an_error(len in 0usize..3 * TEN, seed: u8) {
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(seed)).collect();
        fs::write(dir.path().join("test_batch.bin"), &bytes).unwrap();
        match load(CifarSet::Ten, dir.path(), Split::Test) {
            Ok(pictures) => {
                prop_assert_eq!(pictures.len() * TEN, len);
                prop_assert!((0..pictures.len()).all(|i| pictures.label(i) < 10));
            }
            Err(e) => {
                let damaged = len % TEN != 0 || len == 0 || bytes.chunks(TEN).any(|r| r[0] > 9);
                prop_assert!(damaged);
                prop_assert!(e.to_string().contains("test_batch.bin"));
            }
        }
    }
}
