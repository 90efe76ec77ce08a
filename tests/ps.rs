//! Runs the scripts of `tests/data/ps` against the accumulator.
//!
//! A script begins with comments that say what it shows, then one line `workers N aggregate N [min N] [step N]`
//! (without `min` a round waits for the dead). After that a line `> event` is told to the accumulator, and the lines
//! up to the next one are the effects it must answer with, in their order. Events:
//!
//! ```text
//! > offer WORKER at STEP of EXAMPLES
//! > join WORKER      > leave WORKER      > finish WORKER      > reset to STEP
//! > tallies          answers `WORKER: N applied, N stale` for each worker
//! ```

use std::path::Path;

use tftrain::ps::{Accumulator, Effect, Rounds, WhenShort};

fn number(word: &str) -> u64 {
    word.parse().unwrap_or_else(|_| panic!("`{word}` is no number"))
}

fn start(line: &str) -> Accumulator {
    let words: Vec<&str> = line.split_whitespace().collect();
    let find = |key| words.iter().position(|word| *word == key).map(|i| number(words[i + 1]));
    let when_short =
        find("min").map_or(WhenShort::Wait, |min| WhenShort::GoOn { min: min as usize });
    let need = |key| find(key).unwrap_or_else(|| panic!("no `{key}` in `{line}`")) as usize;
    let rounds = Rounds { workers: need("workers"), aggregate: need("aggregate"), when_short };
    Accumulator::new(rounds, find("step").unwrap_or(0))
}

fn answer(accumulator: &mut Accumulator, event: &str) -> Vec<String> {
    let words: Vec<&str> = event.split_whitespace().collect();
    let worker = |word: &str| number(word) as usize;
    let effects: Vec<Effect> = match words[..] {
        ["offer", from, "at", step, "of", examples] => {
            accumulator.offer(worker(from), number(step), number(examples))
        }
        ["join", who] => accumulator.join(worker(who)),
        ["leave", who] => accumulator.leave(worker(who)),
        ["finish", who] => accumulator.finish(worker(who)),
        ["reset", "to", step] => accumulator.reset(number(step)),
        ["tallies"] => {
            let line = |(worker, tally): (usize, tftrain::ps::Tally)| {
                format!("{worker}: {} applied, {} stale", tally.applied, tally.stale)
            };
            return accumulator.tallies().enumerate().map(line).collect();
        }
        _ => panic!("unknown event `{event}`"),
    };
    effects.iter().map(Effect::to_string).collect()
}

fn run(name: &str, script: &str) {
    let lines = script.lines().enumerate().map(|(i, line)| (i + 1, line.trim()));
    let mut lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).peekable();
    let (_, first) = lines.next().unwrap_or_else(|| panic!("{name} is empty"));
    let mut accumulator = start(first);
    while let Some((at, line)) = lines.next() {
        let event = line.strip_prefix("> ");
        let event = event.unwrap_or_else(|| panic!("{name}:{at}: expected an event: {line}"));
        let mut expected = Vec::new();
        while let Some((_, effect)) = lines.next_if(|(_, line)| !line.starts_with('>')) {
            expected.push(effect.to_owned());
        }
        assert_eq!(answer(&mut accumulator, event), expected, "{name}:{at}: {event}");
    }
}

#[test]
fn scripts() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/ps");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let script = std::fs::read_to_string(&path).unwrap();
        assert!(script.starts_with("# "), "{name} must begin by saying what it shows");
        run(&name, &script);
        count += 1;
    }
    assert!(count >= 10, "only {count} scripts found");
}
