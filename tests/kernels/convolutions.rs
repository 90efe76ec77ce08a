//! Convolutions: direct and in tiles, alone and below a pool, each against a naive loop.

use tftrain::device::cpu::bf16::{Unit, conv::lead};

use super::*;

type Forward = fn(Ctx, &Conv, &[f32], &[f32], Epilogue<'_>, &mut [f32], &mut [f32]);
type Gradient = fn(Ctx, &Conv, &[f32], &[f32], &mut [f32], &mut [f32]);
type Scratch = fn(Ctx, &Conv) -> usize;

/// One way to convolve: the kernels, each with its scratch, and the largest error of each.
struct Way {
    name: &'static str,
    forward: (Forward, Scratch, f64),
    input_grad: (Gradient, Scratch, f64),
    filter_grad: (Gradient, Scratch, f64),
}

const DIRECT: Way = Way {
    name: "direct",
    forward: (conv::forward, conv::forward_scratch, 1e-5),
    input_grad: (conv::input_grad, conv::input_grad_scratch, 1e-5),
    filter_grad: (
        |ctx, conv, x, dy, dw, scratch| {
            conv::filter_grad(ctx, conv, x, OutputGrad::Dense(dy), dw, scratch);
        },
        |ctx, conv| conv::filter_grad_scratch(ctx, conv, &OutputGrad::Dense(&[])),
        1e-5,
    ),
};

/// Over the shapes below the direct kernels err by up to 1.6e-6, in the filter gradient 2.0e-6; these by 6.8e-6 and 2.4e-5,
/// as transforms add and subtract values of different sizes. The bounds are 6 and 20 times the direct errors.
const WINOGRAD: Way = Way {
    name: "winograd",
    forward: (winograd::forward, winograd::forward_scratch, 1e-5),
    input_grad: (winograd::input_grad, winograd::input_grad_scratch, 1e-5),
    filter_grad: (
        |ctx, conv, x, dy, dw, scratch| {
            winograd::filter_grad(ctx, conv, x, OutputGrad::Dense(dy), dw, scratch);
        },
        |ctx, conv| winograd::filter_grad_scratch(ctx, conv, &OutputGrad::Dense(&[])),
        4e-5,
    ),
};

pub(crate) fn check_conv(n: usize, ins: usize, outs: usize, window: Window) {
    let shape = Conv { n, in_channels: ins, out_channels: outs, window };
    let naive = reference::Conv { n, ins, outs, window };
    let x = random(n * window.input[0] * window.input[1] * ins, 1);
    let w = random(window.kernel[0] * window.kernel[1] * ins * outs, 2);
    let dy = random(n * window.output[0] * window.output[1] * outs, 3);
    let bias = random(outs, 4);
    let (wx, ww, wdy) = (wide(&x), wide(&w), wide(&dy));
    let y = reference::conv(&naive, false, &wx, &ww);
    let biased = reference::bias_add(&y, &wide(&bias));
    let cut = reference::relu(&biased);
    let dx = reference::conv_input_grad(&naive, false, &wdy, &ww);
    let dw = reference::conv_filter_grad(&naive, false, &wx, &wdy);
    let ways = if winograd::fits(&shape) { &[DIRECT, WINOGRAD][..] } else { &[DIRECT] };
    for Way { name, forward, input_grad, filter_grad } in ways {
        let (kernel, size, tolerance) = *forward;
        for (expected, epilogue) in [
            (&y, Epilogue::None),
            (&biased, Epilogue::Bias(&bias)),
            (&cut, Epilogue::BiasRelu(&bias)),
        ] {
            check(&format!("{name} {shape:?} {epilogue:?}"), expected, tolerance, |ctx, out| {
                kernel(ctx, &shape, &x, &w, epilogue, out, &mut scratch(size(ctx, &shape)));
            });
        }
        let (kernel, size, tolerance) = *input_grad;
        check(&format!("{name} input gradient, {shape:?}"), &dx, tolerance, |ctx, out| {
            kernel(ctx, &shape, &dy, &w, out, &mut scratch(size(ctx, &shape)));
        });
        let (kernel, size, tolerance) = *filter_grad;
        check(&format!("{name} filter gradient, {shape:?}"), &dw, tolerance, |ctx, out| {
            kernel(ctx, &shape, &x, &dy, out, &mut scratch(size(ctx, &shape)));
        });
    }
}

#[test]
fn convolutions() {
    for (i, window) in windows().into_iter().enumerate() {
        let [ins, outs] = [[3, 5], [1, 17], [8, 32], [5, 33], [20, 1]][i % 5];
        check_conv([2, 3, 9][i % 3], ins, outs, window);
    }
    let window = Window::new([6, 6], [3, 3], [1, 1], Padding::Same).unwrap();
    check_conv(1, 64, 64, window);
    check_conv(19, 3, 48, window);
}

#[test]
fn tiles_pay_by_shape_alone() {
    let conv = |extent: usize, kernel: usize, stride: usize, in_channels, out_channels| {
        let window = Window::new([extent; 2], [kernel; 2], [stride; 2], Padding::Same).unwrap();
        Conv { n: 1, in_channels, out_channels, window }
    };
    assert!(winograd::gain(&conv(24, 5, 1, 3, 64)) > 1.0, "conv1");
    assert!(winograd::input_grad_gain(&conv(24, 5, 1, 3, 64)) <= 1.0, "conv1");
    assert!(winograd::gain(&conv(32, 3, 1, 3, 16)) <= 1.0, "the first of a residual network");
    assert!(winograd::gain(&conv(5, 3, 1, 3, 16)) <= 1.0, "tiles of which half lies outside");
    assert!(winograd::gain(&conv(12, 5, 1, 64, 64)) > 1.0, "conv2");
    assert!(winograd::input_grad_gain(&conv(12, 5, 1, 64, 64)) > 1.0, "conv2");
    assert!(winograd::gain(&conv(32, 3, 1, 64, 64)) > 1.0);
    assert!(winograd::gain(&conv(1, 3, 1, 64, 64)) <= 1.0, "a tile for one value");
    for unit in [Unit::Emulated, Unit::Avx512, Unit::Amx] {
        let (conv1, conv2) = (conv(24, 5, 1, 3, 64), conv(12, 5, 1, 64, 64));
        assert!(winograd::gain(&conv1) > lead(unit, &conv1), "{unit}: conv1");
        let tiles = winograd::gain(&conv2) > lead(unit, &conv2);
        assert_eq!(
            tiles,
            unit != Unit::Amx,
            "{unit}: conv2, of which only AMX is worth the rounding"
        );
    }
    assert!(!winograd::fits(&conv(32, 3, 2, 64, 64)) && !winograd::fits(&conv(32, 1, 1, 64, 64)));
}

/// Extents that tiles of 4 do not divide, pictures smaller than a filter, channels that are no whole vectors, more tiles
/// than a block holds, and the tutorial network's second convolution.
#[test]
fn convolutions_in_tiles() {
    for (input, n, ins, outs) in [
        ([1, 1], 3, 2, 3),
        ([2, 9], 2, 17, 40),
        ([5, 4], 1, 1, 1),
        ([13, 6], 5, 33, 19),
        ([8, 23], 7, 16, 64),
        ([61, 70], 2, 9, 12),
        ([11, 14], 9, 3, 33),
        ([24, 24], 2, 3, 64),
        ([7, 30], 3, 4, 21),
        ([33, 5], 2, 1, 16),
    ] {
        for kernel in [[3, 3], [5, 5]] {
            for padding in [Padding::Same, Padding::Valid] {
                if let Some(window) = Window::new(input, kernel, [1, 1], padding) {
                    check_conv(n, ins, outs, window);
                }
            }
        }
    }
    let window = Window::new([12, 12], [5, 5], [1, 1], Padding::Same).unwrap();
    check_conv(10, 64, 64, window);
}

/// A convolution with the pool above it in one step, and its gradient through that pool.
#[test]
fn convolutions_in_tiles_below_a_pool() {
    for (input, pool, stride, n, ins, outs) in [
        ([24, 24], [3, 3], [2, 2], 2, 3, 64),
        ([13, 6], [2, 2], [2, 2], 9, 1, 19),
        ([9, 22], [3, 2], [1, 3], 3, 2, 40),
        ([5, 17], [4, 5], [3, 1], 4, 4, 16),
        ([16, 10], [3, 3], [2, 2], 3, 6, 33),
    ] {
        for (kernel, padding) in
            [(3, Padding::Same), (5, Padding::Same), (3, Padding::Valid), (5, Padding::Valid)]
        {
            let window = Window::new(input, [kernel; 2], [1, 1], padding).unwrap();
            let Some(pool) = Window::new(window.output, pool, stride, padding) else { continue };
            let conv = Conv { n, in_channels: ins, out_channels: outs, window };
            let naive = reference::Conv { n, ins, outs, window };
            let x = random(n * input[0] * input[1] * ins, 1);
            let (w, bias) = (random(kernel * kernel * ins * outs, 2), random(outs, 3));
            let values = reference::conv(&naive, false, &wide(&x), &wide(&w));
            let cut = reference::relu(&reference::bias_add(&values, &wide(&bias)));
            let maxima = reference::max_pool(&pool, n, outs, &cut);
            let ctx = Ctx { isa: Isa::detect(), threads: 1 };
            let (mut between, mut y) = (vec![f32::NAN; cut.len()], vec![f32::NAN; maxima.len()]);
            let mut winners = vec![f32::NAN; n * winners_len(&pool, outs)];
            let work = &mut scratch(winograd::forward_scratch(ctx, &conv));
            let epilogue = Epilogue::BiasRelu(&bias);
            winograd::forward(ctx, &conv, &x, &w, epilogue, &mut between, work);
            max_pool_winners(ctx, &pool, n, outs, &between, &mut y, &mut winners);
            if winograd::pools(&conv) {
                let forward = |ctx, out: &mut [f32], winners: &mut [f32]| {
                    let scratch = &mut scratch(winograd::forward_pool_scratch(ctx, &conv, &pool));
                    winograd::forward_pool(ctx, &conv, &pool, &x, &w, &bias, out, winners, scratch);
                };
                let none = vec![f32::NAN; winners.len()];
                check(&format!("maxima, {conv:?} {pool:?}"), &maxima, 1e-5, |ctx, out| {
                    forward(ctx, out, &mut none.clone());
                });
                let (mut own, mut who) = (vec![f32::NAN; y.len()], none.clone());
                forward(ctx, &mut own, &mut who);
                assert!(
                    bits(&own) == bits(&y) && bits(&who) == bits(&winners),
                    "{conv:?} {pool:?}"
                );
            }
            let dy = random(y.len(), 4);
            let dx = reference::max_pool_grad(&pool, n, outs, &cut, &wide(&dy));
            let dx: Vec<f64> =
                dx.iter().zip(&cut).map(|(d, x)| if *x > 0.0 { *d } else { 0.0 }).collect();
            let dw = reference::conv_filter_grad(&naive, false, &wide(&x), &dx);
            let grad = OutputGrad::Pooled(Unpool {
                window: &pool,
                channels: outs,
                y: &y,
                dy: &dy,
                winners: &winners,
            });
            check(&format!("gradient, {conv:?} {pool:?}"), &dw, 4e-5, |ctx, out| {
                let mut scratch = scratch(winograd::filter_grad_scratch(ctx, &conv, &grad));
                winograd::filter_grad(ctx, &conv, &x, grad, out, &mut scratch);
            });
            // What is kept for a summary is not fused, and must not change a bit.
            let mut spread = vec![f32::NAN; between.len()];
            pool::max_pool_grad(ctx, &pool, n, outs, true, &between, &y, &dy, &mut spread);
            let [apart, fused] = [OutputGrad::Dense(&spread), grad].map(|grad| {
                let mut dw = vec![f32::NAN; dw.len()];
                let work = &mut scratch(winograd::filter_grad_scratch(ctx, &conv, &grad));
                winograd::filter_grad(ctx, &conv, &x, grad, &mut dw, work);
                bits(&dw)
            });
            assert!(apart == fused, "{conv:?} {pool:?}");
        }
    }
}
