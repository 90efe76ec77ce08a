//! The filter gradient: every point's products of tiles are added to sums in the first-level cache.

use super::super::line::{Evaluate, Line, Points};
use super::super::transform::{Grid, Map, transform};
use super::super::{TILE, full};
use super::{TOGETHER, Thin, by_size, together};
use crate::device::cpu::Ctx;
use crate::device::cpu::conv::{Conv, chunks};
use crate::device::cpu::maxima::Channels;
use crate::device::cpu::reduce::tree_sum;
use crate::device::cpu::simd::{Vector, multiversion};
use crate::device::cpu::unpool::OutputGrad;

/// Floats of the sums of a chunk of pictures, and of its memory beside them and its gradient.
fn sizes(thin: &Thin, dy: &OutputGrad<'_>) -> [usize; 3] {
    let sums = thin.vectors() * thin.values() * thin.lanes;
    let plane = match dy {
        OutputGrad::Dense(_) => 0,
        OutputGrad::Pooled(pooled) => thin.plane(pooled.window),
    };
    [sums, plane, thin.scratch() + dy.opened()]
}

/// Floats of scratch memory that [`filter_grad`] needs.
pub(in super::super) fn filter_grad_scratch(ctx: Ctx, conv: &Conv, dy: &OutputGrad<'_>) -> usize {
    let [sums, plane, work] = sizes(&Thin::of(ctx, conv), dy);
    chunks(conv.n).1 * (conv.filter() + sums + plane + work)
}

/// The gradient by the filter, summed in chunks of pictures.
pub(in super::super) fn filter_grad(
    ctx: Ctx,
    conv: &Conv,
    x: &[f32],
    dy: OutputGrad<'_>,
    dw: &mut [f32],
    scratch: &mut [f32],
) {
    let thin = Thin::of(ctx, conv);
    let ((per, count), [sums, plane, work]) = (chunks(conv.n), sizes(&thin, &dy));
    let (from, size) = (conv.picture(), thin.values() * thin.lanes);
    let scratch = &mut scratch[..filter_grad_scratch(ctx, conv, &dy)];
    let (partials, works) = scratch.split_at_mut(count * conv.filter());
    let jobs = [(&mut *partials, conv.filter()), (works, sums + plane + work)];
    ctx.each(count, [(x, per * from)], jobs, |chunk, [x], [partial, work]| {
        let (sums, work) = work.split_at_mut(sums);
        let (plane, work) = work.split_at_mut(plane);
        let (opened, work) = work.split_at_mut(dy.opened());
        sums.fill(0.0);
        thin.clear(work);
        for (picture, x) in (chunk * per..).zip(x.chunks_exact(from)) {
            let tiles = thin.transform(ctx, x, work);
            let dy = dy.open(ctx, picture, conv.result(), opened);
            for (i, sums) in sums.chunks_exact_mut(size).enumerate() {
                let channels = thin.channels(i);
                let (dy, apart) = dy.channels(ctx, channels, conv.window.output[1], plane);
                accumulate(ctx.isa, &thin, channels.count, apart, tiles, dy, sums);
            }
        }
        for (i, sums) in sums.chunks_exact(size).enumerate() {
            finish(ctx, &thin, i, sums, partial);
        }
    });
    let partials = &*partials;
    tree_sum(ctx, count, |i| &partials[i * conv.filter()..][..conv.filter()], 1.0, dw);
}

/// From sums at the points to the gradient of the filter of a vector of output channels.
fn finish(ctx: Ctx, thin: &Thin, vector: usize, sums: &[f32], to: &mut [f32]) {
    let (t, lanes) = (&thin.tiling, thin.lanes);
    let (ins, outs) = (t.source.channels, t.target.channels);
    let Channels { first, count, .. } = thin.channels(vector);
    let source = full(t.side(), ins * lanes, lanes);
    let target = Grid { channels: count, ..full(t.taps, ins * outs, count) };
    for channel in 0..ins {
        let from = (&sums[channel * lanes..], &Grid { channels: lanes, ..source.clone() });
        let to = (&mut to[channel * outs + first..], &target);
        transform(ctx.isa, (Map::FilterGradient, t.taps), from, to);
    }
}

multiversion! {
    /// Adds the products of the tiles of a picture with those of `count` channels of its gradient, which begins with the first of them,
    /// and whose columns and rows are so far `apart`.
    fn accumulate<V>(thin: &Thin, count: usize, apart: [usize; 2], tiles: &[f32], dy: &[f32], sums: &mut [f32]) {
        // SAFETY: this copy is compiled for `V`.
        unsafe {
            by_size!(thin.tiling, |P, C| accumulate_tiles::<V, P, C>(thin, count, apart, tiles, dy, sums));
        }
    }
}

