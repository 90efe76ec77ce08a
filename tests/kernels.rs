//! Every CPU kernel against the reference, with the same bits on every instruction set and number of threads.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "kernels/convolutions.rs"]
mod convolutions;
mod support;

use std::sync::OnceLock;

use convolutions::check_conv;
use proptest::prelude::*;
use rayon::ThreadPool;
use support::reference;
use tftrain::device::cpu::conv::{self, Conv};
use tftrain::device::cpu::depthwise::{self, Depthwise};
use tftrain::device::cpu::gemm::{Matmul, matmul, matmul_scratch};
use tftrain::device::cpu::norm;
use tftrain::device::cpu::unpool::{OutputGrad, Unpool, max_pool_winners, winners_len};
use tftrain::device::cpu::{
    Ctx, Epilogue, Isa, elementwise, pool, reduce, softmax, update, winograd,
};
use tftrain::graph::{LrnParams, Padding, Window};
use tftrain::util::rng::{Purpose, Stream};

fn random(len: usize, index: u64) -> Vec<f32> {
    let mut stream = Stream::new(3, Purpose::Test, index);
    (0..len).map(|_| stream.range(-1.0, 1.0)).collect()
}

/// Few different values, so that maxima tie.
fn coarse(len: usize, index: u64) -> Vec<f32> {
    random(len, index).iter().map(|v| (v * 3.0).round()).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| f64::from(*v)).collect()
}

fn pools() -> &'static [ThreadPool] {
    static POOLS: OnceLock<Vec<ThreadPool>> = OnceLock::new();
    POOLS.get_or_init(|| {
        let pool =
            |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads start");
        (1..=3).map(pool).collect()
    })
}

