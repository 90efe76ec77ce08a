//! Sums: over everything, over rows, and over the slabs of several towers.

use std::ops::Range;

use super::Ctx;
use super::elementwise::{add_and_scale_loop, scaled_loop, scaled_sum_loop};
use super::simd::multiversion;

/// Into how many chunks a long sum is cut: fixed, so that threads cannot change a result.
pub(crate) const CHUNKS: usize = 16;
/// Partial sums kept side by side: fixed, so that the instruction set cannot change a result.
const LANES: usize = 64;
/// Elements of a tree sum taken at a time.
const BLOCK: usize = 1024;

/// Where the left half of a tree over `n > 1` leaves ends: at the largest power of two below `n`.
fn split(n: usize) -> usize {
    n.next_power_of_two() / 2
}

/// Adds a few values as a fixed binary tree.
fn tree(values: &[f32]) -> f32 {
    match values {
        [] => 0.0,
        [x] => *x,
        _ => {
            let (left, right) = values.split_at(split(values.len()));
            tree(left) + tree(right)
        }
    }
}

multiversion! {
    fn sum_chunk(x: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        let (blocks, rest) = x.as_chunks::<LANES>();
        for block in blocks {
            for (l, v) in lanes.iter_mut().zip(block) {
                *l += v;
            }
        }
        for (l, v) in lanes.iter_mut().zip(rest) {
            *l += v;
        }
        tree(&lanes)
    }
}

multiversion! {
    fn sum_squares_chunk(x: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        let (blocks, rest) = x.as_chunks::<LANES>();
        for block in blocks {
            for (l, v) in lanes.iter_mut().zip(block) {
                *l += v * v;
            }
        }
        for (l, v) in lanes.iter_mut().zip(rest) {
            *l += v * v;
        }
        tree(&lanes)
    }
}

fn chunked(ctx: Ctx, x: &[f32], chunk: impl Fn(&[f32]) -> f32 + Sync) -> f32 {
    let unit = x.len().div_ceil(CHUNKS).max(1);
    let parts = x.len().div_ceil(unit);
    let mut partials = [0.0; CHUNKS];
    let serial =
        Ctx { threads: if x.len() > ctx.grain(x.len(), 1) { ctx.threads } else { 1 }, ..ctx };
    serial.each(parts, [(x, unit)], [(&mut partials, 1)], |_, [x], [out]| out[0] = chunk(x));
    tree(&partials[..parts])
}

/// The sum of all elements.
pub fn sum(ctx: Ctx, x: &[f32]) -> f32 {
    chunked(ctx, x, |x| sum_chunk(ctx.isa, x))
}

/// The sum of the squares of all elements.
pub fn sum_squares(ctx: Ctx, x: &[f32]) -> f32 {
    chunked(ctx, x, |x| sum_squares_chunk(ctx.isa, x))
}

multiversion! {
    fn row_means_loop(columns: usize, x: &[f32], out: &mut [f32]) {
        for (o, row) in out.iter_mut().zip(x.chunks_exact(columns)) {
            let mut lanes = [0.0f32; LANES];
            for block in row.chunks(LANES) {
                for (l, v) in lanes.iter_mut().zip(block) {
                    *l += v;
                }
            }
            *o = tree(&lanes) / columns as f32;
        }
    }
}

/// The mean of each row of `x[rows][columns]`.
pub fn row_means(ctx: Ctx, columns: usize, x: &[f32], out: &mut [f32]) {
    assert!(columns > 0 && x.len() == out.len() * columns, "one mean per row of {columns}");
    let unit = ctx.grain(x.len(), columns) / columns;
    let parts = out.len().div_ceil(unit);
    ctx.each(parts, [(x, unit * columns)], [(out, unit)], |_, [x], [out]| {
        row_means_loop(ctx.isa, columns, x, out);
    });
}

multiversion! {
    fn add_rows(columns: usize, x: &[f32], out: &mut [f32]) {
        out.fill(0.0);
        for row in x.chunks_exact(columns) {
            for (o, v) in out.iter_mut().zip(row) {
                *o += v;
            }
        }
    }
}

multiversion! {
    fn add_positive_rows(columns: usize, x: &[f32], y: &[f32], out: &mut [f32]) {
        out.fill(0.0);
        for (row, y) in x.chunks_exact(columns).zip(y.chunks_exact(columns)) {
            for ((o, v), y) in out.iter_mut().zip(row).zip(y) {
                *o += if *y > 0.0 { *v } else { 0.0 };
            }
        }
    }
}

/// Rows per chunk and number of chunks.
pub(crate) fn row_chunks(rows: usize) -> (usize, usize) {
    let per = rows.div_ceil(CHUNKS).max(1);
    (per, rows.div_ceil(per))
}

/// Floats of scratch memory that [`column_sums`] needs.
pub fn column_sums_scratch(columns: usize) -> usize {
    CHUNKS * columns
}

