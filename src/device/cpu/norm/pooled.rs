//! Local response normalisation of which only the maxima are used: what lies between, and its gradient, is there for a picture at a
//! time and stays in the caches.

use super::lrn::{lrn_grad_rows, lrn_rows};
use crate::device::cpu::Ctx;
use crate::device::cpu::unpool::{OutputGrad, Unpool, max_pool_winners, winners_len};
use crate::graph::{LrnParams, Window};

/// Floats of a picture below a pool.
fn picture(pool: &Window, channels: usize) -> usize {
    pool.input[0] * pool.input[1] * channels
}

/// Floats of scratch memory that [`lrn_pool`] needs for `n` pictures of `channels`.
pub fn lrn_pool_scratch(ctx: Ctx, pool: &Window, n: usize, channels: usize) -> usize {
    ctx.groups(n) * picture(pool, channels)
}

/// The maxima `y` of the normalised values of a relu, and who won.
#[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
pub fn lrn_pool(
    ctx: Ctx,
    lrn: &LrnParams,
    pool: &Window,
    channels: usize,
    x: &[f32],
    y: &mut [f32],
    winners: &mut [f32],
    scratch: &mut [f32],
) {
    let reach = lrn.reach(channels, x.len());
    let from = picture(pool, channels);
    let (to, bytes) = (pool.output[0] * pool.output[1] * channels, winners_len(pool, channels));
    let n = x.len() / from.max(1);
    let groups = ctx.groups(n);
    let per = n.div_ceil(groups);
    let scratch = &mut scratch[..lrn_pool_scratch(ctx, pool, n, channels)];
    let outs = [(y, per * to), (winners, per * bytes), (scratch, from)];
    ctx.each(groups, [(x, per * from)], outs, |_, [x], [y, winners, between]| {
        let outs = y.chunks_exact_mut(to).zip(winners.chunks_exact_mut(bytes));
        for (x, (y, winners)) in x.chunks_exact(from).zip(outs) {
            lrn_rows(ctx.isa, lrn, reach, channels, x, between);
            max_pool_winners(ctx, pool, 1, channels, between, y, winners);
        }
    });
}

/// Floats of scratch memory that [`lrn_pool_grad`] needs for `n` pictures.
pub fn lrn_pool_grad_scratch(ctx: Ctx, n: usize, dy: &Unpool<'_>) -> usize {
    ctx.groups(n) * OutputGrad::Pooled(*dy).scratch(picture(dy.window, dy.channels))
}

/// The gradient of [`lrn_pool`] by the input of the relu whose output is `x`.
pub fn lrn_pool_grad(
    ctx: Ctx,
    lrn: &LrnParams,
    x: &[f32],
    dy: Unpool<'_>,
    dx: &mut [f32],
    scratch: &mut [f32],
) {
    let channels = dy.channels;
    let reach = lrn.reach(channels, x.len());
    let len = picture(dy.window, channels);
    let n = x.len() / len.max(1);
    let scratch = &mut scratch[..lrn_pool_grad_scratch(ctx, n, &dy)];
    let dy = OutputGrad::Pooled(dy);
    dy.check(n, len);
    let groups = ctx.groups(n);
    let per = n.div_ceil(groups);
    let outs = [(dx, per * len), (scratch, dy.scratch(len))];
    ctx.each(groups, [(x, per * len)], outs, |group, [x], [dx, scratch]| {
        for (i, (x, dx)) in x.chunks_exact(len).zip(dx.chunks_exact_mut(len)).enumerate() {
            let dy = dy.picture(ctx, group * per + i, len, scratch);
            lrn_grad_rows(ctx.isa, lrn, reach, channels, true, x, dy, dx);
        }
    });
}