/// Runs a kernel everywhere and compares bits; then the first result with the reference, relative to its largest
/// value. `kernel` fills an output of the reference's length, which starts with garbage.
#[track_caller]
fn check(name: &str, expected: &[f64], tolerance: f64, kernel: impl Fn(Ctx, &mut [f32]) + Sync) {
    let mut first: Option<Vec<f32>> = None;
    for isa in Isa::available() {
        for (pool, threads) in pools().iter().zip(1..) {
            let mut out = vec![f32::NAN; expected.len()];
            pool.install(|| kernel(Ctx { isa, threads }, &mut out));
            let first = first.get_or_insert_with(|| out.clone());
            let same = first.iter().zip(&out).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{name}: {isa} with {threads} threads differs");
        }
    }
    let largest = expected.iter().fold(1e-30f64, |m, v| m.max(v.abs()));
    for (i, (e, o)) in expected.iter().zip(first.expect("there is a portable one")).enumerate() {
        let error = (e - f64::from(o)).abs() / largest;
        assert!(error <= tolerance, "{name}: element {i} is {o}, not {e}");
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn scratch(len: usize) -> Vec<f32> {
    vec![f32::NAN; len]
}

/// Odd extents, strides and both paddings.
fn windows() -> Vec<Window> {
    let mut all = Vec::new();
    for (input, kernel, stride) in [
        ([7, 5], [3, 3], [1, 1]),
        ([12, 13], [5, 5], [1, 1]),
        ([9, 6], [3, 2], [2, 2]),
        ([8, 11], [1, 1], [2, 3]),
        ([6, 27], [2, 5], [3, 1]),
        ([11, 10], [4, 3], [1, 4]),
        ([3, 2], [3, 2], [1, 1]),
        ([1, 1], [1, 1], [1, 1]),
        ([7, 7], [2, 2], [3, 3]),
        ([4, 4], [7, 5], [2, 1]),
    ] {
        for padding in [Padding::Same, Padding::Valid] {
            all.extend(Window::new(input, kernel, stride, padding));
        }
    }
    all
}

fn check_depthwise(n: usize, channels: usize, multiplier: usize, window: Window) {
    let shape = Depthwise { n, channels, multiplier, window };
    let naive = reference::Conv { n, ins: channels, outs: multiplier, window };
    let x = random(n * window.input[0] * window.input[1] * channels, 1);
    let w = random(window.kernel[0] * window.kernel[1] * channels * multiplier, 2);
    let dy = random(n * window.output[0] * window.output[1] * channels * multiplier, 3);
    let (wx, ww, wdy) = (wide(&x), wide(&w), wide(&dy));
    check(&format!("{shape:?}"), &reference::conv(&naive, true, &wx, &ww), 1e-5, |ctx, out| {
        depthwise::forward(ctx, &shape, &x, &w, out);
    });
    let dx = reference::conv_input_grad(&naive, true, &wdy, &ww);
    check(&format!("input gradient, {shape:?}"), &dx, 1e-5, |ctx, out| {
        depthwise::input_grad(ctx, &shape, &dy, &w, out);
    });
    let dw = reference::conv_filter_grad(&naive, true, &wx, &wdy);
    check(&format!("filter gradient, {shape:?}"), &dw, 1e-5, |ctx, out| {
        depthwise::filter_grad(
            ctx,
            &shape,
            &x,
            &dy,
            out,
            &mut scratch(depthwise::filter_grad_scratch(&shape)),
        );
    });
}

#[test]
fn depthwise_convolutions() {
    for (i, window) in windows().into_iter().enumerate() {
        check_depthwise([2, 9, 17][i % 3], [3, 19, 33][i % 3], 1 + i % 2 * 2, window);
    }
}

fn check_matmul(m: usize, k: usize, n: usize) {
    let (a, b, bias) = (random(m * k, 1), random(k * n, 2), random(n, 3));
    for (trans_a, trans_b) in [(false, false), (true, false), (false, true), (true, true)] {
        let p = Matmul { m, k, n, trans_a, trans_b };
        let y = reference::matmul([m, k, n], trans_a, trans_b, &wide(&a), &wide(&b));
        let biased = reference::bias_add(&y, &wide(&bias));
        for (expected, epilogue) in [
            (&y, Epilogue::None),
            (&biased, Epilogue::Bias(&bias)),
            (&reference::relu(&biased), Epilogue::BiasRelu(&bias)),
        ] {
            check(&format!("{p:?}"), expected, 1e-5, |ctx, out| {
                matmul(ctx, &p, &a, &b, epilogue, out, &mut scratch(matmul_scratch(ctx, &p)));
            });
        }
    }
}

#[test]
fn products() {
    for [m, k, n] in [
        [1, 1, 1],
        [3, 5, 7],
        [13, 300, 33],
        [25, 17, 64],
        [128, 40, 10],
        [7, 129, 100],
        [30, 0, 100],
        [1, 513, 200],
        [100, 64, 48],
    ] {
        check_matmul(m, k, n);
    }
}

#[test]
fn pools_of_maxima() {
    for (i, w) in windows().into_iter().enumerate() {
        let (n, c) = ([2, 9][i % 2], [3, 70, 16][i % 3]);
        let x = coarse(n * w.input[0] * w.input[1] * c, 1);
        let dy = random(n * w.output[0] * w.output[1] * c, 2);
        let expected = reference::max_pool(&w, n, c, &wide(&x));
        check(&format!("{w:?}"), &expected, 0.0, |ctx, out| pool::max_pool(ctx, &w, n, c, &x, out));
        let y: Vec<f32> = expected.iter().map(|v| *v as f32).collect();
        let dx = reference::max_pool_grad(&w, n, c, &wide(&x), &wide(&dy));
        check(&format!("gradient, {w:?}"), &dx, 1e-6, |ctx, out| {
            pool::max_pool_grad(ctx, &w, n, c, false, &x, &y, &dy, out);
        });
        let cut: Vec<f32> = x.iter().map(|v| v.max(0.0)).collect();
        let y: Vec<f32> =
            reference::max_pool(&w, n, c, &wide(&cut)).iter().map(|v| *v as f32).collect();
        let mut winners = vec![f32::NAN; n * winners_len(&w, c)];
        let expected = reference::max_pool(&w, n, c, &wide(&cut));
        check(&format!("maxima and winners, {w:?}"), &expected, 0.0, |ctx, out| {
            let mut winners = winners.clone();
            max_pool_winners(ctx, &w, n, c, &cut, out, &mut winners);
        });
        let ctx = Ctx { isa: Isa::detect(), threads: 1 };
        max_pool_winners(ctx, &w, n, c, &cut, &mut vec![0.0; y.len()], &mut winners);
        // A convolution of one tap and one channel, with the pool above it.
        let window = Window::new(w.input, [1, 1], [1, 1], Padding::Valid).unwrap();
        let conv = Conv { n, in_channels: 1, out_channels: c, window };
        let x = random(n * w.input[0] * w.input[1], 3);
        let naive = reference::Conv { n, ins: 1, outs: c, window };
        let dx = reference::max_pool_grad(&w, n, c, &wide(&cut), &wide(&dy));
        let dx: Vec<f64> =
            dx.iter().zip(&cut).map(|(d, x)| if *x > 0.0 { *d } else { 0.0 }).collect();
        let dw = reference::conv_filter_grad(&naive, false, &wide(&x), &dx);
        let unpool = Unpool { window: &w, channels: c, y: &y, dy: &dy, winners: &winners };
        check(&format!("filter gradient below a pool, {w:?}"), &dw, 1e-5, |ctx, out| {
            let grad = OutputGrad::Pooled(unpool);
            let mut scratch = scratch(conv::filter_grad_scratch(ctx, &conv, &grad));
            conv::filter_grad(ctx, &conv, &x, grad, out, &mut scratch);
        });
        let dx = reference::max_pool_grad(&w, n, c, &wide(&cut), &wide(&dy));
        let dx: Vec<f64> =
            dx.iter().zip(&cut).map(|(d, x)| if *x > 0.0 { *d } else { 0.0 }).collect();
        check(&format!("gradient through a relu, {w:?}"), &dx, 1e-6, |ctx, out| {
            pool::max_pool_grad(ctx, &w, n, c, true, &cut, &y, &dy, out);
        });
    }
}

#[test]
fn pools_of_means() {
    for (i, w) in windows().into_iter().enumerate() {
        let (n, c) = ([2, 9][i % 2], [3, 70, 16][i % 3]);
        let x = random(n * w.input[0] * w.input[1] * c, 1);
        let dy = random(n * w.output[0] * w.output[1] * c, 2);
        check(&format!("{w:?}"), &reference::avg_pool(&w, n, c, &wide(&x)), 1e-6, |ctx, out| {
            pool::avg_pool(ctx, &w, n, c, &x, out);
        });
        check(
            &format!("gradient, {w:?}"),
            &reference::avg_pool_grad(&w, n, c, &wide(&dy)),
            1e-6,
            |ctx, out| {
                pool::avg_pool_grad(ctx, &w, n, c, &dy, out);
            },
        );
    }
}

#[test]
fn a_pool_hands_on_nan_and_minus_infinity() {
    let w = Window::new([1, 4], [1, 2], [1, 2], Padding::Same).unwrap();
    let ctx = Ctx { isa: Isa::detect(), threads: 1 };
    let mut y = [0.0; 2];
    pool::max_pool(ctx, &w, 1, 1, &[f32::NAN, 1.0, f32::NEG_INFINITY, f32::NEG_INFINITY], &mut y);
    assert!(y[0].is_nan());
    assert_eq!(y[1], f32::NEG_INFINITY);
}

#[test]
fn local_response_normalisation() {
    for (channels, radius, beta) in [
        (64, 4, 0.75),
        (7, 2, 0.75),
        (1, 1, 0.5),
        (33, 40, 0.5),
        (600, 5, 0.75),
        (1100, 128, 0.6),
        (20, 0, 1.0),
    ] {
        let p = LrnParams { radius, bias: 1.5, alpha: 0.3, beta };
        let naive = reference::Lrn {
            radius,
            bias: 1.5,
            alpha: f64::from(p.alpha),
            beta: f64::from(p.beta),
        };
        let rows = if channels == 64 { 700 } else { 5 };
        let (x, dy) = (random(rows * channels, 1), random(rows * channels, 2));
        let y = reference::lrn(&naive, channels, &wide(&x));
        check(&format!("{p:?}"), &y, 2e-6, |ctx, out| norm::lrn(ctx, &p, channels, &x, out));
        let dx = reference::lrn_grad(&naive, channels, &wide(&x), &wide(&dy));
        check(&format!("gradient, {p:?}"), &dx, 5e-6, |ctx, out| {
            norm::lrn_grad(ctx, &p, channels, false, &x, &dy, out);
        });
        let cut: Vec<f32> = x.iter().map(|v| v.max(0.0)).collect();
        let dx = reference::lrn_grad(&naive, channels, &wide(&cut), &wide(&dy));
        let dx: Vec<f64> =
            dx.iter().zip(&cut).map(|(d, x)| if *x > 0.0 { *d } else { 0.0 }).collect();
        check(&format!("gradient through a relu, {p:?}"), &dx, 5e-6, |ctx, out| {
            norm::lrn_grad(ctx, &p, channels, true, &cut, &dy, out);
        });
    }
}

#[test]
fn batch_normalisation() {
    for (rows, channels) in [(5, 3), (1000, 33), (37, 64), (1, 2)] {
        let (x, dy) = (random(rows * channels, 1), random(rows * channels, 2));
        let (scale, offset) = (random(channels, 3), random(channels, 4));
        let (epsilon, size) = (1e-3, norm::batch_norm_scratch(channels));
        let (mean, variance) = reference::moments(channels, &wide(&x));
        let expected = [mean, variance].concat();
        check("moments", &expected, 1e-5, |ctx, out| {
            norm::moments(ctx, &x, out, &mut scratch(size))
        });
        let moments: Vec<f32> = expected.iter().map(|v| *v as f32).collect();
        let wide_epsilon = f64::from(epsilon);
        let y = reference::batch_norm(wide_epsilon, &wide(&scale), &wide(&offset), &wide(&x));
        check("batch norm", &y, 1e-5, |ctx, out| {
            let scratch = &mut scratch(size);
            norm::batch_norm(ctx, epsilon, &x, &moments, &scale, &offset, out, scratch);
        });
        let [dx, by_scale, by_offset] =
            reference::batch_norm_grad(wide_epsilon, &wide(&scale), &wide(&x), &wide(&dy));
        let sums = [by_scale, by_offset].concat();
        check("batch norm, sums of the gradient", &sums, 1e-5, |ctx, out| {
            norm::batch_norm_sums(ctx, epsilon, &x, &moments, &dy, out, &mut scratch(size));
        });
        let sums: Vec<f32> = sums.iter().map(|v| *v as f32).collect();
        check("batch norm gradient", &dx, 1e-5, |ctx, out| {
            let scratch = &mut scratch(size);
            norm::batch_norm_input_grad(
                ctx, epsilon, &x, &moments, &scale, &dy, &sums, out, scratch,
            );
        });
    }
}

#[test]
fn cross_entropies() {
    for (rows, classes) in [(128, 10), (3, 1), (40, 1001)] {
        let logits: Vec<f32> = random(rows * classes, 1).iter().map(|v| v * 20.0).collect();
        let upstream = random(rows, 2);
        let labels: Vec<usize> = (0..rows).map(|i| i * 7 % classes).collect();
        let narrow: Vec<f32> = labels.iter().map(|v| *v as f32).collect();
        let losses = reference::cross_entropy(classes, &wide(&logits), &labels);
        check("cross entropy", &losses, 1e-6, |ctx, out| {
            softmax::cross_entropy(ctx, classes, &logits, &narrow, out);
        });
        let d = reference::cross_entropy_grad(classes, &wide(&upstream), &wide(&logits), &labels);
        check("cross entropy gradient", &d, 1e-5, |ctx, out| {
            softmax::cross_entropy_grad(ctx, classes, &upstream, &logits, &narrow, out);
        });
    }
}

#[test]
fn labels_that_are_no_class_give_nan() {
    let ctx = Ctx { isa: Isa::detect(), threads: 1 };
    let labels = [-1.0, 2.0, f32::NAN, f32::INFINITY, 1.0];
    let (mut losses, mut d) = ([0.0; 5], [0.0; 10]);
    softmax::cross_entropy(ctx, 2, &[0.0; 10], &labels, &mut losses);
    softmax::cross_entropy_grad(ctx, 2, &[1.0; 5], &[0.0; 10], &labels, &mut d);
    assert!(losses[..4].iter().chain(&d[..8]).all(|v| v.is_nan()));
    assert_eq!((losses[4], d[9]), (2f32.ln(), -0.5));
}

#[test]
fn elements() {
    for len in [1, 15, 64, 40_001] {
        let (a, b) = (coarse(len, 1), random(len, 2));
        let (wa, wb) = (wide(&a), wide(&b));
        let zip =
            |f: fn(f64, f64) -> f64| wa.iter().zip(&wb).map(|(a, b)| f(*a, *b)).collect::<Vec<_>>();
        check("add", &zip(|a, b| a + b), 1e-6, |c, out| elementwise::add(c, &a, &b, out));
        check("sub", &zip(|a, b| a - b), 1e-6, |c, out| elementwise::sub(c, &a, &b, out));
        check("mul", &zip(|a, b| a * b), 1e-6, |c, out| elementwise::mul(c, &a, &b, out));
        check("square", &zip(|_, b| b * b), 1e-6, |c, out| elementwise::square(c, &b, out));
        check("scale", &zip(|_, b| b * 0.5), 1e-6, |c, out| elementwise::scale(c, 0.5, &b, out));
        check("fill", &zip(|_, _| 7.0), 0.0, |c, out| elementwise::fill(c, 7.0, out));
        check("relu", &zip(|_, b| b.max(0.0)), 0.0, |c, out| elementwise::relu(c, &b, out));
        let masked = zip(|a, b| if a > 0.0 { b } else { 0.0 });
        check("relu gradient", &masked, 0.0, |c, out| elementwise::relu_grad(c, &b, &a, out));
        check("add scaled", &zip(|a, b| a + 0.3f32 as f64 * b), 1e-6, |c, out| {
            out.copy_from_slice(&a);
            elementwise::add_scaled(c, 0.3, &b, out);
        });
    }
    for (rows, columns) in [(3, 5), (1000, 64), (1, 17)] {
        let (x, bias) = (random(rows * columns, 1), random(columns, 2));
        let y = reference::bias_add(&wide(&x), &wide(&bias));
        check("bias", &y, 1e-6, |c, out| elementwise::bias_add(c, &x, &bias, out));
        check("bias + relu", &reference::relu(&y), 1e-6, |c, out| {
            elementwise::bias_add_relu(c, &x, &bias, out);
        });
    }
}

#[test]
fn sums() {
    for len in [0, 1, 63, 100_003] {
        let x = random(len, 1);
        let (total, squares) = (wide(&x).iter().sum(), wide(&x).iter().map(|v| v * v).sum());
        check("sum", &[total], 1e-4, |c, out| out[0] = reduce::sum(c, &x));
        check("sum of squares", &[squares], 1e-6, |c, out| out[0] = reduce::sum_squares(c, &x));
    }
    for (rows, columns) in [(1, 1), (5, 3), (2000, 70), (17, 10)] {
        let x = random(rows * columns, 1);
        let size = reduce::column_sums_scratch(columns);
        let y = random(x.len(), 9);
        let kept: Vec<f32> =
            x.iter().zip(&y).map(|(x, y)| if *y > 0.0 { *x } else { 0.0 }).collect();
        check(
            "positive column sums",
            &reference::column_sums(columns, &wide(&kept)),
            1e-6,
            |c, out| {
                reduce::positive_column_sums(c, columns, &x, &y, out, &mut scratch(size));
            },
        );
        check("column sums", &reference::column_sums(columns, &wide(&x)), 1e-6, |c, out| {
            reduce::column_sums(c, columns, &x, out, &mut scratch(size));
        });
        let means: Vec<f64> =
            wide(&x).chunks(columns).map(|r| r.iter().sum::<f64>() / columns as f64).collect();
        check("row means", &means, 1e-6, |c, out| reduce::row_means(c, columns, &x, out));
    }
}

#[test]
fn tower_means_add_in_a_fixed_tree() {
    let slabs: Vec<Vec<f32>> = (0..9).map(|i| random(40_003, i)).collect();
    for n in 1..=slabs.len() {
        let inputs: Vec<&[f32]> = slabs[..n].iter().map(Vec::as_slice).collect();
        let mean = |i: usize| inputs.iter().map(|s| f64::from(s[i])).sum::<f64>() / n as f64;
        let expected: Vec<f64> = (0..slabs[0].len()).map(mean).collect();
        check("mean of towers", &expected, 1e-6, |c, out| {
            reduce::tree_sum(c, n, |i| inputs[i], 1.0 / n as f32, out);
        });
    }
    let ctx = Ctx { isa: Isa::detect(), threads: 1 };
    let [a, b, c, d, e] = [1.0f32, 1e-7, 3e-8, 6e-8, -1.0];
    let mut out = [0.0];
    let slabs = [[a], [b], [c], [d], [e]];
    reduce::tree_sum(ctx, 5, |i| &slabs[i], 1.0 / 5.0, &mut out);
    assert_eq!(out[0], (((a + b) + (c + d)) + e) * (1.0 / 5.0));
    reduce::tree_sum(ctx, 1, |_| &[0.3], 1.0, &mut out);
    assert_eq!(out[0], 0.3);
}

#[test]
fn optimizer_steps() {
    let len = 40_001;
    let (params, slots, averages, grads) =
        (random(len, 1), random(len, 2), random(len, 3), random(len, 4));
    for (momentum, nesterov, clip) in [
        (Some(0.9), false, None),
        (Some(0.9), true, Some(0.5)),
        (None, false, Some(0.25)),
        (None, false, None),
    ] {
        let rule = update::Rule {
            rate: 0.1,
            momentum: momentum.unwrap_or(0.0),
            nesterov,
            clip,
            average_decay: Some(0.99),
        };
        let mut state = reference::State {
            params: wide(&params),
            slots: wide(&slots),
            averages: wide(&averages),
        };
        let m = f64::from(rule.momentum);
        let (rate, decay) = (f64::from(rule.rate), f64::from(0.99f32));
        state.step(rate, m, nesterov, clip.map(f64::from), decay, &wide(&grads));
        let expected_slots = if momentum.is_some() { state.slots } else { wide(&slots) };
        let expected = [state.params, expected_slots, state.averages].concat();
        check(&format!("{rule:?}"), &expected, 1e-6, |ctx, out| {
            out.copy_from_slice(&[&params[..], &slots, &averages].concat());
            let (p, rest) = out.split_at_mut(len);
            let (s, a) = rest.split_at_mut(len);
            update::apply(ctx, &rule, p, &grads, momentum.map(|_| s), Some(a));
        });
    }
    let plain: Vec<f64> =
        wide(&params).iter().zip(wide(&grads)).map(|(p, g)| p - f64::from(0.1f32) * g).collect();
    check("sgd", &plain, 1e-6, |ctx, out| {
        out.copy_from_slice(&params);
        update::sgd(ctx, 0.1, &grads, out);
    });
}

#[test]
fn nan_survives_relu() {
    let ctx = Ctx { isa: Isa::detect(), threads: 1 };
    let mut out = [0.0; 3];
    elementwise::relu(ctx, &[f32::NAN, -1.0, 2.0], &mut out);
    assert!(out[0].is_nan() && out[1..] == [0.0, 2.0]);
    let p = Matmul { m: 1, k: 1, n: 40, trans_a: false, trans_b: false };
    let mut out = [0.0; 40];
    let scratch = &mut scratch(matmul_scratch(ctx, &p));
    matmul(ctx, &p, &[f32::NAN], &[1.0; 40], Epilogue::BiasRelu(&[0.0; 40]), &mut out, scratch);
    assert!(out.iter().all(|v| v.is_nan()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_convolution(
        input in [1usize..9, 1usize..16], kernel in [1usize..5, 1usize..5], stride in [1usize..4, 1usize..4],
        same: bool, n in 1usize..4, ins in 1usize..9, outs in 1usize..40,
    ) {
        let padding = if same { Padding::Same } else { Padding::Valid };
        if let Some(window) = Window::new(input, kernel, stride, padding) {
            check_conv(n, ins, outs, window);
            check_depthwise(n, ins, 1 + outs % 3, window);
        }
    }

    #[test]
    fn any_product(m in 1usize..30, k in 1usize..300, n in 1usize..70) {
        check_matmul(m, k, n);
    }
}
