//! Rounding operands into the layouts that tiles want.

use super::super::simd::multiversion;
use super::{BLOCK, COLUMNS, DEPTH, ROWS, TILE};
use crate::util::half::bf16_from_f32;

/// How pictures lie in a sequence of positions among zeros, which must be there already: pixel `(y, x)` is at
/// `(y * stride + top) * width + x * stride + left`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spread {
    /// Extents of a picture.
    pub(super) extents: [usize; 2],
    /// Its channels.
    pub(super) channels: usize,
    /// Floats from pixel to pixel.
    pub(super) pitch: usize,
    /// Rows above and columns at the left.
    pub(super) pad: [usize; 2],
    /// Distances between rows and columns.
    pub(super) stride: [usize; 2],
    /// Positions of a row.
    pub(super) width: usize,
}

impl Spread {
    /// The position of a pixel.
    #[inline(always)]
    pub(super) fn at(&self, y: usize, x: usize) -> usize {
        (y * self.stride[0] + self.pad[0]) * self.width + x * self.stride[1] + self.pad[1]
    }

    /// Positions up to the last pixel.
    pub(super) fn len(&self) -> usize {
        self.at(self.extents[0] - 1, self.extents[1] - 1) + 1
    }

    /// The floats of a pixel and what follows.
    #[inline(always)]
    fn pixel<'a>(&self, from: &'a [f32], y: usize, x: usize) -> &'a [f32] {
        &from[(y * self.extents[1] + x) * self.pitch..]
    }
}

/// A pair of terms as a tile holds it; no pixel is zeros.
#[inline(always)]
fn pair(low: Option<f32>, high: Option<f32>) -> u32 {
    let half = |v: Option<f32>| v.map_or(0, |v| u32::from(bf16_from_f32(v)));
    half(low) | half(high) << 16
}

/// Calls `store(position, column, pair)` for the pairs of neighbouring positions, the first of them even, in which there is a
/// pixel. Rows begin at even positions.
#[inline(always)]
fn each_pair(s: &Spread, from: &[f32], mut store: impl FnMut(usize, usize, &[u32])) {
    debug_assert!(s.width.is_multiple_of(2), "rows begin at even positions");
    let c = s.channels;
    let (first, last) = (s.pad[1], s.pad[1] + (s.extents[1] - 1) * s.stride[1]);
    for y in 0..s.extents[0] {
        let start = (y * s.stride[0] + s.pad[0]) * s.width;
        let pixel = |at: usize| {
            let x = at.checked_sub(first).filter(|_| at <= last)?;
            // A division takes as long as a pixel, and the stride is mostly one.
            let x = match s.stride[1] {
                1 => x,
                stride if x.is_multiple_of(stride) => x / stride,
                _ => return None,
            };
            Some(&s.pixel(from, y, x)[..c])
        };
        for at in (first / 2 * 2..=last).step_by(2) {
            let both = (pixel(at), pixel(at + 1));
            if both == (None, None) {
                continue;
            }
            for column in (0..c).step_by(COLUMNS) {
                let n = COLUMNS.min(c - column);
                let mut pairs = [0u32; COLUMNS];
                let part = |pixel: &[f32]| -> [f32; COLUMNS] {
                    let pixel = &pixel[column..];
                    pixel.first_chunk().copied().unwrap_or_else(|| {
                        std::array::from_fn(|j| pixel.get(j).copied().unwrap_or(0.0))
                    })
                };
                match both {
                    (Some(low), Some(high)) => {
                        let (low, high) = (part(low), part(high));
                        for (j, p) in pairs.iter_mut().enumerate() {
                            *p = pair(Some(low[j]), Some(high[j]));
                        }
                    }
                    (Some(low), None) => {
                        let low = part(low);
                        for (p, low) in pairs.iter_mut().zip(low) {
                            *p = pair(Some(low), None);
                        }
                    }
                    (None, Some(high)) => {
                        let high = part(high);
                        for (p, high) in pairs.iter_mut().zip(high) {
                            *p = pair(None, Some(high));
                        }
                    }
                    (None, None) => {}
                }
                store(start + at, column, &pairs[..n]);
            }
        }
    }
}

multiversion! {
    /// `[position][channel]`: left operands along channels.
    pub(super) fn rows(s: &Spread, from: &[f32], to: &mut [u16]) {
        let c = s.channels;
        // Whole rows at a time where neither side has gaps.
        let (pixels, len) = match s.stride[1] == 1 && s.pitch == c {
            true => (1, s.extents[1] * c),
            false => (s.extents[1], c),
        };
        for y in 0..s.extents[0] {
            for x in 0..pixels {
                let to = &mut to[s.at(y, x) * c..][..len];
                for (t, v) in to.iter_mut().zip(&s.pixel(from, y, x)[..len]) {
                    *t = bf16_from_f32(*v);
                }
            }
        }
    }
}

