//! Every operation on a GPU: against TensorFlow's recorded values, and against the CPU.

use tftrain::device::cpu::bf16::Unit;
use tftrain::device::cpu::{self, CpuDevice};
use tftrain::device::cuda::{CudaDevice, Precision};
use tftrain::device::{Device, Slab, Update, UpdateSlabs};
use tftrain::graph::{Builder, NodeId, Op};
use tftrain::optim::UpdateRule;

use crate::fake::inside;
use crate::support::cases::{Build, Case, agrees_with_tensorflow, apply, differentiable};
use crate::support::wave;

fn gpu() -> CudaDevice {
    CudaDevice::new(0, Precision::F32).unwrap()
}

/// Relative to the largest of both.
#[track_caller]
pub(crate) fn assert_close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-30f32, |m, v| m.max(v.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs() / scale;
        assert!(error <= tolerance, "{what} [{i}]: {got} on the GPU, {expected} on the CPU");
    }
}

#[test]
fn agrees_with_tensorflows_values() {
    inside("ops::agrees_with_tensorflows_values", &[], || {
        agrees_with_tensorflow(&gpu(), "a GPU", 1e-5, |_| true);
    });
}

/// Each operation and its gradients on both; says how many there were.
fn agree(gpu: &CudaDevice, cpu: &CpuDevice, wanted: impl Fn(&Op) -> bool) -> usize {
    let mut count = 0;
    for (op, shapes) in differentiable().into_iter().filter(|(op, _)| wanted(op)) {
        let build = |b: &mut Builder<'_>, inputs: &[NodeId], _| {
            let copies: Result<Vec<NodeId>, _> =
                inputs.iter().map(|&i| b.op(Op::Scale(1.0), &[i])).collect();
            apply(b, &op, &copies?)
        };
        let mut on_gpu = Case::new(gpu, &shapes, &[], &build);
        let mut on_cpu = Case::new(cpu, &shapes, &[], &build);
        let name = op.name();
        // The third run replays what the second has recorded.
        for run in 0..3 {
            assert_close(&format!("{name}, run {run}"), &on_gpu.run(), &on_cpu.run(), 1e-5);
            for i in 0..shapes.len() {
                let (got, expected) = (on_gpu.gradient(i), on_cpu.gradient(i));
                assert_close(&format!("{name}, gradient {i}"), &got, &expected, 2e-5);
            }
        }
        count += 1;
    }
    count
}

#[test]
fn agrees_with_the_cpu() {
    inside("ops::agrees_with_the_cpu", &[], || {
        agree(&gpu(), &CpuDevice::new(0, 1).unwrap(), |_| true);
    });
}

/// Both round the same factors to bf16 and add in f32, in other orders.
#[test]
fn agrees_with_the_cpu_in_bf16() {
    inside("ops::agrees_with_the_cpu_in_bf16", &[], || {
        let gpu = CudaDevice::new(0, Precision::Bf16).unwrap();
        let emulated = cpu::Precision::Bf16(Unit::Emulated);
        let cpu = CpuDevice::new(0, 1).unwrap().with_precision(emulated);
        let products = |op: &Op| matches!(op, Op::MatMul { .. } | Op::Conv2d(_));
        assert_eq!(agree(&gpu, &cpu, products), 2);
    });
}

