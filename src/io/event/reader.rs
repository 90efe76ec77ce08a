//! [`read_events`]: what an event file holds, in order.

use std::collections::VecDeque;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use prost::Message;

use super::Histogram;
use super::proto::{Event, HistogramProto, SessionLog, SummaryValue, Value, What};
use crate::io::{IoError, RecordReader};

/// One value of an event file.
#[derive(Clone, Debug, PartialEq)]
pub struct EventRecord {
    /// Seconds since the Unix epoch.
    pub wall_time: f64,
    /// The global step.
    pub step: i64,
    /// What happened.
    pub what: EventKind,
}

/// What an event tells.
#[derive(Clone, Debug, PartialEq)]
pub enum EventKind {
    /// The file's format; the first event.
    FileVersion(String),
    /// A number.
    Scalar {
        /// Its name.
        tag: String,
        /// The number, of single precision.
        value: f32,
    },
    /// A spread of values.
    Histogram {
        /// Its name.
        tag: String,
        /// The counts.
        histogram: Histogram,
    },
    /// A picture.
    Image {
        /// Its name.
        tag: String,
        /// Rows.
        height: i32,
        /// Columns.
        width: i32,
        /// The encoded file.
        png: Vec<u8>,
    },
    /// A run started or went on.
    SessionStart,
    /// A checkpoint was saved at this path.
    Checkpoint(String),
    /// A run ended.
    SessionStop,
    /// Something this program does not write, such as a graph.
    Other,
}

/// Opens an event file. The iterator ends after the first error; a live file may end in
/// [`IoError::Truncated`].
///
/// # Errors
/// Where the file cannot be opened.
pub fn read_events(path: &Path) -> Result<Events, IoError> {
    Ok(Events { records: RecordReader::open(path)?, pending: VecDeque::new(), failed: false })
}

/// The values of an event file. Made by [`read_events`].
#[derive(Debug)]
pub struct Events {
    records: RecordReader<BufReader<File>>,
    /// The values of the last event that are still to be given.
    pending: VecDeque<EventRecord>,
    failed: bool,
}

impl Iterator for Events {
    type Item = Result<EventRecord, IoError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.pending.is_empty() && !self.failed {
            let event = self.records.next()?.and_then(|payload| {
                Event::decode(payload.as_slice()).map_err(|error| {
                    self.records.bad_payload(format!("not an event: {error}"), &payload)
                })
            });
            match event {
                Ok(event) => self.pending = records(event),
                Err(error) => {
                    self.failed = true;
                    return Some(Err(error));
                }
            }
        }
        self.pending.pop_front().map(Ok)
    }
}

/// One record for each value of the event.
fn records(event: Event) -> VecDeque<EventRecord> {
    let (wall_time, step) = (event.wall_time, event.step);
    let record = |what| EventRecord { wall_time, step, what };
    match event.what {
        Some(What::Summary(summary)) => {
            summary.value.into_iter().map(|value| record(value.into())).collect()
        }
        Some(What::FileVersion(version)) => [record(EventKind::FileVersion(version))].into(),
        Some(What::SessionLog(log)) => [record(log.into())].into(),
        None => [record(EventKind::Other)].into(),
    }
}

impl From<SummaryValue> for EventKind {
    fn from(SummaryValue { tag, value }: SummaryValue) -> Self {
        match value {
            Some(Value::Simple(value)) => Self::Scalar { tag, value },
            Some(Value::Histo(histogram)) => Self::Histogram { tag, histogram: histogram.into() },
            Some(Value::Image(image)) => Self::Image {
                tag,
                height: image.height,
                width: image.width,
                png: image.encoded_image_string,
            },
            None => Self::Other,
        }
    }
}

impl From<SessionLog> for EventKind {
    fn from(log: SessionLog) -> Self {
        match log.status {
            SessionLog::START => Self::SessionStart,
            SessionLog::STOP => Self::SessionStop,
            SessionLog::CHECKPOINT => Self::Checkpoint(log.checkpoint_path),
            _ => Self::Other,
        }
    }
}

