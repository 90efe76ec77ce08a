//! [`EventWriter`]: writes what TensorBoard shows.

use std::fmt;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::Arc;

use prost::Message;

use super::Histogram;
use super::proto::{Event, HistogramProto, Image, SessionLog, Summary, SummaryValue, Value, What};
use crate::io::{IoError, RecordWriter};
use crate::util::clock::Clock;

/// Writes one event file. Events are buffered until [`flush`](Self::flush) or drop.
pub struct EventWriter {
    records: RecordWriter<BufWriter<File>>,
    clock: Arc<dyn Clock>,
}

impl fmt::Debug for EventWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventWriter").field("path", &self.path()).finish_non_exhaustive()
    }
}

impl EventWriter {
    /// Starts `events.out.tfevents.<seconds>.<host>` in `dir`; `.1`, `.2`, ... is appended where that
    /// name is taken.
    ///
    /// # Errors
    /// Where the file cannot be created or written.
    pub fn create(dir: &Path, host: &str, clock: Arc<dyn Clock>) -> Result<Self, IoError> {
        let name = format!("events.out.tfevents.{:010}.{host}", clock.wall().as_secs());
        let mut taken = 0u32;
        let records = loop {
            let path = match taken {
                0 => dir.join(&name),
                n => dir.join(format!("{name}.{n}")),
            };
            match RecordWriter::create_new(&path) {
                Err(IoError::Io { source, .. })
                    if source.kind() == std::io::ErrorKind::AlreadyExists =>
                {
                    taken += 1;
                }
                created => break created?,
            }
        };
        let mut writer = Self { records, clock };
        writer.event(0, What::FileVersion("brain.Event:2".to_owned()))?;
        writer.flush()?;
        Ok(writer)
    }

    /// The file being written.
    pub fn path(&self) -> &Path {
        self.records.path()
    }

    /// One number; the format holds it in single precision.
    ///
    /// # Errors
    /// Where the disk refuses.
    pub fn scalar(&mut self, step: u64, tag: &str, value: f64) -> Result<(), IoError> {
        self.summary(step, tag, Value::Simple(value as f32))
    }

    /// The spread of `values`; those that are not finite are left out.
    ///
    /// # Errors
    /// Where the disk refuses.
    pub fn histogram(&mut self, step: u64, tag: &str, values: &[f32]) -> Result<(), IoError> {
        let Histogram { min, max, num, sum, sum_squares, buckets } = Histogram::of(values);
        let (bucket_limit, bucket) = buckets.into_iter().unzip();
        let proto = HistogramProto { min, max, num, sum, sum_squares, bucket_limit, bucket };
        self.summary(step, tag, Value::Histo(proto))
    }

    /// A picture: `rgb` is `[height, width, 3]`, row-major.
    ///
    /// # Errors
    /// Where an extent is zero, `rgb` has another length or the disk refuses.
    pub fn image(
        &mut self,
        step: u64,
        tag: &str,
        height: u32,
        width: u32,
        rgb: &[u8],
    ) -> Result<(), IoError> {
        let encoded_image_string = encode_png(height, width, rgb).map_err(|reason| {
            IoError::unwritable(
                self.path(),
                format!("image `{tag}` of {height} x {width}: {reason}"),
            )
        })?;
        let [height, width] = [height, width].map(|n| i32::try_from(n).unwrap_or(i32::MAX));
        self.summary(
            step,
            tag,
            Value::Image(Image { height, width, colorspace: 3, encoded_image_string }),
        )
    }

    /// The run starts or goes on at `step`; TensorBoard drops what an earlier file holds from there on.
    ///
    /// # Errors
    /// Where the disk refuses.
    pub fn session_start(&mut self, step: u64) -> Result<(), IoError> {
        self.session(step, SessionLog { status: SessionLog::START, ..SessionLog::default() })
    }

    /// A checkpoint was saved at `path`.
    ///
    /// # Errors
    /// Where the disk refuses.
    pub fn checkpoint(&mut self, step: u64, path: &Path) -> Result<(), IoError> {
        let checkpoint_path = path.to_string_lossy().into_owned();
        let status = SessionLog::CHECKPOINT;
        self.session(step, SessionLog { status, checkpoint_path, ..SessionLog::default() })
    }

