//! The convolution itself, by itself and below a pool.

use super::super::line::{Combine, Line, Points};
use super::super::transform::{Grid, Map, transform};
use super::super::{TILE, full};
use super::{TOGETHER, Thin, by_size, together};
use crate::device::cpu::conv::Conv;
use crate::device::cpu::maxima::{Channels, NEVER, max_picture, padded};
use crate::device::cpu::simd::{Vector, multiversion};
use crate::device::cpu::unpool::winners_len;
use crate::device::cpu::{Ctx, Epilogue};
use crate::graph::Window;

/// A filter at the points, `[vector][point][input channel][lane]`.
fn filter_points<'a>(ctx: Ctx, thin: &Thin, filter: &[f32], to: &'a mut [f32]) -> &'a [f32] {
    let (t, lanes) = (&thin.tiling, thin.lanes);
    let (ins, outs) = (t.source.channels, t.target.channels);
    ctx.each(thin.vectors(), [], [(&mut *to, thin.values() * lanes)], |i, [], [to]| {
        let Channels { first, count, .. } = thin.channels(i);
        let source = Grid { channels: count, ..full(t.taps, ins * outs, count) };
        let target = full(t.side(), ins * lanes, lanes);
        for channel in 0..ins {
            let from = (&filter[channel * outs + first..], &source);
            let to = (&mut to[channel * lanes..], &target);
            transform(ctx.isa, (Map::Filter, t.taps), from, to);
        }
    });
    to
}

/// Floats of scratch memory that [`forward`] needs.
pub(in super::super) fn forward_scratch(ctx: Ctx, conv: &Conv) -> usize {
    let thin = Thin::of(ctx, conv);
    thin.vectors() * thin.values() * thin.lanes + ctx.groups(conv.n) * thin.scratch()
}

/// `y = epilogue(x * filter)`.
pub(in super::super) fn forward(
    ctx: Ctx,
    conv: &Conv,
    x: &[f32],
    filter: &[f32],
    epilogue: Epilogue<'_>,
    y: &mut [f32],
    scratch: &mut [f32],
) {
    let thin = Thin::of(ctx, conv);
    let size = thin.values() * thin.lanes;
    let (points, work) = scratch[..forward_scratch(ctx, conv)].split_at_mut(thin.vectors() * size);
    let points = filter_points(ctx, &thin, filter, points);
    let (groups, [from, to]) = (ctx.groups(conv.n), [conv.picture(), conv.result()]);
    let per = conv.n.div_ceil(groups);
    let jobs = [(y, per * to), (work, thin.scratch())];
    ctx.each(groups, [(x, per * from)], jobs, |_, [x], [y, work]| {
        thin.clear(work);
        for (x, y) in x.chunks_exact(from).zip(y.chunks_exact_mut(to)) {
            let tiles = thin.transform(ctx, x, work);
            for (i, filter) in points.chunks_exact(size).enumerate() {
                let channels = thin.channels(i);
                let y = &mut y[channels.first..];
                let apart = [conv.out_channels, conv.window.output[1] * conv.out_channels];
                convolve(ctx.isa, &thin, channels, apart, tiles, filter, epilogue, y);
            }
        }
    });
}

/// Floats of scratch memory that [`forward_pool`] needs.
pub(in super::super) fn forward_pool_scratch(ctx: Ctx, conv: &Conv, pool: &Window) -> usize {
    forward_scratch(ctx, conv) + ctx.groups(conv.n) * Thin::of(ctx, conv).plane(pool)
}

