//! The program as its users run it, with GPUs.

use std::collections::BTreeMap;

use std::sync::Arc;

use serde_json::Value;
use tftrain::data::Batch;
use tftrain::device::Device;
use tftrain::device::cpu::CpuDevice;
use tftrain::device::cuda::{CudaDevice, Precision};
use tftrain::io::Snapshot;
use tftrain::model::{Cifar, compile};
use tftrain::tower::{Batches, LocalTower, Tower};

use crate::cli::{Ended, Space, cluster, same};
use crate::fake::{inside, on_gpus, real};
use crate::support::wave;

/// The tutorial network on pictures drawn by the program; few at a time, since the GPUs are slow.
pub(crate) const NARROW: &str =
    "cifar10 --synthetic --batch-size 2 --set data.examples=100 --summary-every 0 --log-every 1";

/// Variables of the environment.
pub(crate) type Env<'a> = &'a [(&'a str, &'a str)];

/// Runs the program on GPUs; `None` where there are not as many, or the stand-in cannot be built.
pub(crate) fn run(space: &Space, args: &str, env: Env<'_>) -> Option<Ended> {
    let mut command = space.command(args);
    let number = |text: &str| text.split(' ').next().and_then(|n| n.parse().ok());
    let asked = args.split("--num-gpus ").nth(1).and_then(number).unwrap_or(1);
    // Of the stand-in, and so what the test is about.
    let devices = env.iter().find(|(name, _)| *name == "FAKE_CUDA_DEVICES");
    let devices = devices.and_then(|(_, n)| n.parse().ok()).unwrap_or(0);
    on_gpus(&mut command, asked.max(devices), env)?;
    command.env("XDG_CACHE_HOME", space.path("cache"));
    Some(command.output().unwrap().into())
}

/// What the stand-in counted.
pub(crate) fn counters(space: &Space, file: &str) -> BTreeMap<String, Value> {
    serde_json::from_str(&std::fs::read_to_string(space.path(file)).unwrap()).unwrap()
}

/// Demands all tensors close to each other, relative to the largest of each.
#[track_caller]
pub(crate) fn close(got: &Snapshot, expected: &Snapshot, tolerance: f32) {
    assert_eq!(got.tensors.len(), expected.tensors.len());
    for ((name, got), (_, expected)) in got.tensors.iter().zip(&expected.tensors) {
        let (got, expected) = (got.as_f32().unwrap(), expected.as_f32().unwrap());
        let scale = expected.iter().fold(1e-30f32, |m, v| m.max(v.abs()));
        let worst = got.iter().zip(expected).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst <= tolerance * scale, "{name}: {worst} apart, its largest is {scale}");
    }
}

#[test]
fn gpus_learn_what_cpus_learn() {
    const STEPS: u64 = 30;
    let space = Space::new();
    for n in [1u64, 2, 4] {
        // Small steps: where two values of a window are nearly equal, another rounding may make the other one the maximum.
        let flags = format!("{NARROW} --max-steps {STEPS} --learning-rate 0.005");
        let file = format!("count{n}.json");
        let on_gpus = format!("{flags} --num-gpus {n} --reduce cpu --train-dir gpus{n}");
        let Some(ended) =
            run(&space, &on_gpus, &[("FAKE_CUDA_TRACE", &file), ("FAKE_CUDA_DEVICES", "4")])
        else {
            return;
        };
        let out = ended.code(0).out;
        assert!(out.contains("/device:GPU:0") && out.contains("Reduce:        cpu"), "{out}");
        // As the GPUs do: they know no tiles.
        space.ok(&format!("{flags} --set conv=direct --num-towers {n} --train-dir cpus{n}"));
        close(
            &space.checkpoint(&format!("gpus{n}"), STEPS),
            &space.checkpoint(&format!("cpus{n}"), STEPS),
            1e-4,
        );
        let losses = |run: &str| -> Vec<f64> {
            space.rows(run, "step").iter().map(|row| row["loss"].as_f64().unwrap()).collect()
        };
        let pairs = losses(&format!("gpus{n}")).into_iter().zip(losses(&format!("cpus{n}")));
        for (got, expected) in pairs {
            assert!((got - expected).abs() < 1e-4 * expected, "{got} {expected}");
        }
        if real() {
            continue;
        }
        // Launched one by one in the first step, recorded in the second, replayed as a whole from there on.
        let counters = counters(&space, &file);
        let count = |name: &str| counters.get(name).and_then(Value::as_u64).unwrap_or(0);
        let per_step = (count("launch") + count("library")) / 2 / n;
        assert!(per_step <= 40, "{per_step} launches of kernels and libraries: {counters:?}");
        assert_eq!(count("graph"), n * (STEPS - 1), "{counters:?}");
        assert_eq!((count("capture"), count("leaked_bytes")), (n, 0), "{counters:?}");
        // A step waits once, for its gradients; some more for what happens before the first.
        assert!(count("sync") <= n * (STEPS + 8), "{counters:?}");
        // The program's memory, the next batch, variables and gradients of the host, pictures.
        assert_eq!(count("alloc"), 5 * n, "{counters:?}");
    }
}

