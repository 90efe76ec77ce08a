//! [`Line`]: noisy points of a straight line, the smallest thing that can be learned.

use super::Source;
use crate::tensor::Shape;
use crate::util::rng::{Purpose, Stream};

/// Points of `y = 5 x + 8 + 0.22 z` with `x` uniform in `[-1, 1)` and `z` standard normal.
///
/// The feature is `x`, the label `y`.
pub struct Line {
    seed: u64,
    examples: usize,
}

impl Line {
    /// The line's slope.
    pub const SLOPE: f32 = 5.0;
    /// The line's value at `x = 0`.
    pub const INTERCEPT: f32 = 8.0;
    /// The standard deviation of the points around the line.
    pub const NOISE: f32 = 0.22;

    /// `examples` points.
    pub fn new(seed: u64, examples: usize) -> Self {
        Self { seed, examples }
    }
}

impl Source for Line {
    fn name(&self) -> &str {
        "line"
    }

    fn len(&self) -> usize {
        self.examples
    }

    fn feature_shape(&self) -> Shape {
        [1].into()
    }

    fn write(&self, _epoch: u64, index: usize, features: &mut [f32]) -> f32 {
        let mut stream = Stream::new(self.seed, Purpose::Synthetic, index as u64);
        let x = stream.range(-1.0, 1.0);
        features[0] = x;
        Self::SLOPE * x + Self::INTERCEPT + Self::NOISE * stream.normal()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_squares_finds_the_line() {
        let line = Line::new(3, 20_000);
        let points: Vec<(f64, f64)> = (0..line.len())
            .map(|i| {
                let mut x = [0.0];
                let y = line.write(0, i, &mut x);
                (f64::from(x[0]), f64::from(y))
            })
            .collect();
        assert!(points.iter().all(|(x, _)| (-1.0..1.0).contains(x)));
        let n = points.len() as f64;
        let mean_x = points.iter().map(|p| p.0).sum::<f64>() / n;
        let mean_y = points.iter().map(|p| p.1).sum::<f64>() / n;
        let sxx = points.iter().map(|p| (p.0 - mean_x).powi(2)).sum::<f64>();
        let sxy = points.iter().map(|p| (p.0 - mean_x) * (p.1 - mean_y)).sum::<f64>();
        let slope = sxy / sxx;
        let intercept = mean_y - slope * mean_x;
        let noise = points.iter().map(|p| (p.1 - slope * p.0 - intercept).powi(2)).sum::<f64>() / n;
        assert!((slope - 5.0).abs() < 0.02, "{slope}");
        assert!((intercept - 8.0).abs() < 0.01, "{intercept}");
        assert!((noise.sqrt() - 0.22).abs() < 0.005, "{noise}");
    }

    #[test]
    fn points_depend_on_seed_and_index_only() {
        let write = |seed, epoch, index| {
            let mut x = [0.0];
            let y = Line::new(seed, 10).write(epoch, index, &mut x);
            (x[0], y)
        };
        assert_eq!(write(1, 0, 4), write(1, 9, 4));
        assert_ne!(write(1, 0, 4), write(2, 0, 4));
        assert_ne!(write(1, 0, 4), write(1, 0, 5));
    }
}
