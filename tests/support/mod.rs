//! What several test binaries share: closed-form inputs and the comparison with recorded digests.

#![allow(dead_code, reason = "each test binary uses its own part")]

pub(crate) mod cases;
pub(crate) mod reference;
pub(crate) mod sessions;

use serde_json::Value;

/// `scale * sqrt(3) * (2 u - 1)` with `u` from splitmix64 of `i + (k << 32)`, rounded to f32: the inputs of the golden values.
pub(crate) fn wave(len: usize, k: u64, scale: f64) -> Vec<f32> {
    let mix = |i: u64| {
        let mut z = i.wrapping_add(k << 32).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    (0..len as u64)
        .map(|i| {
            (scale * 3f64.sqrt() * (2.0 * ((mix(i) >> 11) as f64 / 2f64.powi(53)) - 1.0)) as f32
        })
        .collect()
}

/// A golden file of `tests/golden`.
pub(crate) fn golden(name: &str) -> Value {
    let path = format!("tests/golden/{name}");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The numbers of a JSON array.
pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// The extents in a JSON array.
pub(crate) fn extents(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect()
}

/// Compares with a recorded digest: size, norm, largest value, sum and samples, relative to the tensor's scale.
pub(crate) fn assert_digest(what: &str, got: &[f32], digest: &Value, tolerance: f64) {
    assert_eq!(got.len() as u64, digest["size"].as_u64().unwrap(), "{what}: size");
    let field = |name: &str| digest[name].as_f64().unwrap();
    let (l2, largest) = (field("l2"), field("abs_max"));
    let close = |name: &str, got: f64, expected: f64, scale: f64| {
        let error = (got - expected).abs() / scale.max(1e-30);
        assert!(error <= tolerance, "{what}: {name} is {got}, expected {expected} ({error:.1e})");
    };
    let squares: f64 = got.iter().map(|&v| f64::from(v).powi(2)).sum();
    close("l2", squares.sqrt(), l2, l2);
    close(
        "abs_max",
        got.iter().fold(0.0, |m, &v| f64::max(m, f64::from(v).abs())),
        largest,
        largest,
    );
    let sum: f64 = got.iter().map(|&v| f64::from(v)).sum();
    close("sum", sum, field("sum"), l2 * (got.len() as f64).sqrt());
    for (at, expected) in extents(&digest["at"]).into_iter().zip(numbers(&digest["values"])) {
        close(&format!("[{at}]"), f64::from(got[at]), expected, largest);
    }
}