/// # Safety
/// As for every function of [`Vector`].
#[inline(always)]
unsafe fn accumulate_tiles<V: Vector, const P: usize, const C: usize>(
    thin: &Thin,
    count: usize,
    [pitch, row]: [usize; 2],
    tiles: &[f32],
    dy: &[f32],
    sums: &mut [f32],
) {
    let size = P * P * C;
    assert!(sums.len() == size * V::LANES && tiles.len() == thin.slots() * size);
    // SAFETY: the caller's promise; the sums and all tiles of a group are there.
    unsafe {
        let (mut half, mut places) =
            ([[[V::zero(); TILE]; P]; TOGETHER], thin.places([pitch, row]));
        for at in (0..thin.slots()).step_by(together::<V>()) {
            for half in &mut half[..together::<V>()] {
                let Some((start, [height, width])) = places.next() else {
                    *half = [[V::zero(); TILE]; P];
                    continue;
                };
                let (dy, size) = (&dy[start..], [height, width, count, row, pitch]);
                if height == TILE && width == TILE && count == V::LANES {
                    begin::<V, P, true>(dy, size, half);
                } else {
                    begin::<V, P, false>(dy, size, half);
                }
            }
            let (from, to) = (tiles[at * size..].as_ptr(), sums.as_mut_ptr());
            match together::<V>() {
                4 => add_rows::<V, P, C, 4>(from, &half, to),
                2 => add_rows::<V, P, C, 2>(from, &half, to),
                _ => add_rows::<V, P, C, 1>(from, &half, to),
            }
        }
    }
}

/// Transforms the columns of a tile of `dy`: `size` are its rows and columns, channels, and the distances of rows and columns.
///
/// # Safety
/// As for every function of [`Vector`].
#[inline(always)]
unsafe fn begin<V: Vector, const P: usize, const ALL: bool>(
    dy: &[f32],
    [height, width, count, row, pitch]: [usize; 5],
    half: &mut [[V; TILE]; P],
) {
    for x in 0..TILE {
        // SAFETY: the caller's promise; slices check the bounds.
        unsafe {
            let mut column = [V::zero(); TILE];
            for (i, value) in column.iter_mut().enumerate() {
                if ALL || (i < height && x < width) {
                    *value = V::load_lanes::<ALL>(&dy[i * row + x * pitch..], count);
                }
            }
            let column: [V; P] = Evaluate::<false>::apply(column);
            for (row, value) in half.iter_mut().zip(column) {
                row[x] = value;
            }
        }
    }
}

/// Transforms the rows of `T` tiles and adds their products, one tile after the other.
///
/// # Safety
/// As for every function of [`Vector`]; the tiles and the sums are there.
#[inline(always)]
unsafe fn add_rows<V: Vector, const P: usize, const C: usize, const T: usize>(
    tiles: *const f32,
    half: &[[[V; TILE]; P]; TOGETHER],
    sums: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for row in 0..P {
            let at = row * P;
            let zero = std::array::from_fn(|i| half[i][row][0]);
            add_products::<V, P, C, T>(tiles, zero, sums, at);
            // Written out, so that the powers of the points are constants.
            add_pair::<V, P, C, T>(tiles, half, sums, row, 0);
            add_pair::<V, P, C, T>(tiles, half, sums, row, 1);
            if Points::<P>::PAIRS == 3 {
                add_pair::<V, P, C, T>(tiles, half, sums, row, 2);
            }
            let far = std::array::from_fn(|i| half[i][row][TILE - 1]);
            add_products::<V, P, C, T>(tiles, far, sums, at + P - 1);
        }
    }
}

/// Adds the products of `T` tiles at a pair of points of a row.
///
/// # Safety
/// As for [`add_rows`].
#[inline(always)]
unsafe fn add_pair<V: Vector, const P: usize, const C: usize, const T: usize>(
    tiles: *const f32,
    half: &[[[V; TILE]; P]; TOGETHER],
    sums: *mut f32,
    row: usize,
    k: usize,
) {
    let at = row * P + 2 * k + 1;
    // SAFETY: the caller's promise.
    unsafe {
        let (mut plus, mut minus) = ([V::zero(); T], [V::zero(); T]);
        for i in 0..T {
            [plus[i], minus[i]] = Evaluate::<false>::pair::<V, TILE, P>(k, &half[i][row]);
        }
        add_products::<V, P, C, T>(tiles, plus, sums, at);
        add_products::<V, P, C, T>(tiles, minus, sums, at + 1);
    }
}

/// Adds the products of `T` tiles at a point.
///
/// # Safety
/// As for [`add_rows`].
#[inline(always)]
unsafe fn add_products<V: Vector, const P: usize, const C: usize, const T: usize>(
    tiles: *const f32,
    grads: [V; T],
    sums: *mut f32,
    point: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for at in point * C..(point + 1) * C {
            let mut sum = V::load(sums.add(at * V::LANES));
            for (i, grad) in grads.into_iter().enumerate() {
                sum = V::mul_add(V::splat(*tiles.add(i * P * P * C + at)), grad, sum);
            }
            V::store(sum, sums.add(at * V::LANES));
        }
    }
}
