//! Convolutions of few input channels in tiles: their products are so short that they never go through memory.
//!
//! The tiles of a picture are transformed once, to `[tile][point][channel]`. Then, for one vector of output channels after the
//! other and a few tiles at a time, a row of points is multiplied and transformed in registers, while the first-level cache holds
//! the filter's points and what becomes of the rows.

mod filter_grad;
mod forward;

pub(super) use self::filter_grad::{filter_grad, filter_grad_scratch};
pub(super) use self::forward::{forward, forward_pool, forward_pool_scratch, forward_scratch};

use super::line::{Data, Line};
use super::{TILE, Tiling};
use crate::device::cpu::Ctx;
use crate::device::cpu::conv::Conv;
use crate::device::cpu::maxima::{Channels, padded};
use crate::device::cpu::simd::{Vector, multiversion};
use crate::graph::Window;

/// Input channels there are kernels for.
const MOST: usize = 4;
/// Tiles that share what is loaded of a filter, at most.
const TOGETHER: usize = 4;

/// Whether a convolution has few enough input channels.
pub(super) fn fits(conv: &Conv) -> bool {
    conv.in_channels <= MOST
}

/// Calls a kernel, compiled for the extent of a filter, the points of a tile's side, and the input channels.
macro_rules! by_size {
    ($tiling:expr, |$points:ident, $channels:ident| $call:expr) => {
        by_size!($tiling, $points, $channels, $call, (3, 6, 1) (3, 6, 2) (3, 6, 3) (3, 6, 4)
            (5, 8, 1) (5, 8, 2) (5, 8, 3) (5, 8, 4))
    };
    ($tiling:expr, $p:ident, $c:ident, $call:expr, $(($taps:literal, $points:literal, $ins:literal))*) => {
        match ($tiling.taps, $tiling.source.channels) {
            $(($taps, $ins) => {
                const $p: usize = $points;
                const $c: usize = $ins;
                $call
            })*
            size => unreachable!("no kernel for taps and channels {size:?}"),
        }
    };
}
use by_size;

/// The tiles of a convolution, and the vectors of its output channels.
#[derive(Clone, Copy)]
struct Thin {
    tiling: Tiling,
    /// Floats of a vector.
    lanes: usize,
}

impl Thin {
    fn of(ctx: Ctx, conv: &Conv) -> Self {
        Self { tiling: Tiling::forward(conv), lanes: ctx.isa.panel() / 2 }
    }

    /// Rows and columns of tiles.
    fn tiles(&self) -> [usize; 2] {
        self.tiling.target.extents.map(|extent| extent.div_ceil(TILE))
    }

    /// Values of a transformed tile, and of the filter of an output channel.
    fn values(&self) -> usize {
        self.tiling.points() * self.tiling.source.channels
    }

    /// Tiles with those that make the last group whole; these are zeros.
    fn slots(&self) -> usize {
        self.tiling.tiles().next_multiple_of(TOGETHER)
    }

    /// Vectors of output channels.
    fn vectors(&self) -> usize {
        self.tiling.target.channels.div_ceil(self.lanes)
    }

    /// The output channels of a vector.
    fn channels(&self, vector: usize) -> Channels {
        let all = self.tiling.target.channels;
        let first = vector * self.lanes;
        Channels { all, first, count: self.lanes.min(all - first), pitch: self.lanes }
    }

    /// Floats of the values of one vector at all places of a picture below a pool, with what its windows need around it.
    fn plane(&self, pool: &Window) -> usize {
        let [height, width] = padded(pool).input;
        height * width * self.lanes
    }

    /// Floats of a row of a picture that is as wide as its tiles.
    fn row(&self) -> usize {
        (self.tiles()[1] * TILE + self.tiling.taps - 1) * self.tiling.source.channels
    }

    /// Floats of a picture that is as large as its tiles, with room for a last full read.
    fn wide(&self) -> usize {
        (self.tiles()[0] * TILE + self.tiling.taps - 1) * self.row() + self.lanes
    }

    /// Floats of a row of tiles whose columns are transformed.
    fn half(&self) -> usize {
        self.tiling.side() * self.row().next_multiple_of(self.lanes) + self.lanes
    }

    /// Floats of scratch memory for [`Self::transform`].
    fn scratch(&self) -> usize {
        self.wide() + self.half() + self.slots() * self.values() + self.lanes
    }

