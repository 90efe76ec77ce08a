//! A training step allocates nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use tftrain::config::RunConfig;
use tftrain::data::{Augmented, Source, Split, pictures};
use tftrain::model::{Cifar, compile};
use tftrain::train::{Part, Wanted, assemble};
use tftrain::util::clock::{Clock, SystemClock};

/// The system's allocator, which counts for each thread.
struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is the system allocator's own; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter any more.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_step_allocates_nothing() {
    let mut config = RunConfig::recipe("cifar10").unwrap();
    config.data.batch_size = 8;
    // One thread: everything but the input happens on this one.
    config.towers.threads = Some(1);
    config.towers.accumulate = 2;
    let compiled = Arc::new(compile(&Cifar { classes: 10, lrn: true }, 8).unwrap());
    let drawn = Arc::new(pictures(Split::Train, 100, 1));
    let source: Arc<dyn Source> = Arc::new(Augmented::new(drawn, 1));
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::default());
    let mut assembly = assemble(&config, &compiled, &source, None, &clock, Part::alone()).unwrap();
    let trainer = &mut assembly.trainers[0];
    for _ in 0..3 {
        trainer.step(Wanted::default()).unwrap();
    }
    let before = COUNT.get();
    for _ in 0..5 {
        trainer.step(Wanted::default()).unwrap();
    }
    assert_eq!(COUNT.get() - before, 0);
}
