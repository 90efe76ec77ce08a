//! Residual networks against PyTorch in float64: first gradients, ten losses, variables and moving statistics; and the ways to train
//! one, which give the same bits.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use std::sync::Arc;

use serde_json::Value;
use support::{assert_digest, golden, numbers, wave};
use tftrain::config::{LearningRateConfig, RunConfig, TowerDevices, VariablePlacement};
use tftrain::data::{Batch, Source};
use tftrain::device::{Device, Feeds, Slab, cpu::CpuDevice};
use tftrain::graph::{Role, VarRow};
use tftrain::model::{Compiled, Resnet, ResnetVersion, compile};
use tftrain::store::State;
use tftrain::tensor::{HostTensor, Shape};
use tftrain::tower::{Batches, LocalTower, Tower};
use tftrain::train::{Part, Trainer, Wanted, assemble};
use tftrain::util::clock::{Clock, ManualClock};

const BATCH: usize = 4;
const PIXELS: usize = 32 * 32 * 3;
const VERSIONS: [(&str, ResnetVersion); 2] = [("v1", ResnetVersion::V1), ("v2", ResnetVersion::V2)];

/// The pictures of the golden run, and as many more.
struct Waves(Vec<f32>);

impl Waves {
    fn new(count: usize) -> Self {
        Self(wave(count * PIXELS, 100, 1.0))
    }

    fn batch(&self) -> Batch {
        let labels = (0..BATCH).map(label).collect();
        Batch { features: self.0[..BATCH * PIXELS].to_vec(), labels }
    }
}

fn label(index: usize) -> f32 {
    ((7 * index + 3) % 10) as f32
}

impl Source for Waves {
    fn name(&self) -> &str {
        "waves"
    }

    fn len(&self) -> usize {
        self.0.len() / PIXELS
    }

    fn feature_shape(&self) -> Shape {
        [32, 32, 3].into()
    }

    fn write(&self, _epoch: u64, index: usize, features: &mut [f32]) -> f32 {
        features.copy_from_slice(&self.0[index * PIXELS..][..PIXELS]);
        label(index)
    }
}

fn compiled(version: ResnetVersion, batch: usize) -> Arc<Compiled> {
    Arc::new(compile(&Resnet { depth: 8, version, classes: 10 }, batch).unwrap())
}

/// The first value of the trained variable `j`, as `make_resnet.py` says.
fn first(row: &VarRow, j: u64) -> Vec<f32> {
    let n = row.shape.elements();
    match row.name.rsplit('/').next().unwrap() {
        "weights" => {
            let factor = if row.shape.len() == 4 { 2.0 } else { 1.0 };
            let fan_in = (n / row.shape.last_dim()) as f64;
            wave(n, j + 1, f64::from(((factor / fan_in) as f32).sqrt()))
        }
        "gamma" => wave(n, j + 1, 0.2).iter().map(|v| 1.0 + v).collect(),
        _ => wave(n, j + 1, 0.1),
    }
}

/// The golden run's first variables, zero velocities, and averages where asked for.
fn start(compiled: &Compiled, averages: bool) -> State {
    let mut state = State::default();
    let mut add = |name: String, row: &VarRow, values: Vec<f32>| {
        state.tensors.push((name, HostTensor::f32(&row.shape, values).unwrap()));
    };
    let mut trained = 0;
    for row in compiled.table().rows() {
        let n = row.shape.elements();
        if row.role == Role::Statistic {
            let value = if row.name.ends_with("moving_variance") { 1.0 } else { 0.0 };
            add(row.name.clone(), row, vec![value; n]);
            continue;
        }
        let values = first(row, trained);
        trained += 1;
        add(format!("{}/Momentum", row.name), row, vec![0.0; n]);
        if averages {
            add(format!("{}/ExponentialMovingAverage", row.name), row, values.clone());
        }
        add(row.name.clone(), row, values);
    }
    state
}

fn slab(device: &dyn Device, compiled: &Compiled, state: &State) -> Slab {
    let values = state.variables(compiled.table(), false).unwrap();
    let mut slab = device.alloc(values.len()).unwrap();
    slab.write(0..values.len(), &values).unwrap();
    slab
}

#[test]
fn first_step_has_pytorchs_gradients() {
    let golden = golden("resnet.json");
    for (name, version) in VERSIONS {
        let (golden, compiled) = (&golden[name], compiled(version, BATCH));
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(0, 2).unwrap());
        let variables = slab(&*device, &compiled, &start(&compiled, false));
        let mut gradients = device.alloc(compiled.table().slab_len()).unwrap();
        let mut tower = LocalTower::new(device, compiled.clone()).unwrap();
        let (mut losses, batch) = (Vec::new(), Waves::new(BATCH).batch());
        tower
            .gradients(&variables, Batches::only(&batch), true, &mut gradients, &mut |_, _| ())
            .unwrap();
        tower.losses(&mut losses).unwrap();
        assert_eq!(losses.len(), compiled.loss_names().len());
        let expected = [numbers(&golden["losses"])[0], numbers(&golden["cross_entropies"])[0]];
        for (loss, expected) in losses.into_iter().zip(expected) {
            assert!((f64::from(loss) - expected).abs() < 1e-5 * expected, "{loss} {expected}");
        }
        let activations = tower.activations().unwrap();
        let (_, logits) = activations.iter().find(|(name, _)| name == "logits").unwrap();
        assert_digest("logits", logits, &golden["logits"], 1e-4);
        for row in compiled.table().rows().iter().filter(|row| row.role == Role::Trained) {
            let values = &gradients.as_host().unwrap()[row.range()];
            let what = format!("{name}: {}", row.name);
            assert_digest(&what, values, &golden["gradients"][&row.name], 2e-4);
        }
    }
}

