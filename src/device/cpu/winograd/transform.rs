//! The transforms: between `A x A` values and `B x B` points, columns first, then rows (`line.rs`), for every channel.

use std::ops::Range;

use super::line::{Combine, Data, Evaluate, Line};
use crate::device::cpu::Epilogue;
use crate::device::cpu::simd::{Isa, MAX_LANES, Vector, multiversion};

/// What is transformed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Map<'a> {
    /// A tile of the input to points.
    Data,
    /// A filter to points.
    Filter,
    /// A tile of the output's gradient to points.
    Gradient,
    /// Points to a tile of the output, finished.
    Result(Epilogue<'a>),
    /// Points to a filter's gradient.
    FilterGradient,
}

/// Where the values of a square lie; those outside `rows` and `columns` are zeros, or are not wanted.
#[derive(Clone, Debug)]
pub(super) struct Grid {
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub column: usize,
    /// Rows that exist.
    pub rows: Range<usize>,
    /// Columns that exist.
    pub columns: Range<usize>,
    /// Floats of each value, neighbours in memory.
    pub channels: usize,
}

impl Grid {
    /// Floats from the first value that exists to the end of the last.
    fn extent(&self) -> usize {
        if self.rows.is_empty() || self.columns.is_empty() {
            return 0;
        }
        (self.rows.len() - 1) * self.row + (self.columns.len() - 1) * self.column + self.channels
    }

    /// Floats from where row 0 and column 0 would be to the first value that exists.
    fn origin(&self) -> usize {
        self.rows.start * self.row + self.columns.start * self.column
    }
}