    /// The run ends.
    ///
    /// # Errors
    /// Where the disk refuses.
    pub fn session_stop(&mut self, step: u64) -> Result<(), IoError> {
        self.session(step, SessionLog { status: SessionLog::STOP, ..SessionLog::default() })
    }

    /// Hands all events on to the system.
    ///
    /// # Errors
    /// Where the disk refuses.
    pub fn flush(&mut self) -> Result<(), IoError> {
        self.records.flush()
    }

    fn summary(&mut self, step: u64, tag: &str, value: Value) -> Result<(), IoError> {
        let value = vec![SummaryValue { tag: tag.to_owned(), value: Some(value) }];
        self.event(step, What::Summary(Summary { value }))
    }

    fn session(&mut self, step: u64, log: SessionLog) -> Result<(), IoError> {
        self.event(step, What::SessionLog(log))
    }

    fn event(&mut self, step: u64, what: What) -> Result<(), IoError> {
        let wall_time = self.clock.wall().as_secs_f64();
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        self.records.write(&Event { wall_time, step, what: Some(what) }.encode_to_vec())
    }
}

/// A PNG file of 8-bit RGB pixels.
fn encode_png(height: u32, width: u32, rgb: &[u8]) -> Result<Vec<u8>, String> {
    let expected = u128::from(height) * u128::from(width) * 3;
    if rgb.len() as u128 != expected {
        return Err(format!("{expected} bytes expected, {} given", rgb.len()));
    }
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().map_err(|error| error.to_string())?;
    writer.write_image_data(rgb).map_err(|error| error.to_string())?;
    writer.finish().map_err(|error| error.to_string())?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::util::clock::ManualClock;

    fn clock() -> Arc<ManualClock> {
        let clock = ManualClock::default();
        clock.advance(Duration::from_millis(1_700_000_000_250));
        Arc::new(clock)
    }

    #[test]
    fn the_first_record_is_the_one_tensorflow_writes() {
        let dir = tempfile::tempdir().unwrap();
        let writer = EventWriter::create(dir.path(), "node", clock()).unwrap();
        assert_eq!(writer.path(), dir.path().join("events.out.tfevents.1700000000.node"));
        let bytes = fs::read(writer.path()).unwrap();
        let mut payload = vec![0x09];
        payload.extend(1_700_000_000.25f64.to_le_bytes());
        payload.extend(b"\x1a\x0dbrain.Event:2");
        assert_eq!(bytes[..12], [0x18, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22]);
        assert_eq!(bytes[12..36], payload);
        assert_eq!(bytes.len(), 40);
    }

    #[test]
    fn a_scalar_of_zero_is_written() {
        let value = SummaryValue { tag: "t".to_owned(), value: Some(Value::Simple(0.0)) };
        assert_eq!(value.encode_to_vec(), b"\x0a\x01t\x15\0\0\0\0");
    }

    #[test]
    fn no_file_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let names: Vec<String> = (0..3)
            .map(|_| {
                let writer = EventWriter::create(dir.path(), "h", clock()).unwrap();
                writer.path().file_name().unwrap().to_str().unwrap().to_owned()
            })
            .collect();
        let base = "events.out.tfevents.1700000000.h";
        assert_eq!(names, [base.to_owned(), format!("{base}.1"), format!("{base}.2")]);
    }

    #[test]
    fn bad_images_and_places_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(dir.path(), "h", clock()).unwrap();
        for (height, width, length) in [(2, 2, 11), (0, 0, 0), (u32::MAX, u32::MAX, 3)] {
            let error = writer.image(0, "x", height, width, &vec![0; length]).unwrap_err();
            assert!(error.to_string().contains("image `x`"), "{error}");
        }
        let missing = dir.path().join("none");
        assert!(matches!(
            EventWriter::create(&missing, "h", clock()),
            Err(IoError::Io { action: "create", .. })
        ));
    }
}