/// The loss along the gradient, against a central difference.
#[test]
fn gradients_agree_with_finite_differences() {
    for (name, version) in VERSIONS {
        let compiled = compiled(version, BATCH);
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(0, 2).unwrap());
        let table = compiled.table();
        let mut variables = slab(&*device, &compiled, &start(&compiled, false));
        let at = variables.as_host().unwrap().to_vec();
        let mut gradients = device.alloc(table.slab_len()).unwrap();
        let mut tower = LocalTower::new(device, compiled.clone()).unwrap();
        let batch = Waves::new(BATCH).batch();
        let mut loss = |variables: &Slab, gradients: &mut Slab| {
            let mut losses = Vec::new();
            tower
                .gradients(variables, Batches::only(&batch), false, gradients, &mut |_, _| ())
                .unwrap();
            tower.losses(&mut losses).unwrap();
            f64::from(losses[0])
        };
        loss(&variables, &mut gradients);
        let mut direction = gradients.as_host().unwrap().to_vec();
        // The statistics' rows hold no gradients.
        direction[table.trained_len()..].fill(0.0);
        let norm = direction.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let mut moved = |by: f64| {
            for ((v, x), d) in variables.as_host_mut().unwrap().iter_mut().zip(&at).zip(&direction)
            {
                *v = (f64::from(*x) + by * f64::from(*d) / norm) as f32;
            }
            loss(&variables, &mut gradients)
        };
        let step = 2e-3;
        let difference = (moved(step) - moved(-step)) / (2.0 * step);
        assert!((difference - norm).abs() < 0.01 * norm, "{name}: {difference} {norm}");
    }
}

fn config() -> RunConfig {
    let mut config = RunConfig::recipe("resnet").unwrap();
    config.data.batch_size = BATCH;
    config.optimizer.learning_rate =
        LearningRateConfig::Constant { initial: 0.01, warmup_epochs: 0.0 };
    config
}

fn trainer(config: &RunConfig, compiled: &Arc<Compiled>, pictures: usize) -> Trainer {
    let source: Arc<dyn Source> = Arc::new(Waves::new(pictures));
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::default());
    let state = start(compiled, config.moving_average.is_some());
    let part = Part::alone();
    let mut assembly =
        assemble(config, compiled, &source, Some((&state, 0)), &clock, part).unwrap();
    assembly.trainers.pop().unwrap()
}

#[test]
fn ten_steps_follow_pytorch() {
    let golden = golden("resnet.json");
    for (name, version) in VERSIONS {
        let (golden, compiled) = (&golden[name], compiled(version, BATCH));
        let mut trainer = trainer(&config(), &compiled, BATCH);
        for expected in numbers(&golden["losses"]) {
            let loss = trainer.step(Wanted::default()).unwrap().loss;
            assert!((loss - expected).abs() < 1e-4 * expected, "{name}: {loss} {expected}");
        }
        let state = trainer.snapshot().unwrap();
        let recorded: &Value = &golden["variables_after"];
        assert_eq!(recorded.as_object().unwrap().len(), compiled.table().rows().len());
        for row in compiled.table().rows() {
            let values = state.find(&row.name).unwrap().as_f32().unwrap();
            assert_digest(&format!("{name}: {}", row.name), values, &recorded[&row.name], 2e-3);
        }
        // By the moving statistics.
        let device = CpuDevice::new(0, 2).unwrap();
        let mut program = device.load(compiled.predict()).unwrap();
        let (variables, batch) = (slab(&device, &compiled, &state), Waves::new(BATCH).batch());
        program
            .run(&variables, Feeds::only(&[&batch.features, &batch.labels]), None, &mut |_, _| ())
            .unwrap();
        let mut logits = vec![0.0; BATCH * 10];
        program.fetch(0, &mut logits).unwrap();
        assert_digest(&format!("{name}: logits"), &logits, &golden["evaluated_logits"], 2e-3);
    }
}

/// Statistics are the mean over the towers, in the order of the gradients' tree.
#[test]
fn towers_micro_batches_and_replicas_give_the_same_bits() {
    let compiled = compiled(ResnetVersion::V1, BATCH);
    let after = |change: &dyn Fn(&mut RunConfig)| {
        let mut config = config();
        config.moving_average = Some(0.9);
        change(&mut config);
        let mut trainer = trainer(&config, &compiled, 3 * BATCH);
        for _ in 0..3 {
            trainer.step(Wanted::default()).unwrap();
        }
        trainer.snapshot().unwrap()
    };
    let expected = after(&|config| config.towers.accumulate = 3);
    let three = |config: &mut RunConfig| config.towers.devices = TowerDevices::Cpus(3);
    assert_eq!(expected, after(&three));
    let replicated = |config: &mut RunConfig| {
        three(config);
        config.variables = VariablePlacement::Replicated;
    };
    assert_eq!(expected, after(&replicated));
    // Statistics have no averages and no velocities, and are judged by as they are.
    let statistics: Vec<&str> = expected
        .tensors
        .iter()
        .map(|(name, _)| name.as_str())
        .filter(|name| name.contains("moving_"))
        .collect();
    assert_eq!(statistics.len(), 2 * 7);
    assert!(statistics.iter().all(|name| !name.contains("Momentum") && !name.contains("Average")));
    let table = compiled.table();
    let [raw, averaged] = [false, true].map(|of| expected.variables(table, of).unwrap());
    assert_ne!(raw[..table.trained_len()], averaged[..table.trained_len()]);
    assert_eq!(raw[table.trained_len()..], averaged[table.trained_len()..]);
    assert!(expected.has_averages(table));
}
