//! [`StateFile`]: the text of TensorFlow's `checkpoint` file, a `CheckpointState` in protobuf's text format.

use std::fmt::{self, Write};
use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

use super::STATE_FILE;
use crate::io::{IoError, write_atomic};

/// Which checkpoints a directory holds. Paths are relative to it, as a rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct StateFile {
    /// The newest checkpoint.
    pub(crate) latest: String,
    /// All that are kept, oldest first.
    pub(crate) all: Vec<String>,
    /// When each of `all` was saved, in seconds since the Unix epoch; may be missing.
    pub(crate) timestamps: Vec<f64>,
    /// The start of the current span of "keep one every n hours"; may be missing.
    pub(crate) last_preserved: Option<f64>,
}

impl StateFile {
    /// Reads the file of `dir`; `None` where there is none.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>, IoError> {
        let path = dir.join(STATE_FILE);
        match fs::read(&path) {
            Ok(text) => Self::parse(&text).map(Some).map_err(|r| IoError::damaged(&path, r)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(IoError::io(&path, "read")(error)),
        }
    }

    /// Writes the file of `dir` at once or not at all.
    pub(crate) fn write(&self, dir: &Path) -> Result<(), IoError> {
        write_atomic(&dir.join(STATE_FILE), |file| file.write_all(self.to_string().as_bytes()))
    }

    /// Parses one `field: value` a line. Unknown fields are an error, as in protobuf.
    pub(crate) fn parse(text: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(text).map_err(|error| format!("not UTF-8 text: {error}"))?;
        let mut state = Self::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            state.parse_field(line).map_err(|reason| format!("line {}: {reason}", number + 1))?;
        }
        if state.latest.is_empty() {
            return Err("it has no `model_checkpoint_path`".to_owned());
        }
        Ok(state)
    }

    fn parse_field(&mut self, line: &str) -> Result<(), String> {
        let (field, value) = line.split_once(':').ok_or("a `:` is missing")?;
        match field.trim_end() {
            "model_checkpoint_path" => self.latest = unquote(value.trim_start())?,
            "all_model_checkpoint_paths" => self.all.push(unquote(value.trim_start())?),
            "all_model_checkpoint_timestamps" => self.timestamps.push(seconds(value)?),
            "last_preserved_timestamp" => self.last_preserved = Some(seconds(value)?),
            other => return Err(format!("`{other}` is no field of a checkpoint state")),
        }
        Ok(())
    }
}

impl fmt::Display for StateFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "model_checkpoint_path: {}", Quoted(&self.latest))?;
        for path in &self.all {
            writeln!(f, "all_model_checkpoint_paths: {}", Quoted(path))?;
        }
        for time in &self.timestamps {
            writeln!(f, "all_model_checkpoint_timestamps: {time:?}")?;
        }
        self.last_preserved.map_or(Ok(()), |time| writeln!(f, "last_preserved_timestamp: {time:?}"))
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let text = text.trim();
    text.parse()
        .ok()
        .filter(|seconds: &f64| seconds.is_finite())
        .ok_or_else(|| format!("`{text}` is no time in seconds"))
}

/// A string as protobuf's text format writes it: what is not printable ASCII as octal bytes.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for byte in self.0.bytes() {
            match byte {
                b'\n' => f.write_str("\\n")?,
                b'\r' => f.write_str("\\r")?,
                b'\t' => f.write_str("\\t")?,
                b'"' | b'\'' | b'\\' => write!(f, "\\{}", char::from(byte))?,
                b' '..=b'~' => f.write_char(char::from(byte))?,
                _ => write!(f, "\\{byte:03o}")?,
            }
        }
        f.write_char('"')
    }
}

