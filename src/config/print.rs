//! The resolved configuration as YAML, with where each value came from.

use serde_json::Value;

use super::key::Key;
use super::resolve::Resolved;
use super::tree::Tree;

/// The configuration as YAML in its fullest form, each value followed by its origin as a comment.
///
/// Read again as a file, the text gives the same [`super::RunConfig`].
pub fn run_yaml(resolved: &Resolved) -> String {
    let value = serde_json::to_value(&resolved.config).expect("the schema has only text keys");
    let mut out = String::new();
    write(&mut out, resolved, "", 0, &value);
    out
}

fn write(out: &mut String, resolved: &Resolved, prefix: &str, depth: usize, value: &Value) {
    let Value::Object(map) = value else { return };
    for (name, value) in map {
        let dotted = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        out.push_str(&"  ".repeat(depth));
        if value.is_object() && Key::find(&dotted).is_none() {
            out.push_str(&format!("{name}:\n"));
            write(out, resolved, &dotted, depth + 1, value);
            continue;
        }
        out.push_str(&format!("{name}: {}", scalar(value)));
        if let Some(origin) = resolved.origins.get(&dotted) {
            out.push_str(&format!("  # {}", one_line(&origin.to_string())));
        }
        out.push('\n');
    }
}

/// One value in YAML; lists and non-text scalars are the same in JSON.
fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) if is_plain(text) => text.clone(),
        Value::String(text) => quoted(text),
        other => other.to_string(),
    }
}

/// Whether `text` needs no quotes: simple characters that YAML would not take for a number or so.
fn is_plain(text: &str) -> bool {
    let simple = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '/' | '.' | '-');
    text.starts_with(|c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '/' | '.'))
        && text.chars().all(simple)
        && Tree::parse(text) == Ok(Tree::Leaf(text.into()))
}

/// Double quotes, with everything but printable ASCII escaped.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            ' '..='~' => out.push(c),
            _ => out.push_str(&format!("\\U{:08X}", u32::from(c))),
        }
    }
    out.push('"');
    out
}

/// A comment must stay on its line.
fn one_line(text: &str) -> String {
    let shows = |c: char| c.is_alphanumeric() || (' '..='~').contains(&c);
    text.chars().map(|c| if shows(c) { c } else { '?' }).collect()
}
