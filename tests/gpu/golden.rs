//! The networks with recorded values: the tutorial's by TensorFlow, residual ones by PyTorch.

use std::sync::Arc;

use serde_json::Value;
use tftrain::data::Batch;
use tftrain::device::Device;
use tftrain::device::cpu::CpuDevice;
use tftrain::device::cuda::{CudaDevice, Precision};
use tftrain::graph::{Role, VarRow};
use tftrain::model::{Cifar, Compiled, Model, Resnet, ResnetVersion, compile};
use tftrain::tower::{Batches, LocalTower, Tower};

use crate::cli::Space;
use crate::fake::inside;
use crate::support::{assert_digest, golden, numbers, wave};
use crate::training::{close, run};

/// The loss and the gradients, by name, of the first step from values by the number of the trained variable.
fn first_step(
    device: Arc<dyn Device>,
    compiled: &Arc<Compiled>,
    values: impl Fn(&VarRow, u64) -> Vec<f32>,
    batch: &Batch,
) -> (f64, Vec<(String, Vec<f32>)>) {
    let (table, host) = (compiled.table(), CpuDevice::new(0, 1).unwrap());
    let mut variables = host.alloc(table.slab_len()).unwrap();
    let mut gradients = host.alloc(table.slab_len()).unwrap();
    let mut trained = 0;
    for row in table.rows() {
        let first = match row.role {
            Role::Trained => values(row, trained),
            Role::Statistic => vec![0.5; row.shape.elements()],
        };
        trained += u64::from(row.role == Role::Trained);
        variables.write(row.range(), &first).unwrap();
    }
    let mut tower = LocalTower::new(device, compiled.clone()).unwrap();
    let mut losses = Vec::new();
    // The third run replays what the second has recorded.
    for _ in 0..3 {
        tower
            .gradients(&variables, Batches::only(batch), false, &mut gradients, &mut |_, _| ())
            .unwrap();
    }
    tower.losses(&mut losses).unwrap();
    // Of all three, in their order: the same bits.
    let n = compiled.loss_names().len();
    assert!(losses.len() == 3 * n && losses.chunks(n).all(|one| *one == losses[..n]), "{losses:?}");
    let all = gradients.as_host().unwrap();
    let by_name = table.rows().iter().map(|row| (row.name.clone(), all[row.range()].to_vec()));
    (f64::from(losses[0]), by_name.collect())
}

fn assert_recorded(
    model: &dyn Model,
    batch: usize,
    values: impl Fn(&VarRow, u64) -> Vec<f32>,
    recorded: &Value,
    tolerance: f64,
) {
    let compiled = Arc::new(compile(model, batch).unwrap());
    let features = wave(batch * model.features().elements(), 100, 1.0);
    let labels = (0..batch).map(|i| ((7 * i + 3) % 10) as f32).collect();
    let batch = Batch { features, labels };
    let gpu = Arc::new(CudaDevice::new(0, Precision::F32).unwrap());
    let (loss, gradients) = first_step(gpu, &compiled, &values, &batch);
    let expected = numbers(&recorded["losses"])[0];
    assert!((loss - expected).abs() < 1e-5 * expected, "{loss} {expected}");
    let cpu = Arc::new(CpuDevice::new(0, 1).unwrap());
    let (_, on_cpu) = first_step(cpu, &compiled, &values, &batch);
    for ((name, got), (_, on_cpu)) in gradients.iter().zip(&on_cpu) {
        match &recorded["gradients"][name] {
            // What a statistic is too large by.
            Value::Null => super::ops::assert_close(name, got, on_cpu, 1e-5),
            digest => assert_digest(name, got, digest, tolerance),
        }
    }
}

#[test]
fn the_tutorial_network_has_tensorflows_gradients() {
    inside("golden::the_tutorial_network_has_tensorflows_gradients", &[], || {
        let values = |row: &VarRow, j: u64| {
            let n = row.shape.elements();
            let (sigma, bias) = match row.name.split('/').next() {
                Some("conv1") => (0.05, 0.0),
                Some("conv2") => (0.05, 0.1),
                Some("softmax_linear") => (1.0 / 192.0, 0.0),
                _ => (0.04, 0.1),
            };
            if j.is_multiple_of(2) { wave(n, j / 2 + 1, sigma) } else { vec![bias; n] }
        };
        let recorded = golden("tutorial_net.json");
        assert_recorded(&Cifar { classes: 10, lrn: true }, 8, values, &recorded, 2e-5);
    });
}

#[test]
fn residual_networks_have_pytorchs_gradients() {
    inside("golden::residual_networks_have_pytorchs_gradients", &[], || {
        let values = |row: &VarRow, j: u64| {
            let n = row.shape.elements();
            match row.name.rsplit('/').next() {
                Some("weights") => {
                    let factor = if row.shape.len() == 4 { 2.0 } else { 1.0 };
                    let fan_in = (n / row.shape.last_dim()) as f64;
                    wave(n, j + 1, f64::from(((factor / fan_in) as f32).sqrt()))
                }
                Some("gamma") => wave(n, j + 1, 0.2).iter().map(|v| 1.0 + v).collect(),
                _ => wave(n, j + 1, 0.1),
            }
        };
        let golden = golden("resnet.json");
        for (name, version) in [("v1", ResnetVersion::V1), ("v2", ResnetVersion::V2)] {
            let model = Resnet { depth: 8, version, classes: 10 };
            assert_recorded(&model, 4, values, &golden[name], 2e-4);
        }
    });
}

/// Moving statistics are the mean over the GPUs, wherever variables live and gradients meet.
#[test]
fn residual_networks_train_on_gpus_as_on_cpus() {
    const STEPS: u64 = 3;
    let space = Space::new();
    std::fs::write(space.path("resnet.yaml"), "model: {name: resnet, depth: 8}\n").unwrap();
    let flags = format!(
        "train --config resnet.yaml --synthetic --batch-size 2 --set data.examples=100 \
         --summary-every 0 --max-steps {STEPS} --learning-rate 0.005"
    );
    space.ok(&format!("{flags} --num-towers 2 --set conv=direct --train-dir cpus"));
    let ways = ["", "--variables replicated", "--reduce cpu"];
    for (i, way) in ways.iter().enumerate() {
        let args = format!("{flags} --num-gpus 2 {way} --train-dir gpus{i}");
        let Some(ended) = run(&space, &args, &[]) else { return };
        ended.code(0);
        close(
            &space.checkpoint(&format!("gpus{i}"), STEPS),
            &space.checkpoint("cpus", STEPS),
            1e-3,
        );
    }
}
