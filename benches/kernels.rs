//! Times the kernels of the CIFAR-10 tutorial network and of residual ones at batch 128.
#![allow(clippy::print_stdout, reason = "a report")]

use std::hint::black_box;
use std::time::Duration;

use tftrain::device::Slab;
use tftrain::device::cpu::bf16::{self, Unit};
use tftrain::device::cpu::conv::{self, Conv};
use tftrain::device::cpu::gemm::{Matmul, matmul, matmul_scratch};
use tftrain::device::cpu::norm::{self, lrn, lrn_grad};
use tftrain::device::cpu::unpool::OutputGrad;
use tftrain::device::cpu::{
    CpuDevice, Ctx, Epilogue, Isa, elementwise, pool, reduce, update, winograd,
};
use tftrain::graph::{LrnParams, Padding, Window};
use tftrain::util::clock::{Clock, SystemClock};
use tftrain::util::rng::{Purpose, Stream};

fn random(len: usize, index: u64) -> Vec<f32> {
    let mut stream = Stream::new(1, Purpose::Test, index);
    (0..len).map(|_| stream.range(-1.0, 1.0)).collect()
}

/// As a program's: its rows begin at cache lines.
fn memory(len: usize) -> Slab {
    Slab::host(len).expect("there is memory for a few kernels")
}

struct Bench {
    clock: SystemClock,
    ctx: Ctx,
    peak: f64,
    batch: usize,
}

impl Bench {
    /// The best of half a second of repetitions: the machine is shared.
    fn run(&self, name: &str, flops: f64, mut f: impl FnMut()) {
        f();
        let mut times = Vec::new();
        let begin = self.clock.monotonic();
        while self.clock.monotonic() - begin < Duration::from_millis(500) || times.len() < 5 {
            let start = self.clock.monotonic();
            f();
            times.push((self.clock.monotonic() - start).as_secs_f64());
        }
        let time = times.into_iter().fold(f64::INFINITY, f64::min);
        let rate = flops / time / 1e9;
        let share = 100.0 * rate / self.peak;
        println!("  {name:28} {:8.3} ms {rate:8.1} GFLOP/s {share:5.0} %", time * 1e3);
    }

    fn conv(&self, name: &str, extent: usize, kernel: usize, ins: usize, outs: usize) {
        let window = Window::new([extent; 2], [kernel; 2], [1; 2], Padding::Same).expect("it fits");
        let n = self.batch;
        let conv = Conv { n, in_channels: ins, out_channels: outs, window };
        let (x, dy) = (random(n * extent * extent * ins, 1), random(n * extent * extent * outs, 2));
        let (w, bias) = (random(kernel * kernel * ins * outs, 3), random(outs, 4));
        let (mut y, mut dx, mut dw) = (vec![0.0; dy.len()], vec![0.0; x.len()], vec![0.0; w.len()]);
        let flops = (2 * w.len() * n * extent * extent) as f64;
        let ctx = self.ctx;
        let grad = OutputGrad::Dense(&dy);
        let needs = [
            conv::forward_scratch(ctx, &conv),
            conv::input_grad_scratch(ctx, &conv),
            conv::filter_grad_scratch(ctx, &conv, &grad),
            winograd::forward_scratch(ctx, &conv),
            winograd::input_grad_scratch(ctx, &conv),
            winograd::filter_grad_scratch(ctx, &conv, &grad),
            bf16::conv::forward_scratch(ctx, &conv),
            bf16::conv::input_grad_scratch(ctx, &conv),
            bf16::conv::filter_grad_scratch(&conv, &grad),
        ];
        let mut scratch = memory(needs.into_iter().max().unwrap_or(0));
        let scratch = scratch.as_host_mut().unwrap_or_default();
        let epilogue = Epilogue::BiasRelu(&bias);
        self.run(&format!("{name} forward + relu"), flops, || {
            conv::forward(ctx, &conv, &x, &w, epilogue, &mut y, scratch);
        });
        self.run(&format!("{name} input gradient"), flops, || {
            conv::input_grad(ctx, &conv, &dy, &w, &mut dx, scratch);
        });
        self.run(&format!("{name} filter gradient"), flops, || {
            conv::filter_grad(ctx, &conv, &x, grad, &mut dw, scratch);
        });
        self.run("  Winograd forward + relu", flops, || {
            winograd::forward(ctx, &conv, &x, &w, epilogue, &mut y, scratch);
        });
        self.run("  Winograd input gradient", flops, || {
            winograd::input_grad(ctx, &conv, &dy, &w, &mut dx, scratch);
        });
        self.run("  Winograd filter gradient", flops, || {
            winograd::filter_grad(ctx, &conv, &x, grad, &mut dw, scratch);
        });
        let unit = Unit::detect();
        self.run(&format!("  {unit} forward + relu"), flops, || {
            bf16::conv::forward(ctx, unit, &conv, &x, &w, epilogue, &mut y, scratch);
        });
        self.run(&format!("  {unit} input gradient"), flops, || {
            bf16::conv::input_grad(ctx, unit, &conv, &dy, &w, &mut dx, scratch);
        });
        self.run(&format!("  {unit} filter gradient"), flops, || {
            bf16::conv::filter_grad(ctx, unit, &conv, &x, grad, &mut dw, scratch);
        });
    }

