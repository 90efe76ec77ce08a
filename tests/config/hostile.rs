//! YAML that means harm: every text ends in an error or a configuration, quickly.

use proptest::prelude::*;
use tftrain::config::{ConfigError, Layers};

fn error(text: &str) -> ConfigError {
    Layers::new(None).file("a.yaml", text).resolve().expect_err("it is refused")
}

fn syntax(text: &str) -> String {
    match error(text) {
        error @ ConfigError::Syntax { .. } => error.to_string(),
        other => unreachable!("not a syntax error: {other}"),
    }
}

#[test]
fn deep_nesting_is_refused() {
    for text in [
        "[".repeat(100_000),
        "{a: ".repeat(100_000),
        format!("seed: {}1{}", "[".repeat(17), "]".repeat(17)),
        (0..1000).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect(),
    ] {
        assert!(syntax(&text).starts_with("a.yaml"));
    }
}

#[test]
fn the_billion_laughs_are_refused() {
    let mut text = "a0: &a0 [lol]\n".to_owned();
    for level in 1..30 {
        let previous = format!("*a{}, ", level - 1).repeat(9);
        text.push_str(&format!("a{level}: &a{level} [{previous}]\n"));
    }
    syntax(&text);
    syntax("a: &a [*a]\n");
    syntax("seed: *nothing\n");
}

#[test]
fn honest_anchors_work() {
    let layers = Layers::new(None).file("a.yaml", "data: {threads: &n 3}\ntowers: {cpus: *n}\n");
    assert_eq!(layers.resolve().unwrap().config.towers.count(), 3);
}

#[test]
fn malformed_yaml_names_its_line() {
    let cases = [
        ("seed: 1\nseed: 2\n", "2: duplicate mapping key `seed` is not allowed here"),
        ("data:\n\tname: cifar10\n", "2: tabs disallowed within this context (block indentation)"),
        ("seed: 1\n---\nseed: 2\n", "3: only single YAML document expected but multiple found"),
        ("seed: 'open\n", "1: unclosed quote"),
        ("seed: @\n", "1: unexpected character: `@'"),
        (
            "data: {dir: !!binary '/w=='}\n",
            "1: !!binary scalar is not valid UTF-8 so cannot be stored into string.",
        ),
    ];
    for (text, message) in cases {
        assert_eq!(syntax(text), format!("a.yaml:{message}"));
    }
}

#[test]
fn numbers_no_key_takes_are_refused() {
    let cases = [
        ("seed: 18446744073709551616\n", "1.8446744073709552e+19"),
        ("seed: -9223372036854775809\n", "-9.223372036854776e+18"),
        ("seed: .nan\n", "\".nan\""),
        ("seed: 1e3\n", "1000.0"),
    ];
    for (text, found) in cases {
        assert_eq!(
            error(text).to_string(),
            format!("a.yaml:1: `seed` must be a whole number of at least 0, not {found}")
        );
    }
    for (value, found) in
        [(".nan", ".nan"), (".inf", ".inf"), ("-.inf", "-.inf"), ("1e999", ".inf")]
    {
        assert_eq!(
            error(&format!("optimizer: {{clip: {value}}}\n")).to_string(),
            format!(
                "a.yaml:1: `optimizer.clip` must be a number above 0, or null, not \"{found}\""
            )
        );
    }
    let max = Layers::new(None).file("a.yaml", format!("seed: {}\n", u64::MAX));
    assert_eq!(max.resolve().unwrap().config.seed, u64::MAX);
    let digits = format!("seed: {}\n", "9".repeat(100_000));
    assert!(error(&digits).to_string().len() < 200);
}

#[test]
fn odd_keys_are_unknown_keys() {
    for text in ["1: 2\n", "null: 2\n", "? [a]\n: 2\n", "\"\\u0007\": 1\n", "'': 1\n", "<<: 1\n"] {
        let text = error(text).to_string();
        assert!(text.starts_with("a.yaml:1: "), "{text}");
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
    let long = format!("{}: 1\n", "k".repeat(900));
    assert!(error(&long).to_string().len() < 300);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn no_text_panics(text in "\\PC*") {
        let _ = Layers::new(None).file("a.yaml", text.clone()).set(text).resolve();
    }

    #[test]
    fn no_yaml_like_text_panics(
        text in "(model|data|optimizer|name|seed|[a-z]{1,3}|[0-9]{1,3}|[-:{}\\[\\],&*!|>'\"%@`#?~\t \n.]){0,40}"
    ) {
        if let Err(error) = Layers::new(None).file("a.yaml", text).resolve() {
            let is_control = error.to_string().chars().any(char::is_control);
            prop_assert!(!is_control, "{error:?}");
        }
    }
}
