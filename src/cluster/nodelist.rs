//! Slurm's compressed lists: hosts `n[1-3,7],m2` and tasks per node `2(x3),1`.

/// More hosts than this is a mistake, or an attack on memory.
const MOST_HOSTS: usize = 65_536;

/// The hosts of a Slurm node list in its order: `n[08-10],m2` is n08, n09, n10, m2. Several
/// brackets in a name multiply, the last running fastest. The error says what is wrong.
pub fn expand_nodelist(text: &str) -> Result<Vec<String>, String> {
    let mut hosts = Vec::new();
    for item in split_outside_brackets(text) {
        hosts.extend(expand_name(item)?);
        if hosts.len() > MOST_HOSTS {
            return Err(too_many());
        }
    }
    Ok(hosts)
}

/// Tasks on each node of Slurm's `2(x3),1`: 2, 2, 2, 1. Nothing if malformed.
pub(crate) fn expand_counts(text: &str) -> Option<Vec<u32>> {
    let mut counts = Vec::new();
    for item in text.split(',') {
        let (count, times) = match item.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (item, 1),
        };
        if times > MOST_HOSTS || counts.len() > MOST_HOSTS {
            return None;
        }
        counts.extend(std::iter::repeat_n(count.parse::<u32>().ok()?, times));
    }
    Some(counts)
}

fn too_many() -> String {
    format!("names more than {MOST_HOSTS} hosts")
}

fn split_outside_brackets(text: &str) -> impl Iterator<Item = &str> {
    let mut inside = false;
    text.split(move |c| {
        inside = if inside { c != ']' } else { c == '[' };
        c == ',' && !inside
    })
}

fn expand_name(item: &str) -> Result<Vec<String>, String> {
    if item.is_empty() {
        return Err("has an empty host name".to_owned());
    }
    let (mut hosts, mut rest) = (vec![String::new()], item);
    while let Some((prefix, tail)) = rest.split_once('[') {
        let (ranges, tail) =
            tail.split_once(']').ok_or_else(|| format!("has no ']' in '{item}'"))?;
        let mut numbers = Vec::new();
        for range in ranges.split(',') {
            numbers.extend(expand_range(range)?);
            if hosts.len() * numbers.len() > MOST_HOSTS {
                return Err(too_many());
            }
        }
        let with = |host: String| {
            numbers.iter().map(move |n| format!("{host}{prefix}{n}")).collect::<Vec<_>>()
        };
        hosts = hosts.into_iter().flat_map(with).collect();
        rest = tail;
    }
    if rest.contains(']') {
        return Err(format!("has no '[' in '{item}'"));
    }
    Ok(hosts.into_iter().map(|host| host + rest).collect())
}

/// `08-10` is 08, 09, 10: as wide as the first number is written.
fn expand_range(range: &str) -> Result<Vec<String>, String> {
    let number = |text: &str| {
        let digits = text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse::<u32>().ok()).flatten()
    };
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let width = first.len();
    match (number(first), number(last)) {
        (Some(first), Some(last)) if last < first => {
            Err(format!("has the range '{range}' reversed"))
        }
        (Some(first), Some(last)) if (last - first) as usize >= MOST_HOSTS => Err(too_many()),
        (Some(first), Some(last)) => Ok((first..=last).map(|n| format!("{n:0width$}")).collect()),
        _ => Err(format!("has a bad range '{range}'")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn expands_as_scontrol_does() {
        for (text, want) in [
            ("n[1-3,7],m2", "n1 n2 n3 n7 m2"),
            ("localhost", "localhost"),
            ("n[08-10].lan", "n08 n09 n10.lan".replace(' ', ".lan ").as_str()),
            ("r[0-1]n[2,4]", "r0n2 r0n4 r1n2 r1n4"),
        ] {
            assert_eq!(expand_nodelist(text).unwrap().join(" "), want);
        }
        assert_eq!(expand_counts("2(x3),1"), Some(vec![2, 2, 2, 1]));
    }

    #[test]
    fn refuses_hostile_lists() {
        for (text, why) in [
            ("", "has an empty host name"),
            ("a,,b", "has an empty host name"),
            ("n[1-3", "has no ']' in 'n[1-3'"),
            ("n1-3]", "has no '[' in 'n1-3]'"),
            ("n[3-1]", "has the range '3-1' reversed"),
            ("n[]", "has a bad range ''"),
            ("n[1-x]", "has a bad range '1-x'"),
            ("n[[1]]", "has a bad range '[1'"),
            ("n[0-4294967295]", "names more than 65536 hosts"),
            ("n[0-999]m[0-999]", "names more than 65536 hosts"),
        ] {
            assert_eq!(expand_nodelist(text), Err(why.to_owned()), "{text}");
        }
        for bad in ["", "x", "2(x", "2(x99999999)", "2(x3", "-1"] {
            assert_eq!(expand_counts(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn undoes_compression(
            groups in prop::collection::vec(
                ("[a-z]{1,4}", prop::collection::vec((0u32..500, 0u32..5), 1..4)), 1..4),
        ) {
            let (mut items, mut want) = (Vec::new(), Vec::new());
            for (prefix, ranges) in groups {
                let text: Vec<_> =
                    ranges.iter().map(|(at, n)| format!("{at:03}-{:03}", at + n)).collect();
                items.push(format!("{prefix}[{}]", text.join(",")));
                let numbers = ranges.iter().flat_map(|&(at, n)| at..=at + n);
                want.extend(numbers.map(|n| format!("{prefix}{n:03}")));
            }
            prop_assert_eq!(expand_nodelist(&items.join(",")).unwrap(), want);
        }

        #[test]
        fn never_panics(text in "[n0-9,\\[\\]x()-]{0,16}") {
            let _ = (expand_nodelist(&text), expand_counts(&text));
        }
    }
}
