//! [`MetricsWriter`]: `metrics.jsonl`, one JSON object a line.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::IoError;

/// Appends to `metrics.jsonl`. Each line reaches the system before [`write`](Self::write) returns.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
    /// The length of the whole lines.
    length: u64,
}

impl MetricsWriter {
    /// The file's name in its directory.
    pub const FILE_NAME: &'static str = "metrics.jsonl";

    /// Opens or creates the file in `dir`. A last line without an end, torn when a run was killed,
    /// is cut off.
    ///
    /// # Errors
    /// Where the file cannot be opened, read or cut.
    pub fn open(dir: &Path) -> Result<Self, IoError> {
        let path = dir.join(Self::FILE_NAME);
        let mut file = File::options()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(IoError::io(&path, "open"))?;
        let length = whole_lines(&mut file).map_err(IoError::io(&path, "read"))?;
        file.set_len(length).map_err(IoError::io(&path, "truncate"))?;
        Ok(Self { path, file, length })
    }

    /// Cuts the file off at the first row that a resumed run `repeats`. What is no JSON stays.
    ///
    /// # Errors
    /// Where the file cannot be read or cut.
    pub fn cut(&mut self, repeats: impl Fn(&Value) -> bool) -> Result<(), IoError> {
        let first = first_row(&mut self.file, repeats).map_err(IoError::io(&self.path, "read"))?;
        if let Some(length) = first {
            self.file.set_len(length).map_err(IoError::io(&self.path, "truncate"))?;
            self.length = length;
        }
        Ok(())
    }

    /// Appends `row` as one line.
    ///
    /// # Errors
    /// Where `row` has no JSON form or the disk refuses; the file then ends with the line before.
    pub fn write(&mut self, row: &impl Serialize) -> Result<(), IoError> {
        let mut line = serde_json::to_vec(row)
            .map_err(|error| IoError::unwritable(&self.path, error.to_string()))?;
        line.push(b'\n');
        if let Err(source) = self.file.write_all(&line) {
            // Half a line would spoil the next one; where even this fails, the next open cuts it.
            let _ = self.file.set_len(self.length);
            return Err(IoError::io(&self.path, "write")(source));
        }
        self.length += line.len() as u64;
        Ok(())
    }
}

/// The length up to and with the last line end, found from the back.
fn whole_lines(file: &mut File) -> std::io::Result<u64> {
    let mut end = file.seek(SeekFrom::End(0))?;
    let mut block = Vec::new();
    while end > 0 {
        let start = end.saturating_sub(4096);
        file.seek(SeekFrom::Start(start))?;
        block.clear();
        (&*file).take(end - start).read_to_end(&mut block)?;
        if let Some(at) = block.iter().rposition(|&byte| byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

/// Where the first row of a kind begins.
fn first_row(file: &mut File, wanted: impl Fn(&Value) -> bool) -> std::io::Result<Option<u64>> {
    file.seek(SeekFrom::Start(0))?;
    let mut rows = BufReader::new(file);
    let (mut start, mut line) = (0, Vec::new());
    while rows.read_until(b'\n', &mut line)? > 0 {
        if serde_json::from_slice(&line).is_ok_and(|row| wanted(&row)) {
            return Ok(Some(start));
        }
        start += line.len() as u64;
        line.clear();
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    #[test]
    fn rows_are_appended_across_openings() {
        let dir = tempfile::tempdir().unwrap();
        for step in 0..3 {
            let mut metrics = MetricsWriter::open(dir.path()).unwrap();
            metrics.write(&json!({ "step": step, "note": "a\nb" })).unwrap();
        }
        let text = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
        let steps: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps.len(), 3);
        assert_eq!(steps[2], json!({ "step": 2, "note": "a\nb" }));
    }

    #[test]
    fn a_torn_line_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let long = "x".repeat(10_000);
        for (before, after) in [
            ("", "{}\n"),
            ("{\"a\":1", "{}\n"),
            ("{\"a\":1}\n", "{\"a\":1}\n{}\n"),
            ("{\"a\":1}\n{\"a\":", "{\"a\":1}\n{}\n"),
            (&format!("{{}}\n{long}"), "{}\n{}\n"),
            (&long, "{}\n"),
        ] {
            fs::write(&path, before).unwrap();
            MetricsWriter::open(dir.path()).unwrap().write(&json!({})).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), after);
        }
    }

    #[test]
    fn rows_are_cut_from_the_first_that_repeats() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        fs::write(&path, "{\"a\":1}\nnot json\n{\"a\":2}\n{\"a\":3}\n{\"a\":1}\n").unwrap();
        let mut metrics = MetricsWriter::open(dir.path()).unwrap();
        metrics.cut(|row| row["a"] == 4).unwrap();
        metrics.cut(|row| row["a"] == 3).unwrap();
        metrics.write(&json!({ "a": 5 })).unwrap();
        let left = fs::read_to_string(&path).unwrap();
        assert_eq!(left, "{\"a\":1}\nnot json\n{\"a\":2}\n{\"a\":5}\n");
        metrics.cut(|_| true).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
    }

    #[test]
    fn errors_name_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("plain");
        fs::write(&file, "").unwrap();
        let error = MetricsWriter::open(&file).unwrap_err();
        assert!(error.to_string().contains("plain/metrics.jsonl"), "{error}");

        let mut metrics = MetricsWriter::open(dir.path()).unwrap();
        let keyed_by_lists = std::collections::BTreeMap::from([(vec![1], 2)]);
        assert!(matches!(metrics.write(&keyed_by_lists), Err(IoError::Unwritable { .. })));
        assert_eq!(fs::read(dir.path().join("metrics.jsonl")).unwrap(), b"");
    }

    #[test]
    fn a_full_disk_is_an_error() {
        #[cfg(unix)]
        if Path::new("/dev/full").exists() {
            let dir = tempfile::tempdir().unwrap();
            let file = File::options().append(true).open("/dev/full").unwrap();
            let mut metrics = MetricsWriter { path: dir.path().join("m"), file, length: 0 };
            let error = metrics.write(&json!({})).unwrap_err();
            assert!(matches!(error, IoError::Io { action: "write", .. }), "{error}");
        }
    }
}