    fn batch_norm(&self, extent: usize, channels: usize) {
        let len = self.batch * extent * extent * channels;
        let (x, dy, scale) = (random(len, 1), random(len, 2), random(channels, 3));
        let (mut out, mut moments, mut sums) =
            (vec![0.0; len], vec![0.0; 2 * channels], vec![0.0; 2 * channels]);
        let mut scratch = vec![0.0; norm::batch_norm_scratch(channels)];
        let (ctx, scratch, epsilon) = (self.ctx, &mut scratch[..], 1e-5);
        self.run(&format!("moments, {channels} channels"), len as f64, || {
            norm::moments(ctx, &x, &mut moments, scratch);
        });
        self.run(&format!("batch norm, {channels}"), len as f64, || {
            norm::batch_norm(ctx, epsilon, &x, &moments, &scale, &scale, &mut out, scratch);
        });
        self.run(&format!("batch norm sums, {channels}"), len as f64, || {
            norm::batch_norm_sums(ctx, epsilon, &x, &moments, &dy, &mut sums, scratch);
        });
        self.run(&format!("batch norm gradient, {channels}"), len as f64, || {
            let out = &mut out;
            norm::batch_norm_input_grad(
                ctx, epsilon, &x, &moments, &scale, &dy, &sums, out, scratch,
            );
        });
    }

    fn matmul(&self, name: &str, p: Matmul) {
        let (a, b, bias) = (random(p.m * p.k, 1), random(p.k * p.n, 2), random(p.n, 3));
        let mut out = vec![0.0; p.m * p.n];
        let unit = Unit::detect();
        let needs = [matmul_scratch(self.ctx, &p), bf16::gemm::matmul_scratch(self.ctx, &p)];
        let mut scratch = memory(needs[0].max(needs[1]));
        let scratch = scratch.as_host_mut().unwrap_or_default();
        let epilogue =
            if p.trans_a || p.trans_b { Epilogue::None } else { Epilogue::BiasRelu(&bias) };
        self.run(name, (2 * p.m * p.k * p.n) as f64, || {
            matmul(self.ctx, &p, &a, &b, epilogue, &mut out, scratch);
        });
        self.run(&format!("  {unit}"), (2 * p.m * p.k * p.n) as f64, || {
            bf16::gemm::matmul(self.ctx, unit, &p, &a, &b, epilogue, &mut out, scratch);
        });
    }

