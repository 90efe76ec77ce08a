//! [`assign`]: which ps task holds which ranges of the slab.

use std::ops::Range;

use crate::graph::{VarRow, VarTable};

/// Splits lie at multiples of this many floats from a variable's start: a cache line.
const ALIGN: usize = 16;

/// Bytes of the global step. As in TensorFlow it is created first, so it takes the first turn, on ps 0.
const GLOBAL_STEP_BYTES: usize = 8;

/// How variables are spread over ps tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// In turn, in the order of creation, after the global step. TensorFlow's `replica_device_setter`.
    RoundRobin,
    /// Each whole variable, in the order of creation, to the task with the fewest bytes so far, the first of equals.
    /// TensorFlow's `GreedyLoadBalancingStrategy` with bytes as the load.
    Greedy,
    /// The same number of floats to each; variables are split where that falls. Loads differ by 32 floats at most,
    /// below 1 % for any model that is worth more than one ps.
    #[default]
    Even,
}

/// The slab ranges of each ps task: ascending, disjoint, one for each variable or piece of one, all variables covered.
///
/// A function of its arguments alone, so every process finds the same one. Gaps of the layout belong to nobody, nor
/// does anything where `n_ps` is 0.
pub fn assign(table: &VarTable, n_ps: usize, placement: Placement) -> Vec<Vec<Range<usize>>> {
    let mut tasks = vec![Vec::new(); n_ps];
    if n_ps == 0 {
        return tasks;
    }
    match placement {
        Placement::RoundRobin => {
            for (turn, row) in (1..).zip(table.placed()) {
                tasks[turn % n_ps].push(row.range());
            }
        }
        Placement::Greedy => {
            let mut bytes = vec![0; n_ps];
            bytes[0] = GLOBAL_STEP_BYTES;
            for row in table.placed() {
                let (least, load) =
                    bytes.iter_mut().enumerate().min_by_key(|(_, b)| **b).expect("n_ps is not 0");
                *load += row.range().len() * size_of::<f32>();
                tasks[least].push(row.range());
            }
        }
        Placement::Even => even(table.placed(), table.floats(), &mut tasks),
    }
    for ranges in &mut tasks {
        ranges.retain(|range| !range.is_empty());
    }
    tasks
}

/// Fills one task after the other, each up to its share of the total, to the nearest place where one may cut; the last
/// takes the rest.
fn even<'a>(rows: impl Iterator<Item = &'a VarRow>, total: usize, tasks: &mut [Vec<Range<usize>>]) {
    let n = tasks.len();
    let (mut task, mut placed) = (0, 0);
    for row in rows {
        let mut range = row.range();
        while !range.is_empty() {
            let taken = if task + 1 == n {
                range.len()
            } else {
                let wanted = (total * (task + 1) / n).saturating_sub(placed);
                ((wanted + ALIGN / 2) / ALIGN * ALIGN).min(range.len())
            };
            tasks[task].push(range.start..range.start + taken);
            range.start += taken;
            placed += taken;
            if !range.is_empty() {
                task += 1;
            }
        }
    }
}

/// Bytes of the variables on each ps task, and on the first the global step's.
pub fn bytes_per_ps(tasks: &[Vec<Range<usize>>]) -> Vec<usize> {
    let floats = |ranges: &Vec<Range<usize>>| ranges.iter().map(Range::len).sum::<usize>();
    let mut bytes: Vec<usize> = tasks.iter().map(|t| floats(t) * size_of::<f32>()).collect();
    if let Some(first) = bytes.first_mut() {
        *first += GLOBAL_STEP_BYTES;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, Graph, Init};
    use crate::tensor::Shape;
    use proptest::prelude::*;

    const PLACEMENTS: [Placement; 3] = [Placement::RoundRobin, Placement::Greedy, Placement::Even];

    fn table(shapes: impl IntoIterator<Item = Shape>) -> VarTable {
        let mut graph = Graph::default();
        for (i, shape) in shapes.into_iter().enumerate() {
            Builder::new(&mut graph).variable(&i.to_string(), shape, Init::Constant(0.0)).unwrap();
        }
        graph.table().clone()
    }

    /// The tutorial's network for CIFAR-10: pairs of weights and biases.
    fn tutorial() -> VarTable {
        table([
            [5, 5, 3, 64].into(),
            [64].into(),
            [5, 5, 64, 64].into(),
            [64].into(),
            [2304, 384].into(),
            [384].into(),
            [384, 192].into(),
            [192].into(),
            [192, 10].into(),
            [10].into(),
        ])
    }

    #[test]
    fn the_tutorial_is_placed_as_tensorflow_places_it() {
        let bytes = |n, placement| bytes_per_ps(&assign(&tutorial(), n, placement));
        assert_eq!(bytes(2, Placement::RoundRobin), [2_864, 4_270_336]);
        assert_eq!(bytes(2, Placement::Greedy), [714_800, 3_558_400]);
        assert_eq!(bytes(3, Placement::RoundRobin), [418_824, 314_408, 3_539_968]);
        assert_eq!(bytes(3, Placement::Greedy), [409_608, 324_136, 3_539_456]);
        assert_eq!(bytes(4, Placement::RoundRobin), [1_032, 3_565_824, 1_832, 704_512]);
        assert_eq!(bytes(4, Placement::Greedy), [296_712, 27_688, 3_539_200, 409_600]);
        for n in 1..=16 {
            let even = bytes(n, Placement::Even);
            let (most, least) = (even.iter().max().unwrap(), even.iter().min().unwrap());
            assert!((most - least) * 100 < *least, "{even:?}");
        }
    }

    #[test]
    fn no_tasks_hold_nothing() {
        for placement in PLACEMENTS {
            assert!(assign(&tutorial(), 0, placement).is_empty());
        }
    }

    proptest! {
        #[test]
        fn every_float_has_one_home(
            lengths in prop::collection::vec(0usize..300, 0..12),
            n in 1usize..9,
        ) {
            let table = table(lengths.iter().map(|&len| Shape::from([len])));
            for placement in PLACEMENTS {
                let tasks = assign(&table, n, placement);
                prop_assert_eq!(tasks.len(), n);
                let mut homes = vec![0; table.slab_len()];
                for ranges in &tasks {
                    prop_assert!(ranges.iter().all(|r| !r.is_empty()));
                    prop_assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start));
                    ranges.iter().cloned().flatten().for_each(|at| homes[at] += 1);
                }
                let mut expected = vec![0; table.slab_len()];
                table.rows().iter().flat_map(VarRow::range).for_each(|at| expected[at] = 1);
                prop_assert_eq!(homes, expected);
                if placement == Placement::Even {
                    let floats = tasks.iter().map(|t| t.iter().map(Range::len).sum::<usize>());
                    let (least, most) = (floats.clone().min().unwrap(), floats.max().unwrap());
                    prop_assert!(most - least <= 33, "{least} to {most}");
                    prop_assert!(tasks.iter().flatten().all(|r| r.start % ALIGN == 0));
                }
            }
        }
    }
}
