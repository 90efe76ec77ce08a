//! The roofline of `bench step --profile`: each operation's share of the step, beside what the processor can do at most where that
//! was measured. A GPU's own launches beside the program's operations have a time and no cost.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::device::cpu::Peaks;
use crate::graph::Program;
use crate::util::stats::median;
use crate::util::trace::Span;

/// The span that holds a tower's operations.
const TOWER: &str = "gradients";

/// One operation of the program.
pub(super) struct Row {
    name: String,
    op: &'static str,
    /// Median of a step.
    ms: f64,
    gflops: f64,
    gbytes: f64,
}

/// The operations of `program` by the time that the spans of the first tower show, the longest first.
pub(super) fn rows(program: &Program, spans: &[Span]) -> Vec<Row> {
    let mut times: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for span in spans.iter().filter(|span| span.lane == "tower_0") {
        times.entry(&span.name).or_default().push(span.took.as_secs_f64());
    }
    let row = |step: &crate::graph::Step| {
        let seconds = median(times.get(step.name.as_str())?);
        let rate = |amount: f64| amount / seconds.max(1e-9) / 1e9;
        Some(Row {
            name: step.name.clone(),
            op: step.op.name(),
            ms: 1e3 * seconds,
            gflops: rate(step.flops()),
            gbytes: rate(step.bytes()),
        })
    };
    let mut rows: Vec<Row> = program.steps.iter().filter_map(row).collect();
    let known = |name: &str| name == TOWER || program.steps.iter().any(|step| step.name == name);
    for (name, seconds) in times.iter().filter(|(name, _)| !known(name)) {
        let ms = 1e3 * median(seconds);
        rows.push(Row { name: (*name).to_owned(), op: "", ms, gflops: 0.0, gbytes: 0.0 });
    }
    rows.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    rows
}

/// For people: what takes less than a hundredth of the total is summed up.
pub(super) fn table(rows: &[Row], peaks: Option<Peaks>) -> String {
    let total: f64 = rows.iter().map(|row| row.ms).sum();
    let most = peaks.map_or_else(String::new, |peaks| {
        let handover = peaks.handover.map_or_else(String::new, |ns| {
            format!(", {ns:.0} ns until a core sees what another wrote")
        });
        format!(
            "at most {:.0} GFLOP/s in registers, {:.1} GB/s of copies{handover}\n",
            peaks.gflops, peaks.gbytes
        )
    });
    let of_most = if peaks.is_some() { "of most" } else { "" };
    let share = |rate: f64, most: Option<f64>| {
        most.map_or_else(String::new, |most| format!("{:.0}%", 100.0 * rate / most))
    };
    let mut text = format!(
        "{most}{:40} {:>9} {:>6} {:>9} {of_most:>7} {:>8} {of_most:>7}\n",
        "operation", "ms", "%", "GFLOP/s", "GB/s"
    );
    let (shown, rest): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| row.ms >= 0.01 * total);
    for Row { name, op, ms, gflops, gbytes } in shown {
        let name = if op.is_empty() || name.ends_with(op) {
            name.clone()
        } else {
            format!("{name} ({op})")
        };
        text += &format!(
            "{name:40} {ms:9.3} {:6.1} {gflops:9.1} {:>7} {gbytes:8.1} {:>7}\n",
            100.0 * ms / total,
            share(*gflops, peaks.map(|peaks| peaks.gflops)),
            share(*gbytes, peaks.map(|peaks| peaks.gbytes))
        );
    }
    let others: f64 = rest.iter().map(|row| row.ms).sum();
    text += &format!(
        "{:40} {others:9.3} {:6.1}\n",
        format!("{} others", rest.len()),
        100.0 * others / total
    );
    text + &format!("{:40} {total:9.3}  100.0\n", "all operations")
}

/// For programs.
pub(super) fn json(rows: &[Row], peaks: Option<Peaks>) -> Value {
    let row = |row: &Row| json!({"name": row.name, "op": row.op, "ms": row.ms, "gflops": row.gflops, "gbytes": row.gbytes});
    json!({
        "peak_gflops": peaks.map(|peaks| peaks.gflops), "peak_gbytes": peaks.map(|peaks| peaks.gbytes),
        "handover_ns": peaks.and_then(|peaks| peaks.handover),
        "operations": rows.iter().map(row).collect::<Vec<_>>(),
    })
}
