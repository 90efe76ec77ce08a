//! TFRecord framing: `length u64 | masked crc(length) | payload | masked crc(payload)`, little-endian.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use super::IoError;

/// Length and its checksum.
const HEADER: u64 = 12;
/// The payload's checksum.
const FOOTER: u64 = 4;
/// The most memory set aside on the word of a length alone.
const TRUSTED_LENGTH: u64 = 1 << 20;

/// CRC32C, rotated and shifted so that the checksum of data that holds checksums stays strong.
pub(super) fn masked_crc(bytes: &[u8]) -> u32 {
    mask(crc32c::crc32c(bytes))
}

/// A checksum so changed that it can itself be part of what is checked.
pub(super) fn mask(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Appends records to a byte sink.
#[derive(Debug)]
pub struct RecordWriter<W: Write> {
    path: PathBuf,
    output: W,
}

impl RecordWriter<BufWriter<File>> {
    /// Starts a new record file.
    ///
    /// # Errors
    /// Where `path` exists already or cannot be created.
    pub fn create_new(path: &Path) -> Result<Self, IoError> {
        let file = File::create_new(path).map_err(IoError::io(path, "create"))?;
        Ok(Self::new(path, BufWriter::new(file)))
    }
}

impl<W: Write> RecordWriter<W> {
    /// Writes to `output`; `path` names it in errors.
    pub fn new(path: &Path, output: W) -> Self {
        Self { path: path.to_owned(), output }
    }

    /// Appends one record.
    ///
    /// # Errors
    /// Where the output refuses.
    pub fn write(&mut self, payload: &[u8]) -> Result<(), IoError> {
        let length = (payload.len() as u64).to_le_bytes();
        let mut put = |bytes: &[u8]| self.output.write_all(bytes);
        put(&length)
            .and_then(|()| put(&masked_crc(&length).to_le_bytes()))
            .and_then(|()| put(payload))
            .and_then(|()| put(&masked_crc(payload).to_le_bytes()))
            .map_err(IoError::io(&self.path, "write"))
    }

    /// Hands all records on to the system.
    ///
    /// # Errors
    /// Where the output refuses.
    pub fn flush(&mut self) -> Result<(), IoError> {
        self.output.flush().map_err(IoError::io(&self.path, "write"))
    }

    /// The path that errors name.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Iterates over the payloads of a record file. Ends after the first error: what follows has no
/// known start.
#[derive(Debug)]
pub struct RecordReader<R: Read> {
    path: PathBuf,
    input: R,
    /// The next record's number and first byte.
    record: u64,
    offset: u64,
    failed: bool,
}

impl RecordReader<BufReader<File>> {
    /// Opens a record file.
    ///
    /// # Errors
    /// Where it cannot be opened.
    pub fn open(path: &Path) -> Result<Self, IoError> {
        let file = File::open(path).map_err(IoError::io(path, "open"))?;
        Ok(Self::new(path, BufReader::with_capacity(256 << 10, file)))
    }
}

impl<R: Read> RecordReader<R> {
    /// Reads from `input`, which should be buffered; `path` names it in errors.
    pub fn new(path: &Path, input: R) -> Self {
        Self { path: path.to_owned(), input, record: 0, offset: 0, failed: false }
    }

    /// The error that the record now being read is damaged.
    fn bad(&self, reason: impl Into<String>) -> IoError {
        let (path, reason) = (self.path.clone(), reason.into());
        IoError::BadRecord { path, record: self.record, offset: self.offset, reason }
    }

    /// The error that the payload returned last is not what it should be.
    pub(crate) fn bad_payload(&self, reason: impl Into<String>, payload: &[u8]) -> IoError {
        let length = HEADER + payload.len() as u64 + FOOTER;
        IoError::BadRecord {
            path: self.path.clone(),
            record: self.record - 1,
            offset: self.offset - length,
            reason: reason.into(),
        }
    }

    /// Up to `needed` bytes: fewer only at the end of the input.
    fn section(&mut self, needed: u64) -> Result<Vec<u8>, IoError> {
        let mut bytes = Vec::with_capacity(needed.min(TRUSTED_LENGTH) as usize);
        let read = self.input.by_ref().take(needed).read_to_end(&mut bytes);
        read.map_err(IoError::io(&self.path, "read"))?;
        Ok(bytes)
    }

    /// The error where a section came up short.
    fn check_whole(&self, needed: u64, found: usize) -> Result<(), IoError> {
        let (path, record, offset) = (self.path.clone(), self.record, self.offset);
        match found as u64 {
            found if found == needed => Ok(()),
            found => Err(IoError::Truncated { path, record, offset, needed, found }),
        }
    }

    fn read_record(&mut self) -> Result<Option<Vec<u8>>, IoError> {
        let header = self.section(HEADER)?;
        if header.is_empty() {
            return Ok(None);
        }
        self.check_whole(HEADER, header.len())?;
        let (length, crc) = header.split_at(8);
        if crc != masked_crc(length).to_le_bytes() {
            return Err(self.bad("the checksum of its length is wrong"));
        }
        let length = u64::from_le_bytes(length.try_into().expect("split at 8"));
        let needed = length
            .checked_add(FOOTER)
            .ok_or_else(|| self.bad(format!("a length of {length} bytes cannot be")))?;
        let mut payload = self.section(needed)?;
        self.check_whole(needed, payload.len())?;
        let crc = payload.split_off(length as usize);
        if crc != masked_crc(&payload).to_le_bytes() {
            return Err(self.bad("the checksum of its content is wrong"));
        }
        self.record += 1;
        self.offset += HEADER + needed;
        Ok(Some(payload))
    }
}

impl<R: Read> Iterator for RecordReader<R> {
    type Item = Result<Vec<u8>, IoError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let record = self.read_record().transpose();
        self.failed = !matches!(record, Some(Ok(_)));
        record
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encode(payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut writer = RecordWriter::new(Path::new("mem"), Vec::new());
        payloads.iter().for_each(|payload| writer.write(payload).unwrap());
        writer.output
    }

    fn decode(bytes: &[u8]) -> Vec<Result<Vec<u8>, IoError>> {
        RecordReader::new(Path::new("mem"), bytes).collect()
    }

    #[test]
    fn the_known_bytes() {
        // The first record of every event file TensorFlow writes begins with these twelve bytes.
        let bytes = encode(&[vec![0; 24]]);
        assert_eq!(bytes[..12], [0x18, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22]);
    }

    proptest! {
        #[test]
        fn round_trip(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8)) {
            let back: Vec<_> = decode(&encode(&payloads)).into_iter().map(Result::unwrap).collect();
            prop_assert_eq!(back, payloads);
        }

        #[test]
        fn a_changed_byte_is_found(payload in prop::collection::vec(any::<u8>(), 1..100), at: prop::sample::Index, flip in 1u8..) {
            let mut bytes = encode(&[payload]);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            let found = matches!(decode(&bytes)[..], [Err(IoError::BadRecord { .. })]);
            prop_assert!(found, "byte {at}");
        }
    }

    #[test]
    fn every_truncation_is_named() {
        let bytes = encode(&[vec![7; 5], vec![8; 9]]);
        for end in 22..bytes.len() {
            let records = decode(&bytes[..end]);
            let last = records.last().unwrap().as_ref().unwrap_err();
            assert_eq!(records.len(), 2, "the reader stops at the fault");
            assert!(
                matches!(last, IoError::Truncated { record: 1, offset: 21, .. }),
                "{end}: {last}"
            );
        }
        assert_eq!(decode(&bytes[..21]).len(), 1);
    }

    #[test]
    fn an_absurd_length_is_not_allocated() {
        for length in [u64::MAX, u64::MAX - 4, 1 << 62] {
            let mut bytes = length.to_le_bytes().to_vec();
            bytes.extend(masked_crc(&length.to_le_bytes()).to_le_bytes());
            bytes.extend([1, 2, 3]);
            let error = decode(&bytes).remove(0).unwrap_err();
            assert!(error.to_string().contains("record 0 at byte 0"), "{error}");
        }
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let Ok(full) = File::options().write(true).open("/dev/full") else { return };
        let mut writer = RecordWriter::new(Path::new("/dev/full"), BufWriter::new(full));
        writer.write(b"fits the buffer").unwrap();
        let error = writer.flush().unwrap_err();
        assert!(error.to_string().starts_with("cannot write /dev/full"), "{error}");
        // What remains in the buffer must not be tried again at drop.
        let (_, rest) = writer.output.into_parts();
        assert!(!rest.unwrap().is_empty());
    }

    #[test]
    fn files_are_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tfrecord");
        let mut writer = RecordWriter::create_new(&path).unwrap();
        writer.write(b"x").unwrap();
        writer.flush().unwrap();
        assert!(matches!(RecordWriter::create_new(&path), Err(IoError::Io { .. })));
        let records: Vec<_> = RecordReader::open(&path).unwrap().map(Result::unwrap).collect();
        assert_eq!(records, [b"x"]);
        assert!(matches!(RecordReader::open(&dir.path().join("b")), Err(IoError::Io { .. })));
    }
}
