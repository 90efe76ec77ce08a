//! [`Histogram`]: values counted in TensorFlow's buckets.

use std::sync::LazyLock;

/// Values counted in buckets. Values that are not finite are left out of everything.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// The least value; 0 where there is none.
    pub min: f64,
    /// The greatest value; 0 where there is none.
    pub max: f64,
    /// The number of values.
    pub num: f64,
    /// Their sum.
    pub sum: f64,
    /// The sum of their squares.
    pub sum_squares: f64,
    /// `(limit, count)`, ascending: `count` values lie below `limit` and not below the limit before.
    pub buckets: Vec<(f64, f64)>,
}

impl Histogram {
    /// Counts `values`. Runs of empty buckets are merged into one, as TensorFlow does.
    pub fn of(values: &[f32]) -> Self {
        let table = &*TABLE;
        let mut counts = vec![0u64; table.limits.len()];
        let (mut min, mut max) = (f32::INFINITY, f32::NEG_INFINITY);
        let (mut num, mut sum, mut sum_squares) = (0u64, 0.0, 0.0);
        for &value in values.iter().filter(|value| value.is_finite()) {
            counts[table.bucket(value)] += 1;
            min = min.min(value);
            max = max.max(value);
            num += 1;
            sum += f64::from(value);
            sum_squares += f64::from(value) * f64::from(value);
        }
        if num == 0 {
            // One bucket, so that readers find a list.
            return Self { buckets: vec![(f64::MAX, 0.0)], ..Self::default() };
        }
        let buckets = merge_empty(&table.limits, &counts);
        let (min, max) = (f64::from(min), f64::from(max));
        Self { min, max, num: num as f64, sum, sum_squares, buckets }
    }
}

/// Of each run of empty buckets only the last limit is kept.
fn merge_empty(limits: &[f64], counts: &[u64]) -> Vec<(f64, f64)> {
    let mut buckets: Vec<(f64, f64)> = Vec::new();
    for (&limit, &count) in limits.iter().zip(counts) {
        match buckets.last_mut() {
            Some(last) if count == 0 && last.1 == 0.0 => last.0 = limit,
            _ => buckets.push((limit, count as f64)),
        }
    }
    buckets
}

/// The bits of an `f32` that choose a cell: sign, exponent and five bits of the mantissa. A cell
/// spans a factor of at most 33 / 32, less than the 1.1 between limits, so at most one limit is inside.
const CELL_SHIFT: u32 = 18;

/// The limits, and for each cell of `f32` the bucket of its least value.
struct Table {
    limits: Vec<f64>,
    cells: Vec<u16>,
}

static TABLE: LazyLock<Table> = LazyLock::new(Table::new);

impl Table {
    fn new() -> Self {
        // From 1e-12 up by a tenth each while below 1e20, then everything; mirrored about 0.
        let mut positive: Vec<f64> = std::iter::successors(Some(1e-12), |v| Some(v * 1.1))
            .take_while(|&v| v < 1e20)
            .collect();
        positive.push(f64::MAX);
        let mut limits: Vec<f64> = positive.iter().rev().map(|v| -v).collect();
        limits.push(0.0);
        limits.extend(positive);
        let cells = (0..1u32 << (32 - CELL_SHIFT))
            .map(|cell| {
                let first = f32::from_bits(cell << CELL_SHIFT);
                let last = f32::from_bits((cell + 1).wrapping_shl(CELL_SHIFT).wrapping_sub(1));
                let least = f64::from(if first.is_sign_negative() { last } else { first });
                // The cells of infinity and NaN are never asked for.
                let bucket = limits.partition_point(|&limit| limit <= least);
                bucket.min(limits.len() - 1) as u16
            })
            .collect();
        Self { limits, cells }
    }

    /// The first bucket whose limit lies above the finite `value`.
    fn bucket(&self, value: f32) -> usize {
        let bucket = usize::from(self.cells[(value.to_bits() >> CELL_SHIFT) as usize]);
        bucket + usize::from(f64::from(value) >= self.limits[bucket])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn naive(value: f32) -> usize {
        TABLE.limits.partition_point(|&limit| limit <= f64::from(value))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_table_agrees_with_a_search(bits: u32) {
            let value = f32::from_bits(bits);
            if value.is_finite() {
                prop_assert_eq!(TABLE.bucket(value), naive(value));
            }
        }
    }

    proptest! {
        #[test]
        fn every_finite_value_is_counted_once(values in prop::collection::vec(any::<f32>(), 0..300), extra in 0usize..3) {
            let finite = values.iter().filter(|v| v.is_finite()).count();
            let mut all = values;
            all.extend([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].iter().take(extra));
            let histogram = Histogram::of(&all);
            let total: f64 = histogram.buckets.iter().map(|b| b.1).sum();
            prop_assert_eq!(total, finite as f64);
            prop_assert_eq!(histogram.num, finite as f64);
            prop_assert!(histogram.min.is_finite() && histogram.max.is_finite());
            prop_assert!(histogram.buckets.is_sorted_by(|a, b| a.0 < b.0));
            prop_assert!(!histogram.buckets.windows(2).any(|w| w[0].1 == 0.0 && w[1].1 == 0.0));
        }
    }

    #[test]
    fn the_table_agrees_at_limits_and_extremes() {
        let near = |limit: f64| {
            let value = limit as f32;
            [value, value.next_up(), value.next_down()]
        };
        let tiny = f32::from_bits(1);
        let extremes = [0.0, -0.0, tiny, -tiny, f32::MAX, f32::MIN, 1e-12, -1e-12, 1e20, -1e20];
        let values = TABLE.limits.iter().flat_map(|&limit| near(limit)).chain(extremes);
        for value in values.filter(|v| v.is_finite()) {
            assert_eq!(TABLE.bucket(value), naive(value), "{value:e}");
        }
    }

    #[test]
    fn limits_are_tensorflows() {
        // 774 powers below 1e20 and the greatest double on each side, and zero.
        assert_eq!(TABLE.limits.len(), 2 * 775 + 1);
        assert!(TABLE.limits.is_sorted());
        assert_eq!(TABLE.limits[775..778], [0.0, 1e-12, 1e-12 * 1.1]);
        assert_eq!(TABLE.limits[0], f64::MIN);
    }

    #[test]
    fn a_small_one_by_hand() {
        let histogram = Histogram::of(&[0.0, 0.0, 1.0, f32::NAN, -2.0]);
        assert_eq!((histogram.min, histogram.max, histogram.num), (-2.0, 1.0, 4.0));
        assert_eq!((histogram.sum, histogram.sum_squares), (-1.0, 5.0));
        let counts: Vec<f64> = histogram.buckets.iter().map(|b| b.1).collect();
        // Merged empties, -2, empties, the zeros, empties, 1, empties.
        assert_eq!(counts, [0.0, 1.0, 0.0, 2.0, 0.0, 1.0, 0.0]);
        assert_eq!(histogram.buckets[3].0, 1e-12);
        assert_eq!(histogram.buckets[6].0, f64::MAX);
    }

    #[test]
    fn nothing_to_count() {
        for values in [&[][..], &[f32::NAN, f32::INFINITY]] {
            let histogram = Histogram::of(values);
            assert_eq!(histogram.buckets, [(f64::MAX, 0.0)]);
            assert_eq!((histogram.num, histogram.min, histogram.max), (0.0, 0.0, 0.0));
        }
    }
}