    /// Makes the zeros around pictures, and after the last tile.
    fn clear(&self, scratch: &mut [f32]) {
        scratch[..self.scratch()].fill(0.0);
    }

    /// The transformed tiles of a picture. `scratch` has been cleared once.
    fn transform<'a>(&self, ctx: Ctx, picture: &[f32], scratch: &'a mut [f32]) -> &'a [f32] {
        let (wide, rest) = scratch[..self.scratch()].split_at_mut(self.wide());
        let (half, points) = rest.split_at_mut(self.half());
        let (t, c, [_, across]) = (&self.tiling, self.tiling.source.channels, self.tiles());
        let rows = picture.chunks_exact(t.source.extents[1] * c);
        for (from, to) in rows.zip(wide.chunks_mut(self.row()).skip(t.pad[0])) {
            let to = &mut to[t.pad[1] * c..];
            let len = from.len().min(to.len());
            to[..len].copy_from_slice(&from[..len]);
        }
        for (row, first) in (0..t.tiles()).step_by(across).enumerate() {
            let from = &wide[row * TILE * self.row()..];
            let to = &mut points[first * self.values()..];
            row_of_tiles(ctx.isa, self, from, half, to);
        }
        // The last tile's vectors reach beyond it.
        let last = t.tiles() * self.values();
        points[last..last + self.lanes].fill(0.0);
        &points[..self.slots() * self.values()]
    }

    /// The tiles of a picture whose columns and rows are so far apart: where the first value of each lies, and how many rows and
    /// columns of it there are.
    #[inline(always)]
    fn places(&self, [pitch, row]: [usize; 2]) -> impl Iterator<Item = (usize, [usize; 2])> {
        let ([height, width], mut at) = (self.tiling.target.extents, [0, 0]);
        std::iter::from_fn(move || {
            let [y, x] = at;
            at = if x + TILE < width { [y, x + TILE] } else { [y + TILE, 0] };
            (y < height).then(|| (y * row + x * pitch, [TILE.min(height - y), TILE.min(width - x)]))
        })
    }
}

multiversion! {
    /// Transforms a row of tiles: `from` begins with its first row of the wide picture.
    fn row_of_tiles<V>(thin: &Thin, from: &[f32], half: &mut [f32], to: &mut [f32]) {
        let (c, row, across) = (thin.tiling.source.channels, thin.row(), thin.tiles()[1]);
        // SAFETY: this copy is compiled for `V`.
        unsafe {
            match thin.tiling.taps {
                3 => points::<V, 6>([across, c, row], from, half, to),
                5 => points::<V, 8>([across, c, row], from, half, to),
                taps => unreachable!("filters have 3 or 5 taps a side, not {taps}"),
            }
        }
    }
}

/// Columns first, for all tiles at once, then rows. Vectors hold the neighbours' values beyond the channels of their own; those are
/// overwritten by the neighbours.
///
/// # Safety
/// As for every function of [`Vector`].
#[inline(always)]
unsafe fn points<V: Vector, const P: usize>(
    [across, c, row]: [usize; 3],
    from: &[f32],
    half: &mut [f32],
    to: &mut [f32],
) {
    let pitch = row.next_multiple_of(V::LANES);
    assert!(from.len() >= P * row + V::LANES && half.len() >= P * pitch + V::LANES);
    assert!(row >= (across * TILE + P - TILE) * c && to.len() >= across * P * P * c + V::LANES);
    // SAFETY: the caller's promise; vectors begin in the rows of `from` and `half`, and with the values of tiles.
    unsafe {
        for at in (0..row).step_by(V::LANES) {
            let column = std::array::from_fn(|y| V::load(from.as_ptr().add(y * row + at)));
            let column: [V; P] = Data::apply(column);
            for (y, value) in column.into_iter().enumerate() {
                V::store(value, half.as_mut_ptr().add(y * pitch + at));
            }
        }
        for tile in 0..across {
            for y in 0..P {
                let from = half.as_ptr().add(y * pitch + tile * TILE * c);
                let line = std::array::from_fn(|x| V::load(from.add(x * c)));
                let line: [V; P] = Data::apply(line);
                for (x, value) in line.into_iter().enumerate() {
                    V::store(value, to.as_mut_ptr().add(((tile * P + y) * P + x) * c));
                }
            }
        }
    }
}

/// Tiles at a time: as many as the registers have room for.
const fn together<V: Vector>() -> usize {
    match V::ROWS {
        12.. => TOGETHER,
        6.. => 2,
        _ => 1,
    }
}
