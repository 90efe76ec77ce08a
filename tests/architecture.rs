//! The house rules that a compiler does not check: layers, where things may be used, documentation.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Each module with those it may use; nobody uses its own layer or anything above.
const LAYERS: [(&str, &str); 18] = [
    (
        "cli",
        "train rpc session tower ps store reduce model data io device graph config optim cluster tensor util",
    ),
    (
        "train",
        "rpc session tower ps store reduce model data io device graph config optim cluster tensor util",
    ),
    ("rpc", "session ps tower store reduce data device graph optim cluster tensor util"),
    ("tower", "model data device cluster util"),
    ("session", "device graph io cluster tensor util"),
    ("ps", "store device graph optim tensor util"),
    ("store", "device graph optim tensor util"),
    ("reduce", "device util"),
    ("device", "graph optim cluster tensor util"),
    ("model", "graph tensor"),
    ("data", "io tensor util"),
    ("graph", "tensor cluster"),
    ("config", "cluster optim"),
    ("io", "tensor util"),
    ("tensor", "util"),
    ("cluster", ""),
    ("optim", ""),
    ("util", ""),
];

/// A file of more lines than this is a question; the answers so far stand here.
const LONG: usize = 450;

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(sources(&path)),
            false if path.extension().is_some_and(|e| e == "rs") => files.push(path),
            false => {}
        }
    }
    files.sort();
    files
}

/// Every file under `src`: its path from there and its text.
fn tree() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let name = |path: &Path| path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
    sources(&root).iter().map(|path| (name(path), fs::read_to_string(path).unwrap())).collect()
}

/// The code of a file without comments and without its tests.
fn code(text: &str) -> String {
    let product = text.split("#[cfg(test)]").next().unwrap();
    let no_comment = |line: &str| line.split("//").next().unwrap().to_owned();
    product.lines().map(no_comment).collect::<Vec<_>>().join("\n")
}

fn module(name: &str) -> &str {
    name.split(['/', '.']).next().unwrap()
}

#[test]
fn imports_run_downward() {
    let layers: BTreeMap<&str, Vec<&str>> =
        LAYERS.iter().map(|(m, uses)| (*m, uses.split(' ').collect())).collect();
    let mut faults = Vec::new();
    for (name, text) in tree() {
        let own = module(&name);
        if ["lib", "main"].contains(&own) {
            continue;
        }
        let allowed = layers.get(own).unwrap_or_else(|| panic!("{name}: no layer for {own}"));
        for (i, _) in code(&text).match_indices("crate::") {
            let code = code(&text);
            let used: String =
                code[i + 7..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if used != own
                && !allowed.contains(&used.as_str())
                && layers.contains_key(used.as_str())
            {
                faults.push(format!("{name} uses {used}"));
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
}

/// Asserts that none of `words` occurs outside the files that `home` accepts.
fn only_in(words: &[&str], home: impl Fn(&str) -> bool) {
    let mut faults = Vec::new();
    for (name, text) in tree() {
        let code = code(&text);
        let found = words.iter().filter(|word| code.contains(**word));
        faults.extend(found.filter(|_| !home(&name)).map(|word| format!("{name}: {word}")));
    }
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn cuda_stays_in_its_folder() {
    only_in(&["cudarc", "libloading"], |name| name.starts_with("device/cuda/"));
}

#[test]
fn the_network_stays_in_its_folder() {
    only_in(&["tokio::", "tonic::", ".await"], |name| name.starts_with("rpc/"));
}

#[test]
fn unsafe_code_stays_in_devices() {
    only_in(&["unsafe "], |name| name.starts_with("device/"));
}

#[test]
fn only_the_commands_print() {
    let words = ["println!", "print!(", "eprintln!", "stdout()", "stderr()"];
    only_in(&words, |name| name.starts_with("cli/"));
}

#[test]
fn one_place_knows_the_mode() {
    only_in(&["config.towers.asynchronous", "VariablePlacement::", "ClusterMode::"], |name| {
        ["train/strategy.rs", "train/duty.rs"].contains(&name) || name.starts_with("config/")
    });
}

#[test]
fn time_comes_from_the_clock() {
    // Time-outs of the network run on its own clock.
    only_in(&["Instant::now", "SystemTime::now"], |name| {
        name == "util/clock.rs" || name.starts_with("rpc/")
    });
}

#[test]
fn pure_modules_do_nothing_else() {
    let words = ["std::fs", "std::net::Tcp", "std::thread", "Mutex", "Clock"];
    let pure = ["graph/", "optim/", "cluster/", "data/sampler.rs", "ps/", "reduce/exchange.rs"];
    only_in(&words, |name| !pure.iter().any(|p| name.starts_with(p)));
}

#[test]
fn every_file_says_what_it_is_and_is_short() {
    for (name, text) in tree() {
        assert!(text.starts_with("//!"), "{name} does not start with a module comment");
        let lines = text.lines().count();
        assert!(lines <= LONG, "{name} has {lines} lines");
        for mark in ["TODO", "FIXME", "todo!(", "unimplemented!("] {
            assert!(!text.contains(mark), "{name}: {mark}");
        }
    }
}

#[test]
fn every_operation_has_a_kernel_and_a_case() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
    let (op, exec) = (read("src/graph/op.rs"), read("src/device/cpu/exec.rs"));
    let cuda = read("src/device/cuda/task.rs");
    let cases = read("tests/ops.rs") + &read("tests/support/cases.rs");
    let body = op.split("pub enum Op {").nth(1).unwrap().split("\n}\n").next().unwrap();
    let variants: Vec<&str> = body
        .lines()
        .filter(|line| {
            line.starts_with("    ") && line[4..].starts_with(|c: char| c.is_uppercase())
        })
        .map(|line| line.trim().split(['(', ' ', ',']).next().unwrap())
        .collect();
    assert!(variants.len() > 30, "{variants:?}");
    for variant in variants {
        let name = format!("Op::{variant}");
        assert!(exec.contains(&name), "{name} has no arm in device/cpu/exec.rs");
        assert!(cuda.contains(&name), "{name} has no task in device/cuda/task.rs");
        assert!(
            cases.contains(&name),
            "{name} has no case in tests/ops.rs or tests/support/cases.rs"
        );
    }
}

#[test]
fn every_configuration_resolves() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    let mut seen = 0;
    let seeds = fs::read_dir(dir.join("seeds")).unwrap();
    for entry in fs::read_dir(&dir).unwrap().chain(seeds) {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "yaml") {
            let text = fs::read_to_string(&path).unwrap();
            tftrain::config::Layers::new(None).file(&path, text).resolve().unwrap();
            seen += 1;
        }
    }
    assert!(seen >= 4, "{seen} files in configs");
}