/// Where nobody looks at a step's loss, nobody waits for it: neither bits nor lines depend on that.
#[test]
fn losses_are_read_when_they_are_wanted() {
    const STEPS: u64 = 30;
    let space = Space::new();
    for n in [1u64, 2] {
        let flags = format!("{NARROW} --max-steps {STEPS} --num-gpus {n} --variables replicated");
        let mut syncs = Vec::new();
        for every in [1, 10] {
            let file = format!("count{n}-{every}.json");
            let args = format!("{flags} --log-every {every} --train-dir {n}-every{every}");
            let Some(ended) = run(&space, &args, &[("FAKE_CUDA_TRACE", &file)]) else { return };
            ended.code(0);
            if !real() {
                syncs.push(counters(&space, &file)["sync"].as_u64().unwrap());
            }
        }
        let [all, some] = [1, 10].map(|every| format!("{n}-every{every}"));
        same(&space.checkpoint(&all, STEPS), &space.checkpoint(&some, STEPS));
        let losses = |run: &str| -> BTreeMap<u64, f64> {
            let rows = space.rows(run, "step");
            let pair = |row: &Value| (row["step"].as_u64().unwrap(), row["loss"].as_f64().unwrap());
            rows.iter().map(pair).collect()
        };
        let (all, some) = (losses(&all), losses(&some));
        assert_eq!(some.keys().copied().collect::<Vec<_>>(), [0, 10, 20, 29]);
        assert!(some.iter().all(|(step, loss)| all[step] == *loss), "{all:?} {some:?}");
        if let [all, some] = syncs[..] {
            // Of 30 steps four are waited for; some more for what happens before and after.
            assert!(all >= n * STEPS && some <= n * 16, "{all} {some}");
        }
    }
}

/// Whatever order blocks and threads run in, and whichever GPUs towers are on, the bits are the same.
#[test]
fn the_order_of_threads_does_not_matter() {
    const STEPS: u64 = 4;
    let space = Space::new();
    let flags = format!("{NARROW} --max-steps {STEPS} --num-gpus 2");
    let reverse = [("FAKE_CUDA_ORDER", "reverse"), ("FAKE_CUDA_DELAY_US", "20")];
    let ways: [(&str, &str, Env<'_>); 4] = [
        ("forward", "", &[]),
        ("reverse", "", &reverse),
        ("swapped", "--gpu-indices 1,0", &[]),
        ("observed", "--set train.summary_every=1", &[]),
    ];
    for (name, more, env) in ways {
        let Some(ended) = run(&space, &format!("{flags} {more} --train-dir {name}"), env) else {
            return;
        };
        ended.code(0);
        same(&space.checkpoint("forward", STEPS), &space.checkpoint(name, STEPS));
    }
    // The update is the GPUs' own, and rounds otherwise.
    let replicated = format!("{flags} --variables replicated --train-dir replicated");
    run(&space, &replicated, &[]).unwrap().code(0);
    close(&space.checkpoint("replicated", STEPS), &space.checkpoint("forward", STEPS), 1e-4);
}

/// Launches by their times on the GPU, in a benchmark's profile and in a trace.
#[test]
fn launches_are_timed_by_the_gpu() {
    let space = Space::new();
    let bench = "bench step --batch-size 2 --num-batches 2 --num-warmup-batches 1";
    let Some(ended) = run(&space, &format!("{bench} --num-gpus 1 --profile --json"), &[]) else {
        return;
    };
    let result: Value = serde_json::from_str(&ended.code(0).out).unwrap();
    let profile = &result["profile"];
    assert!(profile["peak_gflops"].is_null(), "the CPU's says nothing of a GPU");
    let rows = profile["operations"].as_array().unwrap();
    // Several rows are of convolution 2, and which of them took longest is not the same on every run: its transposes have no FLOPs.
    let of = |name: &'static str| {
        rows.iter().filter(move |row| row["name"].as_str().unwrap().contains(name))
    };
    let timed = |row: &Value| row["ms"].as_f64() > Some(0.0) && row["gflops"].as_f64() > Some(0.0);
    assert!(of("conv2").any(timed), "{rows:?}");
    assert!(of("/transpose").next().is_some() && rows.len() > 30, "{rows:?}");
    let table = run(&space, &format!("{bench} --num-gpus 1 --profile"), &[]).unwrap().code(0).out;
    assert!(table.contains("GFLOP/s") && !table.contains("of most"), "{table}");

    let traced = format!("{NARROW} --max-steps 3 --num-gpus 2 --trace-steps 2 --train-dir run");
    run(&space, &traced, &[]).unwrap().code(0);
    let text = std::fs::read_to_string(space.path("run/trace.json")).unwrap();
    assert!(text.contains("tower_1") && text.contains("conv2"), "{text}");
}

