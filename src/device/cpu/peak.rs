//! What the processor can do at most: the measure beside which kernels are shown.

use std::hint::black_box;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;

use super::simd::{MAX_LANES, multiversion};
use super::{Ctx, Precision, bf16};
use crate::util::clock::Clock;

/// The best of some tries.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    /// Fused multiply-adds in registers, or in bfloat16 products of tiles where these are more, two operations each, in GFLOP/s.
    pub gflops: f64,
    /// Bytes read and written by copies of 64 MiB, in GB/s.
    pub gbytes: f64,
    /// Nanoseconds until a thread sees what another wrote, with more than one: some tens where cores share a third-level cache,
    /// hundreds where they do not, and then whatever threads hand to each other takes longer.
    pub handover: Option<f64>,
}

/// Chains of multiply-adds that do not wait for each other.
const CHAINS: usize = 12;

multiversion! {
    fn chains<V>(rounds: usize) -> f32 {
        // SAFETY: only in the instruction set of `V`; stores go to as many floats as a vector has.
        unsafe {
            let (a, b) = (V::splat(black_box(0.999)), V::splat(black_box(0.001)));
            // Chains of equal values would be one to the compiler.
            let mut sums = [V::zero(); CHAINS];
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = V::splat(black_box(i as f32));
            }
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = V::mul_add(*sum, a, b);
                }
            }
            let mut last = [0.0; MAX_LANES];
            let sum = sums.into_iter().fold(V::zero(), |all, sum| V::add(all, sum));
            V::store_part(sum, &mut last);
            last[0]
        }
    }
}

multiversion! {
    fn lanes<V>() -> usize { V::LANES }
}

/// See [`Peaks::handover`]; `None` where there is no second thread to be had.
fn handover(clock: &dyn Clock) -> Option<f64> {
    const FREE: u8 = 0;
    const TAKEN: u8 = 1;
    const OVER: u8 = 2;
    const TRIES: usize = 100;
    const TIMES: usize = 100;
    let line = AtomicU8::new(FREE);
    let until = |wanted: &dyn Fn(u8) -> bool| {
        let mut spins = 0_u32;
        loop {
            let value = line.load(Ordering::Acquire);
            if wanted(value) {
                return value;
            }
            spins = spins.wrapping_add(1);
            // Who shares a core with the other must let it run.
            if spins.is_multiple_of(4096) {
                thread::yield_now();
            }
        }
    };
    thread::scope(|scope| {
        let answer = || {
            while until(&|value| value != FREE) == TAKEN {
                line.store(FREE, Ordering::Release);
            }
        };
        thread::Builder::new().spawn_scoped(scope, answer).ok()?;
        let mut best = f64::INFINITY;
        for _ in 0..TRIES {
            let start = clock.monotonic();
            for _ in 0..TIMES {
                line.store(TAKEN, Ordering::Release);
                until(&|value| value == FREE);
            }
            best = best.min((clock.monotonic() - start).as_secs_f64());
        }
        line.store(OVER, Ordering::Release);
        Some(best / (2 * TIMES) as f64 * 1e9)
    })
}

/// Measures for some tenths of a second, with all threads of `ctx`.
pub(super) fn measure(ctx: Ctx, precision: Precision, clock: &dyn Clock) -> Peaks {
    const ROUNDS: usize = 1 << 20;
    const TRIES: usize = 8;
    let best = |amount: f64, work: &mut dyn FnMut()| {
        let mut time = |_| {
            let start = clock.monotonic();
            work();
            (clock.monotonic() - start).as_secs_f64()
        };
        amount / (0..TRIES).map(&mut time).fold(f64::INFINITY, f64::min) / 1e9
    };
    let mut sums = vec![0.0; ctx.threads];
    let flops = (2 * CHAINS * lanes(ctx.isa) * ROUNDS * ctx.threads) as f64;
    let in_f32 = best(flops, &mut || {
        ctx.each(ctx.threads, [], [(&mut sums[..], 1)], |_, [], [sum]| {
            sum[0] = chains(ctx.isa, ROUNDS);
        });
    });
    let gflops = match precision {
        Precision::F32 => in_f32,
        // Some of a step in bf16 is computed in f32, and the emulation is slower than that.
        Precision::Bf16(unit) => {
            in_f32.max(best(bf16::peak::FLOPS * ctx.threads as f64, &mut || {
                ctx.each(ctx.threads, [], [(&mut sums[..], 1)], |_, [], [sum]| {
                    sum[0] = bf16::peak::products(unit);
                });
            }))
        }
    };
    let from = vec![1.0; 16 << 20];
    let mut to = vec![0.0; from.len()];
    let bytes = (2 * size_of::<f32>() * from.len()) as f64;
    let gbytes = best(bytes, &mut || {
        ctx.map(1, [&from], [&mut to], |[from], [to]| to.copy_from_slice(from));
        black_box(&to);
    });
    let handover = (ctx.threads > 1).then(|| handover(clock)).flatten();
    Peaks { gflops, gbytes, handover }
}
