//! Kernels that treat each element alone.

use super::Ctx;
use super::simd::multiversion;

/// `x < 0 ? 0 : x`; NaN passes.
#[inline(always)]
fn cut(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

/// A loop over equally long slices, once per instruction set.
macro_rules! loops {
    ($($name:ident($($scalar:ident: f32,)? [$($x:ident),*] -> $out:ident) = $value:expr;)*) => {$(
        multiversion! {
            #[allow(unused_assignments, reason = "not every loop reads its output")]
            pub(crate) fn $name($($scalar: f32,)? $($x: &[f32],)* out: &mut [f32]) {
                let len = out.len();
                $(let $x = &$x[..len];)*
                for i in 0..len {
                    $(let $x = $x[i];)*
                    let $out = out[i];
                    let _ = $out;
                    out[i] = $value;
                }
            }
        }
    )*};
}

loops! {
    relu_loop([x] -> _old) = cut(x);
    relu_grad_loop([dy, y] -> _old) = if y > 0.0 { dy } else { 0.0 };
    add_loop([a, b] -> _old) = a + b;
    sub_loop([a, b] -> _old) = a - b;
    mul_loop([a, b] -> _old) = a * b;
    square_loop([x] -> _old) = x * x;
    scaled_loop(a: f32, [x] -> _old) = a * x;
    scaled_sum_loop(scale: f32, [a, b] -> _old) = scale * (a + b);
    add_and_scale_loop(scale: f32, [x] -> old) = scale * (old + x);
    add_scaled_loop(a: f32, [x] -> old) = old + a * x;
    sum_scaled_loop(factor: f32, [a, x] -> _old) = a + factor * x;
}

/// `out = max(x, 0)`; NaN passes.
pub fn relu(ctx: Ctx, x: &[f32], out: &mut [f32]) {
    ctx.map(1, [x], [out], |[x], [out]| relu_loop(ctx.isa, x, out));
}

/// `dx = dy` where the output `y` of the relu is positive, else 0.
pub fn relu_grad(ctx: Ctx, dy: &[f32], y: &[f32], dx: &mut [f32]) {
    ctx.map(1, [dy, y], [dx], |[dy, y], [dx]| relu_grad_loop(ctx.isa, dy, y, dx));
}

/// `out = a + b`.
pub fn add(ctx: Ctx, a: &[f32], b: &[f32], out: &mut [f32]) {
    ctx.map(1, [a, b], [out], |[a, b], [out]| add_loop(ctx.isa, a, b, out));
}

/// `out = a - b`.
pub fn sub(ctx: Ctx, a: &[f32], b: &[f32], out: &mut [f32]) {
    ctx.map(1, [a, b], [out], |[a, b], [out]| sub_loop(ctx.isa, a, b, out));
}

/// `out = a * b`.
pub fn mul(ctx: Ctx, a: &[f32], b: &[f32], out: &mut [f32]) {
    ctx.map(1, [a, b], [out], |[a, b], [out]| mul_loop(ctx.isa, a, b, out));
}

/// `out = x * x`.
pub fn square(ctx: Ctx, x: &[f32], out: &mut [f32]) {
    ctx.map(1, [x], [out], |[x], [out]| square_loop(ctx.isa, x, out));
}

/// `out = a * x`.
pub fn scale(ctx: Ctx, a: f32, x: &[f32], out: &mut [f32]) {
    ctx.map(1, [x], [out], |[x], [out]| scaled_loop(ctx.isa, a, x, out));
}

/// `out += a * x`, rounded twice.
pub fn add_scaled(ctx: Ctx, a: f32, x: &[f32], out: &mut [f32]) {
    ctx.map(1, [x], [out], |[x], [out]| add_scaled_loop(ctx.isa, a, x, out));
}

/// `out = a + factor * x`, rounded twice.
pub fn sum_scaled(ctx: Ctx, a: &[f32], factor: f32, x: &[f32], out: &mut [f32]) {
    ctx.map(1, [a, x], [out], |[a, x], [out]| sum_scaled_loop(ctx.isa, factor, a, x, out));
}

/// `out = value`.
pub fn fill(ctx: Ctx, value: f32, out: &mut [f32]) {
    ctx.map(1, [], [out], |[], [out]| out.fill(value));
}

multiversion! {
    fn bias_loop(relu: bool, x: &[f32], bias: &[f32], out: &mut [f32]) {
        for (x, out) in x.chunks_exact(bias.len()).zip(out.chunks_exact_mut(bias.len())) {
            for ((o, x), b) in out.iter_mut().zip(x).zip(bias) {
                *o = if relu { cut(x + b) } else { x + b };
            }
        }
    }
}

/// `out = x + bias` for rows of `bias.len()` channels.
pub fn bias_add(ctx: Ctx, x: &[f32], bias: &[f32], out: &mut [f32]) {
    ctx.map(bias.len(), [x], [out], |[x], [out]| bias_loop(ctx.isa, false, x, bias, out));
}

/// `out = max(x + bias, 0)` for rows of `bias.len()` channels; NaN passes.
pub fn bias_add_relu(ctx: Ctx, x: &[f32], bias: &[f32], out: &mut [f32]) {
    ctx.map(bias.len(), [x], [out], |[x], [out]| bias_loop(ctx.isa, true, x, bias, out));
}
