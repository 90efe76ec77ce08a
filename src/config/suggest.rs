//! "Did you mean" hints.

/// Names less alike than this (Jaro-Winkler, 0 to 1) are not worth proposing.
const ALIKE: f64 = 0.78;

/// Longest piece of user text repeated in a message, in characters.
const SHOWN: usize = 60;

/// The known name nearest to `found`, if one is near.
pub(crate) fn nearest<'a>(found: &str, known: &[&'a str]) -> Option<&'a str> {
    let found = found.to_lowercase();
    known
        .iter()
        .map(|&name| (strsim::jaro_winkler(&found, name), name))
        .filter(|(score, _)| *score >= ALIKE)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

/// "did you mean `x`? (known: …)" for a misspelt choice.
pub(crate) fn choice_help(found: &str, known: &[&str]) -> String {
    let all = known.join(", ");
    match nearest(found, known) {
        Some(name) => format!("did you mean `{name}`? (known: {all})"),
        None => format!("known: {all}"),
    }
}

/// User text made safe for one line of a message.
pub(crate) fn shown(text: &str) -> String {
    cut(text, SHOWN)
}

/// Text on one line: control characters escaped, at most `longest` characters of it.
pub(crate) fn cut(text: &str, longest: usize) -> String {
    let mut out = String::new();
    for (count, c) in text.chars().enumerate() {
        if count == longest {
            out.push('…');
            break;
        }
        match c.is_control() {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_proposed_and_far_ones_are_not() {
        let known = ["batch_size", "threads", "dir"];
        assert_eq!(nearest("batchsize", &known), Some("batch_size"));
        assert_eq!(nearest("Thread", &known), Some("threads"));
        assert_eq!(nearest("zebra", &known), None);
        assert_eq!(nearest("", &known), None);
    }

    #[test]
    fn shown_text_is_short_and_printable() {
        assert_eq!(shown("a\nb\u{7}"), "a\\nb\\u{7}");
        assert_eq!(shown(&"x".repeat(1000)).chars().count(), SHOWN + 1);
    }
}