/// Transforms a square of `from`, which starts with the first value that exists, as does `to`. With more channels on one side
/// than on the other, the rest of a vector is filled with zeros, or dropped.
pub(super) fn transform(
    isa: Isa,
    (map, taps): (Map<'_>, usize),
    (from, source): (&[f32], &Grid),
    (to, target): (&mut [f32], &Grid),
) {
    assert!(target.extent() <= to.len(), "{map:?} leaves its target");
    // SAFETY: all of the target lies in `to`.
    unsafe { transform_raw(isa, (map, taps), (from, source), (to.as_mut_ptr(), target)) }
}

/// The same into memory that other threads may use between the target's values.
///
/// # Safety
/// The target's values from `to` on are this call's alone.
pub(super) unsafe fn transform_raw(
    isa: Isa,
    (map, taps): (Map<'_>, usize),
    (from, source): (&[f32], &Grid),
    (to, target): (*mut f32, &Grid),
) {
    let lanes = isa.panel() / 2;
    assert!(source.extent() <= from.len(), "{map:?} leaves its source");
    assert_eq!(source.channels.div_ceil(lanes), target.channels.div_ceil(lanes), "{map:?}");
    if let Map::Result(Epilogue::Bias(bias) | Epilogue::BiasRelu(bias)) = map {
        assert_eq!(bias.len(), target.channels, "one bias per channel");
    }
    let from = from.as_ptr().wrapping_sub(source.origin());
    dispatch(isa, map, taps, from, source, to.wrapping_sub(target.origin()), target);
}

multiversion! {
    /// Only [`transform_raw`] calls this, after its checks; the pointers are those of row 0 and column 0.
    fn dispatch<V>(
        map: Map<'_>, taps: usize, from: *const f32, source: &Grid, to: *mut f32, target: &Grid,
    ) {
        // SAFETY: this copy is compiled for `V`, and both grids were checked.
        unsafe {
            match (map, taps) {
                (Map::Data, 5) => square::<V, Data, 8, 8>(from, source, to, target, None),
                (Map::Data, 3) => square::<V, Data, 6, 6>(from, source, to, target, None),
                (Map::Filter, 5) => square::<V, Evaluate<true>, 5, 8>(from, source, to, target, None),
                (Map::Filter, 3) => square::<V, Evaluate<true>, 3, 6>(from, source, to, target, None),
                (Map::Gradient, 5) => square::<V, Evaluate<false>, 4, 8>(from, source, to, target, None),
                (Map::Gradient, 3) => square::<V, Evaluate<false>, 4, 6>(from, source, to, target, None),
                (Map::Result(epilogue), 5) => square::<V, Combine<false>, 8, 4>(from, source, to, target, Some(epilogue)),
                (Map::Result(epilogue), 3) => square::<V, Combine<false>, 6, 4>(from, source, to, target, Some(epilogue)),
                (Map::FilterGradient, 5) => square::<V, Combine<true>, 8, 5>(from, source, to, target, None),
                (Map::FilterGradient, 3) => square::<V, Combine<true>, 6, 3>(from, source, to, target, None),
                _ => unreachable!("filters have 3 or 5 taps a side, not {taps}"),
            }
        }
    }
}

/// `F` over the columns, then over the rows.
///
/// # Safety
/// As for every function of [`Vector`]; all values that the grids say exist do.
#[inline(always)]
unsafe fn square<V: Vector, F: Line<V, A, B>, const A: usize, const B: usize>(
    from: *const f32,
    source: &Grid,
    to: *mut f32,
    target: &Grid,
    epilogue: Option<Epilogue<'_>>,
) {
    let full = target.rows == (0..B) && target.columns == (0..B);
    // SAFETY: the caller's promise.
    unsafe {
        let mut half = [[V::zero(); A]; B];
        for c in (0..source.channels).step_by(V::LANES) {
            let whole = c + V::LANES <= source.channels.min(target.channels);
            columns::<V, F, A, B>(from.wrapping_add(c), source, c, whole, &mut half);
            if full && whole {
                rows::<V, F, A, B, true>(&half, to, target, c, epilogue);
            } else {
                rows::<V, F, A, B, false>(&half, to, target, c, epilogue);
            }
        }
    }
}

/// `F` over the columns that exist.
///
/// # Safety
/// As for [`square`].
#[inline(always)]
unsafe fn columns<V: Vector, F: Line<V, A, B>, const A: usize, const B: usize>(
    from: *const f32,
    source: &Grid,
    c: usize,
    whole: bool,
    half: &mut [[V; A]; B],
) {
    // Rows that do not exist are read here: the loops below then know no exceptions.
    static ZEROS: [f32; MAX_LANES] = [0.0; MAX_LANES];
    let first = from.wrapping_add(source.columns.start * source.column);
    let mut at: [*const f32; A] = std::array::from_fn(|y| match source.rows.contains(&y) {
        true => first.wrapping_add(y * source.row),
        false => ZEROS.as_ptr(),
    });
    let steps: [usize; A] =
        std::array::from_fn(|y| if source.rows.contains(&y) { source.column } else { 0 });
    for x in source.columns.start..source.columns.end.min(A) {
        // SAFETY: the caller's promise; a slice is as long as there are channels.
        unsafe {
            let column = if whole {
                at.map(|at| V::load(at))
            } else {
                let lanes = V::LANES.min(source.channels - c);
                at.map(|at| V::load_part(std::slice::from_raw_parts(at, lanes)))
            };
            for (row, value) in half.iter_mut().zip(F::apply(column)) {
                row[x] = value;
            }
        }
        for (at, step) in at.iter_mut().zip(steps) {
            *at = at.wrapping_add(step);
        }
    }
}

/// `F` over the rows, finished where asked; with `ALL`, all values and lanes of the target exist.
///
/// # Safety
/// As for [`square`].
#[inline(always)]
unsafe fn rows<V: Vector, F: Line<V, A, B>, const A: usize, const B: usize, const ALL: bool>(
    half: &[[V; A]; B],
    to: *mut f32,
    target: &Grid,
    c: usize,
    epilogue: Option<Epilogue<'_>>,
) {
    // SAFETY: the caller's promise; slices are as long as there are channels.
    unsafe {
        let room = V::LANES.min(target.channels - c);
        // What changes no sum, where nothing is asked.
        let (mut bias, mut least) = (V::splat(-0.0), V::splat(f32::NEG_INFINITY));
        if let Some(Epilogue::Bias(values) | Epilogue::BiasRelu(values)) = epilogue {
            bias = V::load_lanes::<ALL>(&values[c..], room);
        }
        if let Some(Epilogue::BiasRelu(_)) = epilogue {
            least = V::zero();
        }
        for (y, row) in half.iter().enumerate() {
            if !ALL && !target.rows.contains(&y) {
                continue;
            }
            for (x, mut value) in F::apply(*row).into_iter().enumerate() {
                if !ALL && !target.columns.contains(&x) {
                    continue;
                }
                if epilogue.is_some() {
                    value = V::max(least, V::add(value, bias));
                }
                let at = to.wrapping_add(y * target.row + x * target.column + c);
                if ALL {
                    V::store(value, at);
                } else {
                    V::store_part(value, std::slice::from_raw_parts_mut(at, room));
                }
            }
        }
    }
}
