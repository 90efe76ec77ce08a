//! Parameter servers against one process: the same gradients, the same bits.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;

use tftrain::device::{Device, Slab, cpu::CpuDevice};
use tftrain::graph::{Builder, Graph, Init, Role, VarTable};
use tftrain::optim::{Curve, Schedule, UpdateRule};
use tftrain::ps::{Accumulator, Mode, Placement, Rounds, Shard, WhenShort, assign};
use tftrain::reduce::{CpuMean, GradientReducer};
use tftrain::store::{Contribution, LocalStore, StoreSettings, VariableStore};
use tftrain::util::rng::{Purpose, Stream};

fn table() -> Arc<VarTable> {
    let mut graph = Graph::default();
    let mut builder = Builder::evaluating(&mut graph);
    for (name, len) in [("a", 700), ("b", 10), ("c", 333), ("d", 1)] {
        builder.variable(name, [len], Init::TruncatedNormal(0.1)).unwrap();
        let statistic = format!("{name}/moving");
        builder.statistic(&statistic, [9], Init::Constant(0.5), |_| unreachable!()).unwrap();
    }
    Arc::new(graph.table().clone())
}

fn settings() -> StoreSettings {
    let initial = 0.1;
    let curve = Curve::Exponential { initial, factor: 0.5, decay_steps: 2, staircase: true };
    let rule = UpdateRule { momentum: Some(0.9), nesterov: true, clip: Some(2.0) };
    let schedule = Schedule { curve, warmup_steps: 0 };
    StoreSettings { seed: 1, rule, schedule, moving_average: Some(0.999) }
}

fn device() -> Arc<dyn Device> {
    Arc::new(CpuDevice::new(0, 1).unwrap())
}

fn sync(workers: usize) -> Mode {
    let rounds = Rounds { workers, aggregate: workers, when_short: WhenShort::Wait };
    Mode::Sync(Accumulator::new(rounds, 0))
}

fn gradient(table: &VarTable, index: u64) -> Slab {
    let mut slab = Slab::host(table.slab_len()).unwrap();
    let mut stream = Stream::new(5, Purpose::Test, index);
    for row in table.rows() {
        slab.as_host_mut().unwrap()[row.range()].fill_with(|| stream.normal());
    }
    slab
}

/// The shard's part of a slab.
fn packed(shard: &Shard, slab: &[f32]) -> Vec<f32> {
    shard.ranges().iter().flat_map(|range| slab[range.clone()].to_vec()).collect()
}

fn lent(shard: &mut Shard, values: &[f32]) -> Slab {
    let mut slab = shard.lend().unwrap();
    slab.write(0..values.len(), values).unwrap();
    slab
}

/// A whole store's slab of variables, averages or slots.
fn unpacked(table: &VarTable, store: &mut LocalStore, suffix: &str) -> Vec<f32> {
    let (state, mut slab) = (store.snapshot().unwrap(), vec![0.0; table.slab_len()]);
    for row in table.rows() {
        let Some(tensor) = state.find(&format!("{}{suffix}", row.name)) else {
            // A statistic has neither average nor velocity: what is there stays as it was.
            assert_eq!(row.role, Role::Statistic);
            slab[row.range()].fill(if suffix == "/Momentum" { 0.0 } else { 0.5 });
            continue;
        };
        slab[row.range()].copy_from_slice(tensor.as_f32().unwrap());
    }
    slab
}

/// Four workers on one to three ps, arriving in any order, against four towers in one process.
#[test]
fn shards_together_are_one_store_to_the_bit() {
    let table = table();
    for (n_ps, placement) in [
        (1, Placement::Even),
        (2, Placement::RoundRobin),
        (2, Placement::Greedy),
        (3, Placement::Even),
    ] {
        let mut store = LocalStore::new(table.clone(), settings(), vec![device()]).unwrap();
        let mut reducer = CpuMean::new(device());
        let initial = unpacked(&table, &mut store, "");
        let mut shards: Vec<_> = assign(&table, n_ps, placement)
            .into_iter()
            .map(|ranges| {
                Shard::new(ranges, table.trained_len(), settings(), sync(4), device()).unwrap()
            })
            .collect();
        for shard in &mut shards {
            let values = packed(shard, &initial);
            shard.initialize(1, &values).unwrap();
        }
        for step in 0..6 {
            let mut grads: Vec<_> = (0..4).map(|w| gradient(&table, 4 * step + w)).collect();
            for (i, shard) in shards.iter_mut().enumerate() {
                for worker in (0..4).map(|w| (3 * w + i + step as usize) % 4) {
                    let values = packed(shard, grads[worker].as_host().unwrap());
                    let (seen, grad) = (shard.version().unwrap(), lent(shard, &values));
                    shard.offer(worker, seen, 32, grad).unwrap();
                }
            }
            reducer.reduce(&mut grads, Some(&mut 0.0)).unwrap();
            store.apply(reducer.mean(&grads), Contribution::default()).unwrap();
        }
        for shard in &shards {
            let state = shard.snapshot().unwrap();
            assert_eq!(state.step, 6);
            let mut whole = |suffix| packed(shard, &unpacked(&table, &mut store, suffix));
            assert_eq!(state.params, whole(""));
            assert_eq!(state.averages.unwrap(), whole("/ExponentialMovingAverage"));
            assert_eq!(state.slots.unwrap(), whole("/Momentum"));
        }
    }
}

#[test]
fn examples_weigh() {
    let plain = StoreSettings {
        rule: UpdateRule::default(),
        schedule: Schedule::constant(1.0),
        moving_average: None,
        seed: 0,
    };
    let mut shard = Shard::new(vec![0..1, 3..5], 5, plain, sync(2), device()).unwrap();
    shard.initialize(1, &[0.0, 1.0, 2.0]).unwrap();
    let seen = shard.version().unwrap();
    for (worker, examples, value) in [(1, 16, 5.0), (0, 64, 10.0)] {
        let grad = lent(&mut shard, &[value; 3]);
        shard.offer(worker, seen, examples, grad).unwrap();
    }
    let values = shard.snapshot().unwrap().params;
    assert_eq!(values, [-9.0, -8.0, -7.0], "(64 * 10 + 16 * 5) / 80");
}