/// The sum of each column of `x[rows][columns]`: the gradient of a bias.
pub fn column_sums(ctx: Ctx, columns: usize, x: &[f32], out: &mut [f32], scratch: &mut [f32]) {
    assert!(
        columns > 0 && x.len().is_multiple_of(columns) && out.len() == columns,
        "one sum per column of {columns}"
    );
    let (per, parts) = row_chunks(x.len() / columns);
    let partials = &mut scratch[..parts * columns];
    ctx.each(parts, [(x, per * columns)], [(&mut *partials, columns)], |_, [x], [out]| {
        add_rows(ctx.isa, columns, x, out);
    });
    let partials = &*partials;
    tree_sum(ctx, parts, |i| &partials[i * columns..][..columns], 1.0, out);
}

/// The sum of each column of `x[rows][columns]` over the rows where `y` is positive: the gradient of a bias below a relu.
pub fn positive_column_sums(
    ctx: Ctx,
    columns: usize,
    x: &[f32],
    y: &[f32],
    out: &mut [f32],
    scratch: &mut [f32],
) {
    assert!(
        columns > 0
            && x.len().is_multiple_of(columns)
            && (x.len(), columns) == (y.len(), out.len()),
        "one sum per column of {columns}"
    );
    let (per, parts) = row_chunks(x.len() / columns);
    let partials = &mut scratch[..parts * columns];
    let ins = [(x, per * columns), (y, per * columns)];
    ctx.each(parts, ins, [(&mut *partials, columns)], |_, [x, y], [out]| {
        add_positive_rows(ctx.isa, columns, x, y, out);
    });
    let partials = &*partials;
    tree_sum(ctx, parts, |i| &partials[i * columns..][..columns], 1.0, out);
}

/// `out = scale * sum of n slabs`, added as a fixed binary tree by index: five are `((0 + 1) + (2 + 3)) + 4`.
/// No slabs at all give zeros.
pub fn tree_sum<'a>(
    ctx: Ctx,
    n: usize,
    slab: impl Fn(usize) -> &'a [f32] + Sync,
    scale: f32,
    out: &mut [f32],
) {
    if n == 0 {
        return out.fill(0.0);
    }
    let unit = ctx.grain(out.len(), BLOCK);
    ctx.each(out.len().div_ceil(unit), [], [(out, unit)], |part, [], [out]| {
        for (i, block) in out.chunks_mut(BLOCK).enumerate() {
            let from = part * unit + i * BLOCK;
            tree_block(ctx, scale, 0..n, &|i, len| &slab(i)[from..from + len], block);
        }
    });
}

/// As [`tree_sum`] of `first` and `n` others, with the result in `first`.
pub fn tree_sum_into<'a>(
    ctx: Ctx,
    first: &mut [f32],
    n: usize,
    other: impl Fn(usize) -> &'a [f32] + Sync,
    scale: f32,
) {
    let unit = ctx.grain(first.len(), BLOCK);
    ctx.each(first.len().div_ceil(unit), [], [(first, unit)], |part, [], [first]| {
        let mut own = [0.0; BLOCK];
        for (i, block) in first.chunks_mut(BLOCK).enumerate() {
            let from = part * unit + i * BLOCK;
            own[..block.len()].copy_from_slice(block);
            let piece = |i: usize, len: usize| match i.checked_sub(1) {
                None => &own[..len],
                Some(i) => &other(i)[from..from + len],
            };
            tree_block(ctx, scale, 0..n + 1, &piece, block);
        }
    });
}

/// `scale` times the sum of these pieces of the length of `out`, in one pass over the last of them.
fn tree_block<'a>(
    ctx: Ctx,
    scale: f32,
    pieces: Range<usize>,
    piece: &impl Fn(usize, usize) -> &'a [f32],
    out: &mut [f32],
) {
    let (first, len) = (pieces.start, out.len());
    match pieces.len() {
        1 => scaled_loop(ctx.isa, scale, piece(first, len), out),
        2 => scaled_sum_loop(ctx.isa, scale, piece(first, len), piece(first + 1, len), out),
        n => {
            let mut right = [0.0; BLOCK];
            let (right, middle) = (&mut right[..len], first + split(n));
            tree_block(ctx, 1.0, middle..pieces.end, piece, right);
            tree_block(ctx, 1.0, first..middle, piece, out);
            add_and_scale_loop(ctx.isa, scale, right, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_split_at_powers_of_two() {
        assert_eq!([2, 3, 4, 5, 8, 9].map(split), [1, 2, 2, 4, 4, 8]);
        let x = [1.0, 1e-8, 1e-8, 1e-8, 1e-8];
        assert_eq!(tree(&x), ((x[0] + x[1]) + (x[2] + x[3])) + x[4]);
        assert_eq!(tree(&[]), 0.0);
    }
}