multiversion! {
    /// Panels over positions, one after the other, each of `len` positions: right operands.
    pub(super) fn panels(s: &Spread, len: usize, from: &[f32], to: &mut [u16]) {
        let to: &mut [u32] = bytemuck::cast_slice_mut(to);
        each_pair(s, from, |at, column, pairs| {
            let start = column / COLUMNS * (len / 2 * COLUMNS) + at / 2 * COLUMNS;
            to[start..start + pairs.len()].copy_from_slice(pairs);
        });
    }
}

multiversion! {
    /// Tiles of 16 channels by 32 positions, `[block of channels][tile][channel][position]`, `len` positions a block: left operands
    /// along positions, which are walked through in the order in which they lie.
    pub(super) fn planes(s: &Spread, len: usize, from: &[f32], to: &mut [u16]) {
        let to: &mut [u32] = bytemuck::cast_slice_mut(to);
        each_pair(s, from, |at, column, pairs| {
            let to = &mut to[(column * len + at / DEPTH * TILE + at % DEPTH) / 2..];
            for (to, pair) in to.iter_mut().step_by(DEPTH / 2).zip(pairs) {
                *to = *pair;
            }
        });
    }
}

multiversion! {
    /// Panels as they would be one position further on.
    pub(super) fn shifted(from: &[u16], to: &mut [u16]) {
        let (from, to): (&[u32], &mut [u32]) = (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
        // Nothing follows the last pair.
        let inner = from.len() - COLUMNS;
        for ((to, this), next) in to.iter_mut().zip(&from[..inner]).zip(&from[COLUMNS..]) {
            *to = this >> 16 | next << 16;
        }
        for (to, this) in to[inner..].iter_mut().zip(&from[inner..]) {
            *to = this >> 16;
        }
    }
}

multiversion! {
    /// A panel of 16 values from each position on, of rounded pictures of `channels`: as wide as several pixels.
    pub(super) fn patches(channels: usize, from: &[u16], to: &mut [u16]) {
        let to: &mut [u32] = bytemuck::cast_slice_mut(to);
        for (pair, to) in to.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
            let low = &from[2 * pair * channels..];
            let (low, high) = (&low[..COLUMNS], &low[channels..][..COLUMNS]);
            for ((to, low), high) in to.iter_mut().zip(low).zip(high) {
                *to = u32::from(*low) | u32::from(*high) << 16;
            }
        }
    }
}

multiversion! {
    /// A panel from up to 16 rows of `terms` floats each, which become its columns.
    pub(super) fn panel_of_rows(from: &[f32], terms: usize, to: &mut [u16]) {
        let to: &mut [u32] = bytemuck::cast_slice_mut(to);
        for (k, to) in to.chunks_exact_mut(DEPTH / 2 * COLUMNS).enumerate() {
            let k = k * DEPTH;
            let n = DEPTH.min(terms - k);
            for (j, from) in from.chunks_exact(terms).enumerate() {
                let mut part = [0.0f32; DEPTH];
                part[..n].copy_from_slice(&from[k..][..n]);
                let halves = part.map(bf16_from_f32);
                for (to, [low, high]) in to[j..].iter_mut().step_by(COLUMNS).zip(halves.as_chunks::<2>().0) {
                    *to = u32::from(*low) | u32::from(*high) << 16;
                }
            }
        }
    }
}

multiversion! {
    /// Tiles of 16 rows by 32 terms, `[block of rows][tile][row][term]`, from rows of `terms` floats each: left operands. Where the last
    /// terms do not fill a tile there must be zeros already.
    pub(super) fn tiles_of_rows(from: &[f32], terms: usize, to: &mut [u16]) {
        let blocks = to.chunks_exact_mut(ROWS * terms.next_multiple_of(DEPTH));
        for (rows, to) in from.chunks(ROWS * terms).zip(blocks) {
            for (j, row) in rows.chunks_exact(terms).enumerate() {
                for (part, to) in row.chunks(DEPTH).zip(to[j * DEPTH..].chunks_mut(TILE)) {
                    for (to, v) in to.iter_mut().zip(part) {
                        *to = bf16_from_f32(*v);
                    }
                }
            }
        }
    }
}

/// Puts one term of a panel.
pub(super) fn put(panel: &mut [u16], term: usize, column: usize, value: f32) {
    panel[term / 2 * BLOCK + 2 * column + term % 2] = bf16_from_f32(value);
}
