//! The way of pictures to the GPU: distorted there, or fetched while the step before is computed.

use std::sync::Arc;

use tftrain::data::{Augmented, Drawn, Source, Split, pictures};
use tftrain::device::cpu::CpuDevice;
use tftrain::device::cuda::{CudaDevice, Precision};
use tftrain::device::{Device, Executable, Feeds};
use tftrain::graph::{Builder, Fusions, Graph, Op, Program};

use crate::cli::{Space, same};
use crate::fake::inside;
use crate::training::{NARROW, counters, run};

/// A program that gives back what it is fed, twice as large.
fn doubling(device: &dyn Device, batch: usize) -> Box<dyn Executable> {
    let mut graph = Graph::default();
    let mut b = Builder::new(&mut graph);
    let fed = b.placeholder("pictures", [batch, 24, 24, 3].into()).unwrap();
    let out = b.op(Op::Scale(2.0), &[fed]).unwrap();
    device.load(Program::lower(&graph, &[out], &[], Fusions::Forward)).unwrap()
}

/// Examples of an epoch, written by a source.
fn written(source: &dyn Source, epoch: u64, examples: &[usize]) -> Vec<f32> {
    let each = source.feature_shape().elements();
    let mut features = vec![0.0; each * examples.len()];
    for (&index, features) in examples.iter().zip(features.chunks_mut(each)) {
        source.write(epoch, index, features);
    }
    features
}

#[test]
fn gpus_distort_as_cpus_do_bit_by_bit() {
    inside("input::gpus_distort_as_cpus_do_bit_by_bit", &[], || {
        const BATCH: usize = 8;
        let gpu = CudaDevice::new(0, Precision::F32).unwrap();
        let host = CpuDevice::new(0, 1).unwrap();
        let augmented = Augmented::new(Arc::new(pictures(Split::Train, 1500, 1)), 5);
        let drawn = augmented.drawn().unwrap();
        let planes: Vec<&[u8]> = (0..1500).map(|i| drawn.pictures().planes(i)).collect();
        assert!(!gpu.keep_pictures(&planes, 1e-6).unwrap(), "too much of its memory");
        let mut program = doubling(&gpu, BATCH);
        let variables = gpu.alloc(0).unwrap();
        let short = written(&drawn, 0, &[0; BATCH]);
        let refused = program.run(&variables, Feeds::only(&[&short]), None, &mut |_, _| ());
        assert!(refused.is_err(), "no pictures are kept");
        assert!(gpu.keep_pictures(&planes, 0.25).unwrap());
        assert!(!host.keep_pictures(&planes, 0.25).unwrap());

        let mut out = vec![0.0; BATCH * 24 * 24 * 3];
        let mut next: Option<Vec<f32>> = None;
        for round in 0..8u64 {
            let examples = |round: u64| -> Vec<usize> {
                (0..BATCH).map(|i| (999 + 37 * i + 101 * round as usize) % 1500).collect()
            };
            let source: &dyn Source = if round % 3 == 2 { &augmented } else { &drawn };
            let after: &dyn Source = if round % 3 == 1 { &augmented } else { &drawn };
            let (known, now) = match next.take() {
                Some(now) => (true, now),
                None => (false, written(source, round, &examples(round))),
            };
            // Not every batch is known before.
            next = (round % 4 != 3).then(|| written(after, round + 1, &examples(round + 1)));
            let (now, ahead) = ([&now[..]], next.as_ref().map(|next| [&next[..]]));
            let next = ahead.as_ref().map(|next| &next[..]);
            let feeds = Feeds { next, known, ..Feeds::only(&now) };
            program.run(&variables, feeds, None, &mut |_, _| ()).unwrap();
            program.fetch(0, &mut out).unwrap();
            let expected: Vec<f32> =
                written(&augmented, round, &examples(round)).iter().map(|x| 2.0 * x).collect();
            assert_eq!(out, expected, "round {round}");
        }
        assert_eq!(Drawn::LEN, tftrain::device::DRAW);
    });
}

/// The same bits, whoever distorts; a batch that comes from the host comes while the step before it is computed.
#[test]
fn where_pictures_are_distorted_changes_nothing() {
    const STEPS: u64 = 6;
    let space = Space::new();
    let flags = format!("{NARROW} --max-steps {STEPS} --num-gpus 2");
    let delay = ("FAKE_CUDA_DELAY_US", "200");
    let kept = "training examples, kept and distorted by the GPUs)";
    let mut bytes = Vec::new();
    for (name, more, env) in [
        ("always", "--accumulate 2", None),
        ("never", "--accumulate 2", None),
        ("auto", "--accumulate 2 --set train.summary_every=2", Some(delay)),
    ] {
        let file = format!("{name}.json");
        let args = format!("{flags} {more} --set data.on_device={name} --train-dir {name}");
        let env: Vec<_> = env.into_iter().chain([("FAKE_CUDA_TRACE", &*file)]).collect();
        let Some(ended) = run(&space, &args, &env) else { return };
        let out = ended.code(0).out;
        assert_eq!(out.contains(kept), name != "never", "{out}");
        bytes.push(counters(&space, &file)["copies_h2d_bytes"].as_u64().unwrap());
        same(&space.checkpoint("always", STEPS), &space.checkpoint(name, STEPS));
    }
    // All pictures once on both GPUs and a draw of each that is fed, or what is fed; it comes in 4 batches a step, and a first one
    // for each GPU of a step that never comes.
    let (once, fed) = (2 * 100 * 3072, (4 * STEPS + 2) * 2);
    assert_eq!(bytes[0] + fed * 24 * 24 * 3 * 4, bytes[1] + once + fed * 5 * 4);
    let never =
        format!("{flags} --set data.on_device=never --set train.summary_every=1 --train-dir");
    run(&space, &format!("{never} seen"), &[delay]).unwrap().code(0);
    run(&space, &format!("{flags} --train-dir unseen"), &[]).unwrap().code(0);
    same(&space.checkpoint("seen", STEPS), &space.checkpoint("unseen", STEPS));
    let small = [("FAKE_CUDA_MEMORY", "40000000")];
    let large = "--set data.examples=20000 --set data.on_device=always --train-dir large";
    let ended = run(&space, &format!("{flags} {large}"), &small).unwrap();
    ended.code(9).says(&["data.on_device: always", "do not fit"]);
}

/// A run that stops after any step goes on with the same batches.
#[test]
fn fetching_ahead_moves_no_position() {
    let space = Space::new();
    let flags = format!("{NARROW} --num-gpus 1 --set data.on_device=never");
    let Some(ended) = run(&space, &format!("{flags} --max-steps 5 --train-dir whole"), &[]) else {
        return;
    };
    ended.code(0);
    for steps in [2, 3, 5] {
        let args = format!("{flags} --max-steps {steps} --train-dir parts");
        let resume = if steps > 2 { "--resume" } else { "" };
        run(&space, &format!("{args} {resume}"), &[]).unwrap().code(0);
    }
    same(&space.checkpoint("whole", 5), &space.checkpoint("parts", 5));
}
