//! The all-reduce specification of TensorFlow's benchmarks, in the words of this configuration.
//!
//! `alg[#shards][/alg[#shards]]`, and several of them for gradients of up to a size each: `pscpu:2k:xring`. The part before the slash is
//! for the GPUs of a worker, the one behind for the workers.

use serde_json::{Value, json};

/// What is understood, for messages.
const KNOWN: &str = "nccl, pscpu, xring, nccl/pscpu, nccl/xring";

/// The settings that a specification stands for: dotted keys and their values.
///
/// Shards are read and change nothing: gradients are one vector here, which is cut by bytes. For the same reason all ranges of sizes
/// must name the same way.
///
/// # Errors
/// What is wrong with it, and what is understood.
pub fn all_reduce_spec(text: &str) -> Result<Vec<(&'static str, Value)>, String> {
    let parts: Vec<&str> = text.split(':').collect();
    if parts.len().is_multiple_of(2) {
        return Err(format!("{text:?} is not well formed: sizes stand between two ways"));
    }
    for size in parts.iter().skip(1).step_by(2) {
        let digits = size.strip_suffix(['K', 'k', 'M', 'G', 'T']).unwrap_or(size);
        positive(digits).ok_or_else(|| format!("{size:?} is no size; write 2k or 64M"))?;
    }
    let ways: Vec<String> =
        parts.iter().step_by(2).map(|way| way_of(way)).collect::<Result<_, _>>()?;
    let way = ways[0].as_str();
    if let Some(other) = ways.iter().find(|other| *other != way) {
        return Err(format!(
            "{way} for some gradients and {other} for others: all of them are one vector here, so give one way"
        ));
    }
    let (reduce, engine, exchange) = match way {
        "nccl" => ("nccl", "auto", "direct"),
        "pscpu" => ("cpu", "grpc", "direct"),
        "xring" => ("cpu", "grpc", "ring"),
        "nccl/pscpu" => ("nccl", "grpc", "direct"),
        "nccl/xring" => ("nccl", "grpc", "ring"),
        _ => return Err(format!("{way:?} is not among the ways to reduce: {KNOWN}")),
    };
    Ok(vec![
        ("reduce", json!(reduce)),
        ("cluster.engine", json!(engine)),
        ("cluster.exchange", json!(exchange)),
    ])
}

/// A way without its shards.
fn way_of(text: &str) -> Result<String, String> {
    let name = |part: &str| match part.split_once('#') {
        None => Ok(part.to_owned()),
        Some((name, shards)) => match positive(shards) {
            Some(_) => Ok(name.to_owned()),
            None => Err(format!("{shards:?} is no number of shards in {text:?}")),
        },
    };
    let names: Vec<String> = text.split('/').map(name).collect::<Result<_, _>>()?;
    Ok(names.join("/"))
}

fn positive(digits: &str) -> Option<u64> {
    digits.parse().ok().filter(|n| *n > 0 && digits.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_becomes_settings() {
        for (text, expected) in [
            ("nccl", ["nccl", "auto", "direct"]),
            ("xring#2", ["cpu", "grpc", "ring"]),
            ("pscpu#4", ["cpu", "grpc", "direct"]),
            ("nccl/xring", ["nccl", "grpc", "ring"]),
            ("nccl/pscpu#2", ["nccl", "grpc", "direct"]),
            ("xring:2k:xring#2:64M:xring", ["cpu", "grpc", "ring"]),
        ] {
            let values: Vec<Value> =
                all_reduce_spec(text).unwrap().into_iter().map(|(_, value)| value).collect();
            assert_eq!(values, expected, "{text}");
        }
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (text, words) in [
            ("", "\"\" is not among the ways to reduce: nccl, pscpu,"),
            ("psgpu#4", "\"psgpu\" is not among"),
            ("nccl/rechd", "\"nccl/rechd\" is not among"),
            ("nccl:2k", "not well formed"),
            ("nccl:-1:nccl", "\"-1\" is no size"),
            ("nccl:k:nccl", "\"k\" is no size"),
            ("xring#0", "\"0\" is no number of shards"),
            ("pscpu:2k:xring", "pscpu for some gradients and xring for others"),
        ] {
            let error = all_reduce_spec(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