impl From<HistogramProto> for Histogram {
    fn from(proto: HistogramProto) -> Self {
        let HistogramProto { min, max, num, sum, sum_squares, bucket_limit, bucket } = proto;
        let buckets = bucket_limit.into_iter().zip(bucket).collect();
        Self { min, max, num, sum, sum_squares, buckets }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::io::event::EventWriter;
    use crate::io::event::proto::Summary;
    use crate::io::record::RecordWriter;
    use crate::util::clock::ManualClock;

    fn read(path: &Path) -> Vec<EventRecord> {
        read_events(path).unwrap().map(Result::unwrap).collect()
    }

    #[test]
    fn round_trip() {
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::default());
        let mut writer = EventWriter::create(dir.path(), "host", clock.clone()).unwrap();
        let values = [1.0, -3.0, f32::NAN];
        let rgb: Vec<u8> = (0..18).collect();
        clock.advance(Duration::from_secs(2));
        writer.session_start(5).unwrap();
        writer.scalar(6, "loss", 0.0).unwrap();
        writer.histogram(6, "weights", &values).unwrap();
        writer.image(7, "input", 2, 3, &rgb).unwrap();
        writer.checkpoint(8, Path::new("model.ckpt-8.safetensors")).unwrap();
        writer.session_stop(u64::MAX).unwrap();
        writer.flush().unwrap();

        let records = read(writer.path());
        let steps: Vec<i64> = records.iter().map(|r| r.step).collect();
        assert_eq!(steps, [0, 5, 6, 6, 7, 8, i64::MAX]);
        assert_eq!((records[0].wall_time, records[1].wall_time), (0.0, 2.0));
        let kinds: Vec<&EventKind> = records.iter().map(|r| &r.what).collect();
        assert_eq!(kinds[0], &EventKind::FileVersion("brain.Event:2".to_owned()));
        assert_eq!(kinds[1], &EventKind::SessionStart);
        assert_eq!(kinds[2], &EventKind::Scalar { tag: "loss".to_owned(), value: 0.0 });
        let histogram = Histogram::of(&values);
        assert_eq!(kinds[3], &EventKind::Histogram { tag: "weights".to_owned(), histogram });
        let EventKind::Image { height: 2, width: 3, png, .. } = kinds[4] else {
            panic!("{:?}", kinds[4]);
        };
        let mut decoder = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
        let mut pixels = vec![0; decoder.output_buffer_size().unwrap()];
        decoder.next_frame(&mut pixels).unwrap();
        assert_eq!(pixels, rgb);
        assert_eq!(kinds[5], &EventKind::Checkpoint("model.ckpt-8.safetensors".to_owned()));
        assert_eq!(kinds[6], &EventKind::SessionStop);
    }

    #[test]
    fn a_summary_of_several_values_is_several_records() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("e");
        let value =
            |tag: &str| SummaryValue { tag: tag.to_owned(), value: Some(Value::Simple(1.0)) };
        let full = Summary { value: vec![value("a"), value("b")] };
        let mut writer = RecordWriter::create_new(&path).unwrap();
        for what in [
            Some(What::Summary(Summary::default())),
            Some(What::Summary(full)),
            None,
            Some(What::SessionLog(SessionLog { status: 99, ..SessionLog::default() })),
        ] {
            writer.write(&Event { wall_time: 0.0, step: 3, what }.encode_to_vec()).unwrap();
        }
        writer.flush().unwrap();
        let kinds: Vec<EventKind> = read(&path).into_iter().map(|r| r.what).collect();
        let scalar = |tag: &str| EventKind::Scalar { tag: tag.to_owned(), value: 1.0 };
        assert_eq!(kinds, [scalar("a"), scalar("b"), EventKind::Other, EventKind::Other]);
    }

    #[test]
    fn a_record_that_is_no_event_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("e");
        let mut writer = RecordWriter::create_new(&path).unwrap();
        writer.write(&[]).unwrap();
        writer.write(&[0xff; 7]).unwrap();
        writer.flush().unwrap();
        let results: Vec<_> = read_events(&path).unwrap().collect();
        assert_eq!(results.len(), 2);
        let error = results[1].as_ref().unwrap_err();
        assert!(matches!(error, IoError::BadRecord { record: 1, offset: 16, .. }), "{error}");
    }

    proptest! {
        #[test]
        fn hostile_payloads_never_panic(payload in prop::collection::vec(any::<u8>(), 0..300)) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("e");
            let mut writer = RecordWriter::create_new(&path).unwrap();
            writer.write(&payload).unwrap();
            writer.flush().unwrap();
            let results: Vec<_> = read_events(&path).unwrap().collect();
            prop_assert!(results.iter().filter(|r| r.is_err()).count() <= 1);
        }
    }

    #[test]
    fn a_live_file_ends_in_truncated() {
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::default());
        let writer = EventWriter::create(dir.path(), "host", clock).unwrap();
        let path = writer.path();
        let bytes = fs::read(path).unwrap();
        fs::write(path, [&bytes[..], &bytes[..20]].concat()).unwrap();
        let results: Vec<_> = read_events(path).unwrap().collect();
        assert!(matches!(results[..], [Ok(_), Err(IoError::Truncated { record: 1, .. })]));
    }
}
