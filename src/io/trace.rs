//! `trace.json`: spans as Chrome's trace viewer and Perfetto read them.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::{IoError, write_atomic};
use crate::util::trace::Span;

/// The file's name in a train directory.
pub const TRACE_FILE: &str = "trace.json";

/// Writes the spans of a process, called `process`: an object with `traceEvents`, complete events (`"ph": "X"`) with
/// `ts` and `dur` in microseconds, `ts` since the Unix epoch, so that files of several hosts lie on one clock.
///
/// # Errors
/// Where the file cannot be written.
pub fn write_trace(path: &Path, process: &str, spans: &[Span]) -> Result<(), IoError> {
    let mut lanes: Vec<&str> = spans.iter().map(|span| span.lane.as_str()).collect();
    lanes.sort_unstable();
    lanes.dedup();
    let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
    let mut events =
        vec![json!({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": process}})];
    for (tid, lane) in lanes.iter().enumerate() {
        events.push(
            json!({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": lane}}),
        );
    }
    for span in spans {
        let tid = lanes.iter().position(|lane| *lane == span.lane);
        events.push(json!({
            "ph": "X", "name": span.name, "pid": 0, "tid": tid, "ts": micros(span.start), "dur": micros(span.took)
        }));
    }
    let text = json!({"traceEvents": events, "displayTimeUnit": "ms"}).to_string();
    write_atomic(path, |file| file.write_all(text.as_bytes()))
}