/// Gradients that are computed together, where only some are asked for.
#[test]
fn parts_of_fused_gradients_agree_with_the_cpu() {
    inside("ops::parts_of_fused_gradients_agree_with_the_cpu", &[], || {
        let (gpu, cpu) = (gpu(), CpuDevice::new(0, 1).unwrap());
        let norm = Op::BatchNorm { epsilon: 1e-3 };
        let by_scale = |b: &mut Builder<'_>, inputs: &[NodeId], fed: NodeId| {
            let x = b.op(Op::Reshape([8, 5].into()), &[fed])?;
            apply(b, &norm, &[x, inputs[0], inputs[1]])
        };
        let by_input = |b: &mut Builder<'_>, inputs: &[NodeId], _: NodeId| {
            let scale = b.op(Op::Fill(1.5, [5].into()), &[])?;
            let offset = b.op(Op::Fill(0.5, [5].into()), &[])?;
            let x = b.op(Op::Scale(1.0), &inputs[..1])?;
            apply(b, &norm, &[x, scale, offset])
        };
        let fed = wave(40, 7, 1.0);
        let cases: [(Vec<Vec<usize>>, &Build<'_>); 2] =
            [(vec![vec![5], vec![5]], &by_scale), (vec![vec![8, 5]], &by_input)];
        for (shapes, build) in cases {
            let mut on_gpu = Case::new(&gpu, &shapes, &fed, build);
            let mut on_cpu = Case::new(&cpu, &shapes, &fed, build);
            assert_close("output", &on_gpu.run(), &on_cpu.run(), 1e-5);
            for i in 0..shapes.len() {
                assert_close("gradient", &on_gpu.gradient(i), &on_cpu.gradient(i), 2e-5);
            }
        }
    });
}

#[test]
fn sums_of_slabs_are_the_cpus_bits() {
    inside("ops::sums_of_slabs_are_the_cpus_bits", &[], || {
        let (gpu, cpu) = (gpu(), CpuDevice::new(0, 1).unwrap());
        for n in [1, 2, 3, 5, 8, 9, 16, 17, 70] {
            let slabs = |device: &dyn Device| -> Vec<Slab> {
                let slab = |i: usize| {
                    let mut slab = device.alloc(100).unwrap();
                    slab.write(0..100, &wave(100, i as u64, 1.0)).unwrap();
                    slab
                };
                (0..n).map(slab).collect()
            };
            let sum = |device: &dyn Device| {
                let mut slabs = slabs(device);
                device.sum(&mut slabs, 1.0 / n as f32).unwrap();
                let mut values = vec![0.0; 100];
                slabs[0].read(0..100, &mut values).unwrap();
                values
            };
            assert_eq!(sum(&gpu), sum(&cpu), "{n} slabs");
        }
    });
}

#[test]
fn updates_agree_with_the_cpu() {
    inside("ops::updates_agree_with_the_cpu", &[], || {
        let (gpu, cpu) = (gpu(), CpuDevice::new(0, 1).unwrap());
        let rules = [
            UpdateRule { momentum: None, nesterov: false, clip: None },
            UpdateRule { momentum: Some(0.9), nesterov: false, clip: Some(0.5) },
            UpdateRule { momentum: Some(0.9), nesterov: true, clip: None },
        ];
        for rule in rules {
            // Gradients of the host serve both.
            let after = |device: &dyn Device, averaged: bool| -> Vec<f32> {
                let slab = |device: &dyn Device, k: u64| {
                    let mut slab = device.alloc(1000).unwrap();
                    slab.write(0..1000, &wave(1000, k, 1.0)).unwrap();
                    slab
                };
                let (mut params, mut slots) = (slab(device, 1), slab(device, 2));
                let (mut averages, grads) = (slab(device, 3), slab(&cpu, 4));
                let update = Update { rule, rate: 0.1, average_decay: 0.99, trained: 900 };
                for _ in 0..2 {
                    let slabs = UpdateSlabs {
                        params: &mut params,
                        grads: &grads,
                        slots: rule.momentum.map(|_| &mut slots),
                        averages: averaged.then_some(&mut averages),
                    };
                    device.update(update, slabs).unwrap();
                }
                let mut all = vec![0.0; 3000];
                for (slab, into) in
                    [&params, &slots, &averages].into_iter().zip(all.chunks_mut(1000))
                {
                    slab.read(0..1000, into).unwrap();
                }
                all
            };
            for averaged in [false, true] {
                let (got, expected) = (after(&gpu, averaged), after(&cpu, averaged));
                assert_close(&format!("{rule:?}"), &got, &expected, 1e-6);
            }
        }
    });
}