#[allow(clippy::too_many_arguments, reason = "the operands of the operation")]
/// The maxima `y` of a convolution with bias and relu, and who won: a vector of channels of a picture at a time.
pub(in super::super) fn forward_pool(
    ctx: Ctx,
    conv: &Conv,
    pool: &Window,
    x: &[f32],
    filter: &[f32],
    bias: &[f32],
    y: &mut [f32],
    winners: &mut [f32],
    scratch: &mut [f32],
) {
    let thin = Thin::of(ctx, conv);
    let size = thin.values() * thin.lanes;
    let (points, work) =
        scratch[..forward_pool_scratch(ctx, conv, pool)].split_at_mut(thin.vectors() * size);
    let points = filter_points(ctx, &thin, filter, points);
    let (groups, from) = (ctx.groups(conv.n), conv.picture());
    let per = conv.n.div_ceil(groups);
    let to = pool.output[0] * pool.output[1] * conv.out_channels;
    let bytes = winners_len(pool, conv.out_channels);
    let plane = thin.plane(pool);
    let wide = padded(pool);
    let apart = [thin.lanes, wide.input[1] * thin.lanes];
    let start = pool.pad[0] * apart[1] + pool.pad[1] * apart[0];
    let jobs = [(y, per * to), (winners, per * bytes), (work, thin.scratch() + plane)];
    ctx.each(groups, [(x, per * from)], jobs, |_, [x], [y, winners, work]| {
        let (plane, work) = work.split_at_mut(plane);
        plane.fill(NEVER);
        thin.clear(work);
        let outs = y.chunks_exact_mut(to).zip(winners.chunks_exact_mut(bytes));
        for (x, (y, winners)) in x.chunks_exact(from).zip(outs) {
            let tiles = thin.transform(ctx, x, work);
            let winners = &mut bytemuck::cast_slice_mut(winners)[..to];
            for (i, filter) in points.chunks_exact(size).enumerate() {
                let (channels, epilogue) = (thin.channels(i), Epilogue::BiasRelu(bias));
                let values = &mut plane[start..];
                convolve(ctx.isa, &thin, channels, apart, tiles, filter, epilogue, values);
                max_picture(ctx.isa, &wide, channels, plane, y, winners);
            }
        }
    });
}

multiversion! {
    /// Convolves the tiles of a picture into `channels` of `y`, which begins with the first of them; its columns and rows are so far
    /// `apart`.
    fn convolve<V>(
        thin: &Thin, channels: Channels, apart: [usize; 2], tiles: &[f32], filter: &[f32], epilogue: Epilogue<'_>,
        y: &mut [f32],
    ) {
        // SAFETY: this copy is compiled for `V`.
        unsafe {
            by_size!(thin.tiling, |P, C| convolve_tiles::<V, P, C>(thin, channels, apart, tiles, filter, epilogue, y));
        }
    }
}

/// # Safety
/// As for every function of [`Vector`].
#[inline(always)]
unsafe fn convolve_tiles<V: Vector, const P: usize, const C: usize>(
    thin: &Thin,
    Channels { first, count, .. }: Channels,
    [pitch, row]: [usize; 2],
    tiles: &[f32],
    filter: &[f32],
    epilogue: Epilogue<'_>,
    y: &mut [f32],
) {
    let size = P * P * C;
    assert!(filter.len() == size * V::LANES && tiles.len() == thin.slots() * size);
    let (bias, relu) = match epilogue {
        Epilogue::None => (&[][..], false),
        Epilogue::Bias(bias) => (&bias[first..first + count], false),
        Epilogue::BiasRelu(bias) => (&bias[first..first + count], true),
    };
    // SAFETY: the caller's promise; the filter and all tiles of a group are there.
    unsafe {
        let bias = V::load_part(bias);
        let floor = V::splat(if relu { 0.0 } else { f32::NEG_INFINITY });
        let (mut half, mut places) =
            ([[[V::zero(); TILE]; P]; TOGETHER], thin.places([pitch, row]));
        for at in (0..thin.slots()).step_by(together::<V>()) {
            let from = tiles[at * size..].as_ptr();
            match together::<V>() {
                4 => multiply::<V, P, C, 4>(from, filter.as_ptr(), &mut half),
                2 => multiply::<V, P, C, 2>(from, filter.as_ptr(), &mut half),
                _ => multiply::<V, P, C, 1>(from, filter.as_ptr(), &mut half),
            }
            for half in &half[..together::<V>()] {
                let Some((start, [height, width])) = places.next() else { break };
                let (y, size) = (&mut y[start..], [height, width, count, row, pitch]);
                if height == TILE && width == TILE && count == V::LANES {
                    finish::<V, P, true>(half, size, [bias, floor], y);
                } else {
                    finish::<V, P, false>(half, size, [bias, floor], y);
                }
            }
        }
    }
}