    fn all(&self) {
        let ctx = self.ctx;
        let (isa, threads, batch) = (ctx.isa, ctx.threads, self.batch);
        println!("{isa}, {threads} threads, batch {batch}, peak {:.0} GFLOP/s in f32", self.peak);
        self.conv("conv1", 24, 5, 3, 64);
        self.conv("conv2", 12, 5, 64, 64);
        for (extent, channels) in [(32, 16), (16, 32), (8, 64)] {
            self.conv(&format!("3x3, {channels} to {channels}"), extent, 3, channels, channels);
        }
        for (extent, channels) in [(32, 16), (16, 32), (8, 64)] {
            self.batch_norm(extent, channels);
        }
        let (n, c) = (self.batch, 64);
        let x = random(n * 24 * 24 * c, 5);
        let mut wide = vec![0.0; x.len()];
        let w = Window::new([24; 2], [3; 2], [2; 2], Padding::Same).expect("it fits");
        let mut y = vec![0.0; n * 144 * c];
        let dy = random(y.len(), 6);
        self.run("pool1", (9 * y.len()) as f64, || pool::max_pool(ctx, &w, n, c, &x, &mut y));
        self.run("pool1 gradient", (9 * y.len()) as f64, || {
            pool::max_pool_grad(ctx, &w, n, c, false, &x, &y, &dy, &mut wide);
        });
        let p = LrnParams { radius: 4, bias: 1.0, alpha: 0.001 / 9.0, beta: 0.75 };
        self.run("lrn1 (12 x 12)", 15.0 * dy.len() as f64, || lrn(ctx, &p, c, &dy, &mut y));
        let mut dx = vec![0.0; y.len()];
        self.run("lrn1 gradient (12 x 12)", 30.0 * dy.len() as f64, || {
            lrn_grad(ctx, &p, c, false, &dy, &y, &mut dx);
        });
        self.run("relu gradient (24 x 24)", x.len() as f64, || {
            elementwise::relu_grad(ctx, &x, &x, &mut wide);
        });
        let (mut bias, mut scratch) = (vec![0.0; c], vec![0.0; reduce::column_sums_scratch(c)]);
        self.run("bias gradient (24 x 24)", x.len() as f64, || {
            reduce::column_sums(ctx, c, &x, &mut bias, &mut scratch);
        });
        let p = Matmul { m: n, k: 2304, n: 384, trans_a: false, trans_b: false };
        self.matmul("fc1 forward + relu", p);
        self.matmul("fc1 weight gradient", Matmul { m: 2304, k: n, n: 384, trans_a: true, ..p });
        self.matmul("fc1 input gradient", Matmul { m: n, k: 384, n: 2304, trans_b: true, ..p });
        let g = random(1_068_298, 7);
        let (mut params, mut averages) = (g.clone(), g.clone());
        let rule = update::Rule { rate: 0.1, average_decay: Some(0.99), ..Default::default() };
        self.run("sgd + average", 5.0 * g.len() as f64, || {
            update::apply(ctx, &rule, &mut params, &g, None, Some(&mut averages));
        });
        self.run("sum of squares", 2.0 * g.len() as f64, || {
            black_box(reduce::sum_squares(ctx, &g));
        });
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `cargo bench --bench kernels -- AVX-512 1 batch=8`: a smaller batch finds quiet moments on a busy machine.
    let mut only: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let mut batch = 128;
    only.retain(|arg| match arg.strip_prefix("batch=").and_then(|n| n.parse().ok()) {
        Some(n) => {
            batch = n;
            false
        }
        None => true,
    });
    for isa in Isa::available().into_iter().rev().filter(|isa| *isa != Isa::Portable) {
        for threads in [1, 2] {
            if !only.iter().all(|o| *o == isa.to_string() || *o == threads.to_string()) {
                continue;
            }
            let clock = SystemClock::default();
            let peak = CpuDevice::with_isa(0, threads, isa)?.peaks(&clock).gflops;
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
            let bench = Bench { clock, ctx: Ctx { isa, threads }, peak, batch };
            pool.install(|| bench.all());
        }
    }
    Ok(())
}