/// The content of a quoted string with C's escapes.
fn unquote(text: &str) -> Result<String, String> {
    let mut rest = text.bytes().peekable();
    if rest.next() != Some(b'"') {
        return Err(format!("`{text}` is no quoted string"));
    }
    let unfinished = || format!("the string {text} has no end");
    let mut content = Vec::new();
    loop {
        match rest.next().ok_or_else(unfinished)? {
            b'"' => break,
            b'\\' => content.push(match rest.next().ok_or_else(unfinished)? {
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                quoted @ (b'"' | b'\'' | b'\\') => quoted,
                first @ b'0'..=b'7' => {
                    let mut value = u32::from(first - b'0');
                    for _ in 0..2 {
                        let Some(digit) = rest.next_if(|byte| matches!(byte, b'0'..=b'7')) else {
                            break;
                        };
                        value = value * 8 + u32::from(digit - b'0');
                    }
                    u8::try_from(value)
                        .map_err(|_| format!("an octal escape in {text} is too big"))?
                }
                other => return Err(format!("`\\{}` is no escape", char::from(other))),
            }),
            byte => content.push(byte),
        }
    }
    if rest.next().is_some() {
        return Err(format!("something follows the string in {text}"));
    }
    String::from_utf8(content).map_err(|_| format!("the string {text} is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_text_is_tensorflows() {
        let state = StateFile {
            latest: "model.ckpt-2.safetensors".to_owned(),
            all: vec!["model.ckpt-1.safetensors".to_owned(), "model.ckpt-2.safetensors".to_owned()],
            ..StateFile::default()
        };
        assert_eq!(
            state.to_string(),
            "model_checkpoint_path: \"model.ckpt-2.safetensors\"\n\
             all_model_checkpoint_paths: \"model.ckpt-1.safetensors\"\n\
             all_model_checkpoint_paths: \"model.ckpt-2.safetensors\"\n"
        );
    }

    #[test]
    fn what_tensorflow_writes_is_read() {
        let text = br#"model_checkpoint_path: "/runs/a b/\303\251\'\"\\-7"
all_model_checkpoint_paths: "/runs/a b/\303\251\'\"\\-7"
all_model_checkpoint_timestamps: 1700000000.1234567
all_model_checkpoint_timestamps: 1.7e9
last_preserved_timestamp: 1699999999
"#;
        let state = StateFile::parse(text).unwrap();
        assert_eq!(state.latest, "/runs/a b/é'\"\\-7");
        assert_eq!(state.all, [state.latest.as_str()]);
        assert_eq!(state.timestamps, [1_700_000_000.123_456_7, 1.7e9]);
        assert_eq!(state.last_preserved, Some(1_699_999_999.0));
    }

    #[test]
    fn faults_are_named_by_line() {
        for (text, reason) in [
            (&b""[..], "no `model_checkpoint_path`"),
            (b"model_checkpoint_path: \"a", "line 1: the string \"a has no end"),
            (b"model_checkpoint_path: \"a\\", "no end"),
            (b"model_checkpoint_path: a", "no quoted string"),
            (b"model_checkpoint_path: \"a\" b", "follows"),
            (b"model_checkpoint_path: \"\\q\"", "no escape"),
            (b"model_checkpoint_path: \"\\777\"", "too big"),
            (b"model_checkpoint_path: \"\\377\"", "not UTF-8"),
            (b"\n# note\nmodel_checkpoint_path", "line 3: a `:` is missing"),
            (b"last_preserved_timestamp: nan", "no time"),
            (b"colour: \"red\"", "`colour` is no field"),
            (b"model_checkpoint_path: \"\xff\xfe\"", "not UTF-8"),
        ] {
            let error = StateFile::parse(text).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    fn time() -> impl Strategy<Value = f64> {
        prop::num::f64::NORMAL | prop::num::f64::ZERO
    }

    proptest! {
        #[test]
        fn parsing_undoes_printing(
            latest in "(?s).{1,30}",
            all in prop::collection::vec("(?s).{0,30}", 0..5),
            timestamps in prop::collection::vec(time(), 0..5),
            last_preserved in prop::option::of(time()),
        ) {
            let state = StateFile { latest, all, timestamps, last_preserved };
            let text = state.to_string();
            prop_assert!(text.is_ascii());
            prop_assert_eq!(StateFile::parse(text.as_bytes()), Ok(state));
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(state) = StateFile::parse(&text) {
                prop_assert!(!state.latest.is_empty());
            }
            let mut line = b"model_checkpoint_path: \"".to_vec();
            line.extend(text);
            let _ = StateFile::parse(&line);
        }
    }
}
