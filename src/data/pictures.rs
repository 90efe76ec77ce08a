//! [`Pictures`]: labelled colour pictures in memory, as the records of the CIFAR files.

use std::ops::Range;

/// Labelled 32x32 colour pictures, kept as the records they were read as.
///
/// A record is `[other labels, label, 3072 pixels]`, one byte each; the pixels are red, green and
/// blue planes of 32 rows.
pub struct Pictures {
    name: String,
    records: Vec<u8>,
    label_at: usize,
    classes: Vec<String>,
}

impl Pictures {
    /// Rows of a picture.
    pub const HEIGHT: usize = 32;
    /// Columns of a picture.
    pub const WIDTH: usize = 32;
    /// Colour planes of a picture.
    pub const CHANNELS: usize = 3;
    /// Bytes of a picture.
    pub const PIXELS: usize = Self::HEIGHT * Self::WIDTH * Self::CHANNELS;

    /// Of whole records with labels below the number of classes.
    pub(super) fn new(name: &str, records: Vec<u8>, label_at: usize, classes: Vec<String>) -> Self {
        debug_assert_eq!(records.len() % Self::record_len(label_at), 0);
        Self { name: name.to_owned(), records, label_at, classes }
    }

    /// The bytes of a record whose label is at byte `label_at`.
    pub(super) fn record_len(label_at: usize) -> usize {
        label_at + 1 + Self::PIXELS
    }

    /// The data set's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of pictures.
    pub fn len(&self) -> usize {
        self.records.len() / Self::record_len(self.label_at)
    }

    /// Whether there are no pictures.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The classes' names; a label is an index into them.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The label of picture `i < len()`.
    pub fn label(&self, i: usize) -> u8 {
        self.records[self.record(i).start + self.label_at]
    }

    /// The 3 planes of 32 rows of 32 pixels of picture `i < len()`.
    pub fn planes(&self, i: usize) -> &[u8] {
        let record = self.record(i);
        &self.records[record.start + self.label_at + 1..record.end]
    }

    fn record(&self, i: usize) -> Range<usize> {
        let len = Self::record_len(self.label_at);
        i * len..(i + 1) * len
    }
}

/// What all [`Source`](super::Source)s over a field `pictures` say of themselves.
macro_rules! of_pictures {
    () => {
        fn name(&self) -> &str {
            self.pictures.name()
        }

        fn len(&self) -> usize {
            self.pictures.len()
        }

        fn classes(&self) -> &[String] {
            self.pictures.classes()
        }
    };
}
pub(super) use of_pictures;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_labels_and_planes_of_both_layouts() {
        for label_at in [0, 1] {
            let len = Pictures::record_len(label_at);
            let mut records = vec![0; 2 * len];
            records[len + label_at] = 7;
            records[len + label_at + 1] = 8;
            records[2 * len - 1] = 9;
            let pictures = Pictures::new("test", records, label_at, Vec::new());
            assert_eq!((pictures.len(), pictures.label(0), pictures.label(1)), (2, 0, 7));
            let planes = pictures.planes(1);
            assert_eq!((planes.len(), planes[0], planes[3071]), (3072, 8, 9));
            assert!(pictures.planes(0).iter().all(|&p| p == 0));
        }
    }
}