/// Transforms the columns of a tile into `y`: `size` are its rows and columns, channels, and the distances of rows and columns.
///
/// # Safety
/// As for every function of [`Vector`].
#[inline(always)]
unsafe fn finish<V: Vector, const P: usize, const ALL: bool>(
    half: &[[V; TILE]; P],
    [height, width, count, row, pitch]: [usize; 5],
    [bias, floor]: [V; 2],
    y: &mut [f32],
) {
    for x in 0..if ALL { TILE } else { width } {
        // SAFETY: the caller's promise; slices check the bounds.
        unsafe {
            let column: [V; P] = std::array::from_fn(|row| half[row][x]);
            let column: [V; TILE] = Combine::<false>::apply(column);
            for (i, value) in column.into_iter().enumerate() {
                if ALL || i < height {
                    let value = V::max(floor, V::add(value, bias));
                    V::store_lanes::<ALL>(value, &mut y[i * row + x * pitch..], count);
                }
            }
        }
    }
}

/// The rows of points of `T` tiles, multiplied with the filter and transformed.
///
/// # Safety
/// As for every function of [`Vector`]; the tiles and the filter are there.
#[inline(always)]
unsafe fn multiply<V: Vector, const P: usize, const C: usize, const T: usize>(
    tiles: *const f32,
    filter: *const f32,
    half: &mut [[[V; TILE]; P]; TOGETHER],
) {
    // SAFETY: the caller's promise.
    unsafe {
        for row in 0..P {
            let at = row * P;
            let zero = products::<V, P, C, T>(tiles, filter, at);
            let far = products::<V, P, C, T>(tiles, filter, at + P - 1);
            let mut sums: [[V; TILE]; T] =
                std::array::from_fn(|i| Combine::<false>::start::<V, P, TILE>(zero[i], far[i]));
            // Written out, so that the powers of the points are constants.
            add_pair::<V, P, C, T>(tiles, filter, at, 0, &mut sums);
            add_pair::<V, P, C, T>(tiles, filter, at, 1, &mut sums);
            if Points::<P>::PAIRS == 3 {
                add_pair::<V, P, C, T>(tiles, filter, at, 2, &mut sums);
            }
            for (half, sums) in half.iter_mut().zip(sums) {
                half[row] = sums;
            }
        }
    }
}

/// Adds the products of `T` tiles at a pair of points of the row that begins with point `at`.
///
/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn add_pair<V: Vector, const P: usize, const C: usize, const T: usize>(
    tiles: *const f32,
    filter: *const f32,
    at: usize,
    k: usize,
    sums: &mut [[V; TILE]; T],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let plus = products::<V, P, C, T>(tiles, filter, at + 2 * k + 1);
        let minus = products::<V, P, C, T>(tiles, filter, at + 2 * k + 2);
        for (i, sums) in sums.iter_mut().enumerate() {
            Combine::<false>::add::<V, P, TILE>(k, [plus[i], minus[i]], sums);
        }
    }
}

/// The products of `T` tiles at a point.
///
/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn products<V: Vector, const P: usize, const C: usize, const T: usize>(
    tiles: *const f32,
    filter: *const f32,
    point: usize,
) -> [V; T] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [V::zero(); T];
        for at in point * C..(point + 1) * C {
            let w = V::load(filter.add(at * V::LANES));
            for (i, sum) in sums.iter_mut().enumerate() {
                let x = V::splat(*tiles.add(i * P * P * C + at));
                *sum = if at == point * C { V::mul(x, w) } else { V::mul_add(x, w, *sum) };
            }
        }
        sums
    }
}