/// Factors in bf16, sums and variables in f32. A rounding of 2e-7 may become one of 4e-3 in the next layer.
#[test]
fn bf16_learns_what_cpus_learn_in_bf16() {
    const STEPS: u64 = 4;
    let space = Space::new();
    let flags = "cifar10 --synthetic --batch-size 1 --set data.examples=100 --summary-every 0";
    // By `auto` a CPU without a unit for bf16 leaves convolutions to f32.
    let flags = format!(
        "{flags} --max-steps {STEPS} --precision bf16 --set conv=direct --learning-rate 0.005"
    );
    let on_gpu = format!("{flags} --num-gpus 1 --train-dir gpu");
    let Some(ended) = run(&space, &on_gpu, &[]) else { return };
    let out = ended.code(0).out;
    assert!(out.contains("own convolutions in bf16"), "{out}");
    space.ok(&format!("{flags} --num-towers 1 --train-dir cpu"));
    space.ok(&format!("{} --num-towers 1 --train-dir f32", flags.replace("bf16", "f32")));
    let [gpu, cpu, f32] = ["gpu", "cpu", "f32"].map(|run| space.checkpoint(run, STEPS));
    close(&gpu, &cpu, 5e-2);
    let losses = |run: &str| -> Vec<f64> {
        space.rows(run, "step").iter().map(|row| row["loss"].as_f64().unwrap()).collect()
    };
    for (got, expected) in losses("gpu").into_iter().zip(losses("cpu")) {
        assert!((got - expected).abs() < 1e-3 * expected, "{got} {expected}");
    }
    assert!(gpu.tensors.iter().zip(&f32.tensors).any(|((_, a), (_, b))| a.as_f32() != b.as_f32()));
}

/// A tower on a GPU beside one on the CPU: losses, gradients, and what a summary shows.
#[test]
fn a_tower_computes_what_a_cpu_tower_does() {
    inside("training::a_tower_computes_what_a_cpu_tower_does", &[], || {
        const BATCH: usize = 2;
        let compiled = Arc::new(compile(&Cifar { classes: 10, lrn: true }, BATCH).unwrap());
        let table = compiled.table();
        let batch = Batch { features: wave(BATCH * 24 * 24 * 3, 100, 1.0), labels: vec![3.0, 7.0] };
        let host = CpuDevice::new(0, 1).unwrap();
        let outcome = |device: Arc<dyn Device>, on_device: bool| {
            let memory: &dyn Device = if on_device { &*device } else { &host };
            let mut variables = memory.alloc(table.slab_len()).unwrap();
            for (i, row) in table.rows().iter().enumerate() {
                let values = wave(row.shape.elements(), i as u64, 0.05);
                variables.write(row.range(), &values).unwrap();
            }
            let mut gradients = memory.alloc(table.slab_len()).unwrap();
            let mut tower = LocalTower::new(device.clone(), compiled.clone()).unwrap();
            let (mut losses, mut told) = (Vec::new(), vec![0; table.slab_len()]);
            let mut done = |range: std::ops::Range<usize>, _: &[f32]| {
                told[range].iter_mut().for_each(|n| *n += 1);
            };
            tower
                .gradients(&variables, Batches::only(&batch), true, &mut gradients, &mut done)
                .unwrap();
            tower.losses(&mut losses).unwrap();
            for row in table.rows().iter().filter(|_| !on_device) {
                assert!(told[row.range()].iter().all(|n| *n == 1), "{}", row.name);
            }
            let mut values = vec![0.0; table.slab_len()];
            gradients.read(0..values.len(), &mut values).unwrap();
            let mut all = vec![("losses".to_owned(), losses)];
            for row in table.rows() {
                all.push((format!("{}/gradients", row.name), values[row.range()].to_vec()));
            }
            all.extend(tower.activations().unwrap());
            all
        };
        let expected = outcome(Arc::new(CpuDevice::new(0, 1).unwrap()), false);
        for on_device in [false, true] {
            let gpu = Arc::new(CudaDevice::new(1, Precision::F32).unwrap());
            let got = outcome(gpu, on_device);
            assert_eq!(got.len(), expected.len());
            for ((name, got), (_, expected)) in got.iter().zip(&expected) {
                super::ops::assert_close(name, got, expected, 2e-5);
            }
        }
    });
}

/// Workers with a GPU each beside a parameter server, which opens none: the bits of two GPUs in one process.
#[test]
fn a_parameter_server_opens_no_gpu() {
    const STEPS: u64 = 4;
    let space = Space::new();
    cluster(&space, "cluster.yaml", 1, 2, "  mode: ps-sync\n");
    let flags = NARROW.strip_prefix("cifar10 ").unwrap();
    let flags = format!("{flags} --max-steps {STEPS}");
    let local = format!("cifar10 {flags} --num-gpus 2 --train-dir local");
    let Some(ended) = run(&space, &local, &[]) else { return };
    ended.code(0);
    let launched = format!(
        "launch --config cluster.yaml -- {flags} --num-gpus 1 --set model=cifar10 --train-dir workers"
    );
    run(&space, &launched, &[("FAKE_CUDA_TRACE", "count-%p.json")]).unwrap().code(0);
    same(&space.checkpoint("local", STEPS), &space.checkpoint("workers", STEPS));
    if real() {
        return;
    }
    let entries = std::fs::read_dir(space.path("")).unwrap();
    let traces = entries.filter(|entry| {
        entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("count-")
    });
    assert_eq!(traces.count(), 2);
}
