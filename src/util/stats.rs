//! Means, spreads and the units people read.

use std::time::Duration;

/// Mean, uncertainty of the mean and jitter of a series of speeds, by the rules of `tf_cnn_benchmarks`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Examples per second over the whole series: examples / mean step time.
    pub mean: f64,
    /// Population standard deviation of the steps' speeds over the root of their number.
    pub uncertainty: f64,
    /// 1.4826 times the median distance from the median speed.
    pub jitter: f64,
}

impl Speed {
    /// Of steps that each took one of `times` for `examples` examples. Zero for an empty series.
    pub fn of(times: &[Duration], examples: usize) -> Self {
        if times.is_empty() {
            return Self { mean: 0.0, uncertainty: 0.0, jitter: 0.0 };
        }
        let n = times.len() as f64;
        let seconds: Vec<f64> = times.iter().map(Duration::as_secs_f64).collect();
        let speeds: Vec<f64> = seconds.iter().map(|t| examples as f64 / t).collect();
        let mean_speed = speeds.iter().sum::<f64>() / n;
        let variance = speeds.iter().map(|s| (s - mean_speed).powi(2)).sum::<f64>() / n;
        let centre = median(&speeds);
        let distances: Vec<f64> = speeds.iter().map(|s| (s - centre).abs()).collect();
        Self {
            mean: examples as f64 / (seconds.iter().sum::<f64>() / n),
            uncertainty: variance.sqrt() / n.sqrt(),
            jitter: 1.4826 * median(&distances),
        }
    }
}

/// The middle value, or the mean of the two middle ones; zero for an empty slice.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => 0.0,
        _ if n % 2 == 1 => sorted[n / 2],
        _ => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// A byte count as people read it: `4.27 MB`.
pub fn bytes(n: u64) -> String {
    let (value, unit) = match n {
        0..1_000 => return format!("{n} B"),
        1_000..1_000_000 => (n as f64 / 1e3, "kB"),
        1_000_000..1_000_000_000 => (n as f64 / 1e6, "MB"),
        _ => (n as f64 / 1e9, "GB"),
    };
    format!("{value:.2} {unit}")
}

/// A count with thousands separated: `1,068,298`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_follows_the_benchmark_rules() {
        let times = [1.0, 2.0, 4.0].map(Duration::from_secs_f64);
        let speed = Speed::of(&times, 8);
        assert!((speed.mean - 8.0 / (7.0 / 3.0)).abs() < 1e-12);
        // Speeds 8, 4, 2: variance 56 / 9, median 4, distances 4, 0, 2.
        assert!((speed.uncertainty - (56.0f64 / 9.0).sqrt() / 3f64.sqrt()).abs() < 1e-12);
        assert!((speed.jitter - 1.4826 * 2.0).abs() < 1e-12);
    }

    #[test]
    fn units() {
        assert_eq!(bytes(4_273_192), "4.27 MB");
        assert_eq!(count(1_068_298), "1,068,298");
        assert_eq!(count(7), "7");
    }
}
