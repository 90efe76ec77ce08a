//! The order of batches, failing sources and the end of the threads.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use tftrain::data::{Batch, InputPipeline, PipelineSpec, Sampler, Source};
use tftrain::tensor::Shape;

/// Features `[epoch, index]`, label `index`; panics at one example of one epoch, counts its end.
struct Numbers {
    examples: usize,
    panics_at: Option<(u64, usize)>,
    ended: Arc<AtomicUsize>,
}

impl Numbers {
    fn new(examples: usize) -> Self {
        Self { examples, panics_at: None, ended: Arc::default() }
    }
}

impl Source for Numbers {
    fn name(&self) -> &str {
        "numbers"
    }
    fn len(&self) -> usize {
        self.examples
    }
    fn feature_shape(&self) -> Shape {
        [2].into()
    }
    fn write(&self, epoch: u64, index: usize, features: &mut [f32]) -> f32 {
        assert!(self.panics_at != Some((epoch, index)), "example {index} is broken");
        features.copy_from_slice(&[epoch as f32, index as f32]);
        index as f32
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }
}

const SPEC: PipelineSpec = PipelineSpec {
    seed: 1,
    shuffle: true,
    batch: 4,
    position: 0,
    group: 1,
    stride: 1,
    threads: 1,
    depth: 2,
};

fn batches(examples: usize, spec: PipelineSpec, count: usize) -> Vec<Batch> {
    let source = Arc::new(Numbers::new(examples));
    let mut pipeline = InputPipeline::start(source, spec).unwrap();
    (0..count)
        .map(|k| {
            let batch = pipeline.next().unwrap();
            let step = spec.stride * spec.batch as u64;
            assert_eq!(pipeline.position(), spec.position + (k as u64 + 1) * step);
            pipeline.recycle(batch.clone());
            batch
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn threads_and_depth_change_nothing(
        examples in 4usize..40, threads in 1usize..5, depth in 1usize..7, shuffle: bool,
    ) {
        let one = PipelineSpec { shuffle, ..SPEC };
        let many = PipelineSpec { threads, depth, ..one };
        prop_assert_eq!(batches(examples, one, 25), batches(examples, many, 25));
    }

    #[test]
    fn batches_are_the_samplers_examples(examples in 4u32..40, position in 0u64..200) {
        let spec = PipelineSpec { position, threads: 2, ..SPEC };
        let mut sampler = Sampler::new(1, NonZeroU32::new(examples).unwrap(), true);
        let mut at = position;
        for batch in batches(examples as usize, spec, 15) {
            for (features, label) in batch.features.chunks(2).zip(&batch.labels) {
                let pick = sampler.at(at);
                prop_assert_eq!(features, [pick.epoch as f32, pick.index as f32]);
                prop_assert_eq!(*label, pick.index as f32);
                at += 1;
            }
        }
    }

    #[test]
    fn towers_share_the_batches_of_one(towers in 1u64..5, examples in 4usize..40) {
        let whole = batches(examples, SPEC, 20);
        for tower in 0..towers {
            let spec = PipelineSpec { position: tower * 4, stride: towers, ..SPEC };
            let own = batches(examples, spec, 20 / towers as usize);
            let share = whole.iter().skip(tower as usize).step_by(towers as usize);
            prop_assert!(own.iter().zip(share).all(|(a, b)| a == b));
        }
    }
}

#[test]
fn continues_from_a_stored_position() {
    let whole = batches(10, SPEC, 12);
    let rest = batches(10, PipelineSpec { position: 7 * 4, threads: 3, ..SPEC }, 5);
    assert_eq!(whole[7..], rest);
}

#[test]
fn a_panic_becomes_an_error_after_the_batches_before_it() {
    for threads in 1..4 {
        let mut source = Numbers::new(10);
        source.panics_at = Some((1, 6));
        let spec = PipelineSpec { shuffle: false, threads, ..SPEC };
        let mut pipeline = InputPipeline::start(Arc::new(source), spec).unwrap();
        // Example 6 of epoch 1 is at position 16: in batch 4.
        for _ in 0..4 {
            pipeline.next().unwrap();
        }
        let error = pipeline.next().unwrap_err().to_string();
        assert!(error.contains("batch 4 of numbers"), "{error}");
        assert!(error.contains("example 6 is broken"), "{error}");
        for _ in 0..3 {
            let again = pipeline.next().unwrap_err().to_string();
            assert!(again.contains("batch 4"), "{again}");
        }
        assert_eq!(pipeline.position(), 16);
    }
}

#[test]
fn dropping_ends_the_threads_even_while_they_wait() {
    let ended = Arc::new(AtomicUsize::new(0));
    for taken in [0, 1, 9] {
        let mut source = Numbers::new(10);
        source.ended = ended.clone();
        let spec = PipelineSpec { threads: 3, depth: 3, ..SPEC };
        let mut pipeline = InputPipeline::start(Arc::new(source), spec).unwrap();
        (0..taken).for_each(|_| drop(pipeline.next().unwrap()));
    }
    // The threads held the last references to their sources.
    assert_eq!(ended.load(Ordering::SeqCst), 3);
}

#[test]
fn recycled_memory_is_used_again() {
    let spec = PipelineSpec { threads: 2, depth: 2, ..SPEC };
    let mut pipeline = InputPipeline::start(Arc::new(Numbers::new(10)), spec).unwrap();
    let mut places = std::collections::BTreeSet::new();
    for _ in 0..20_000 {
        let batch = pipeline.next().unwrap();
        places.insert(batch.features.as_ptr() as usize);
        pipeline.recycle(batch);
    }
    // One pack with the consumer, one waiting and one in hand per thread; small batches go in packs of 64.
    assert!(places.len() <= 5 * 64, "{}", places.len());
}

#[test]
fn a_batch_of_another_size_may_be_recycled() {
    let mut pipeline = InputPipeline::start(Arc::new(Numbers::new(10)), SPEC).unwrap();
    for _ in 0..20 {
        let batch = pipeline.next().unwrap();
        assert_eq!((batch.features.len(), batch.labels.len()), (8, 4));
        pipeline.recycle(Batch { features: vec![0.0; 3], labels: vec![0.0; 99] });
    }
}

#[test]
fn refuses_what_cannot_work() {
    let error = |examples, spec| {
        let source = Arc::new(Numbers::new(examples));
        InputPipeline::start(source, spec).err().expect("must be refused").to_string()
    };
    for examples in [0, 3] {
        let message = error(examples, SPEC);
        assert!(message.contains(&format!("numbers has {examples} examples")), "{message}");
    }
    for (setting, spec) in [
        ("batch = 0", PipelineSpec { batch: 0, ..SPEC }),
        ("stride = 0", PipelineSpec { stride: 0, ..SPEC }),
        ("threads = 0", PipelineSpec { threads: 0, ..SPEC }),
        ("depth = 0", PipelineSpec { depth: 0, ..SPEC }),
        ("depth = 1025", PipelineSpec { depth: 1025, ..SPEC }),
        ("stride x batch", PipelineSpec { stride: u64::MAX, ..SPEC }),
        ("position", PipelineSpec { position: u64::MAX, ..SPEC }),
    ] {
        let message = error(10, spec);
        assert!(message.contains(setting), "{message}");
    }
    let message = error(1 << 32, SPEC);
    assert!(message.contains("examples = 4294967296"), "{message}");
}
