//! The transforms: between `A x A` values and `B x B` points, columns first, then rows, for every channel.
//!
//! The points are 0, +-1, +-2, perhaps +-1/2, and infinity. With `M(x) = x * prod(x^2 - a^2)` over the pairs `+-a`, data at
//! a point `p` are their product with the coefficients of `M(x) / (x - p)`, at infinity with those of `M`; a polynomial's
//! value at a pair is the sum and the difference of its even and its odd terms.

use std::ops::Range;

use crate::device::cpu::Epilogue;
use crate::device::cpu::simd::{Isa, Vector, multiversion};

/// What is transformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Map {
    /// A tile of the input to points.
    Data,
    /// A filter to points.
    Filter,
    /// A tile of the output's gradient to points.
    Gradient,
    /// Points to a tile of the output.
    Result,
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
    (map, taps): (Map, usize),
    (from, source): (&[f32], &Grid),
    (to, target): (&mut [f32], &Grid),
    epilogue: Epilogue<'_>,
) {
    assert!(target.extent() <= to.len(), "{map:?} leaves its target");
    // SAFETY: all of the target lies in `to`.
    unsafe { transform_raw(isa, (map, taps), (from, source), (to.as_mut_ptr(), target), epilogue) }
}

/// The same into memory that other threads may use between the target's values.
///
/// # Safety
/// The target's values from `to` on are this call's alone.
pub(super) unsafe fn transform_raw(
    isa: Isa,
    (map, taps): (Map, usize),
    (from, source): (&[f32], &Grid),
    (to, target): (*mut f32, &Grid),
    epilogue: Epilogue<'_>,
) {
    let lanes = isa.panel() / 2;
    assert!(source.extent() <= from.len(), "{map:?} leaves its source");
    assert_eq!(source.channels.div_ceil(lanes), target.channels.div_ceil(lanes), "{map:?}");
    let biased = match epilogue {
        Epilogue::None => target.channels,
        Epilogue::Bias(bias) | Epilogue::BiasRelu(bias) => bias.len(),
    };
    assert_eq!(biased, target.channels, "one bias per channel");
    let from = from.as_ptr().wrapping_sub(source.origin());
    dispatch(isa, map, taps, from, source, to.wrapping_sub(target.origin()), target, epilogue);
}

multiversion! {
    #[allow(clippy::too_many_arguments, reason = "two grids and their memories")]
    /// Only [`transform_raw`] calls this, after its checks; the pointers are those of row 0 and column 0.
    fn dispatch<V>(
        map: Map, taps: usize, from: *const f32, source: &Grid, to: *mut f32, target: &Grid, epilogue: Epilogue<'_>,
    ) {
        // SAFETY: this copy is compiled for `V`, and both grids were checked.
        unsafe {
            match (map, taps) {
                (Map::Data, 5) => square::<V, Data, 8, 8>(from, source, to, target, epilogue),
                (Map::Data, 3) => square::<V, Data, 6, 6>(from, source, to, target, epilogue),
                (Map::Filter, 5) => square::<V, Evaluate<true>, 5, 8>(from, source, to, target, epilogue),
                (Map::Filter, 3) => square::<V, Evaluate<true>, 3, 6>(from, source, to, target, epilogue),
                (Map::Gradient, 5) => square::<V, Evaluate<false>, 4, 8>(from, source, to, target, epilogue),
                (Map::Gradient, 3) => square::<V, Evaluate<false>, 4, 6>(from, source, to, target, epilogue),
                (Map::Result, 5) => square::<V, Combine<false>, 8, 4>(from, source, to, target, epilogue),
                (Map::Result, 3) => square::<V, Combine<false>, 6, 4>(from, source, to, target, epilogue),
                (Map::FilterGradient, 5) => square::<V, Combine<true>, 8, 5>(from, source, to, target, epilogue),
                (Map::FilterGradient, 3) => square::<V, Combine<true>, 6, 3>(from, source, to, target, epilogue),
                _ => unreachable!("filters have 3 or 5 taps a side, not {taps}"),
            }
        }
    }
}

/// A transform of one column or row.
pub(super) trait Line<V: Vector, const A: usize, const B: usize> {
    /// # Safety
    /// As for every function of [`Vector`].
    unsafe fn apply(x: [V; A]) -> [V; B];
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
    epilogue: Epilogue<'_>,
) {
    for c in (0..source.channels).step_by(V::LANES) {
        let [lanes, room] = [source, target].map(|grid| V::LANES.min(grid.channels - c));
        // SAFETY: the caller's promise; slices are as long as there are channels.
        unsafe {
            let mut half = [[V::zero(); A]; B];
            for x in source.columns.start..source.columns.end.min(A) {
                let mut column = [V::zero(); A];
                for (y, value) in column.iter_mut().enumerate() {
                    if source.rows.contains(&y) {
                        let at = from.wrapping_add(y * source.row + x * source.column + c);
                        *value = if lanes == V::LANES {
                            V::load(at)
                        } else {
                            V::load_part(std::slice::from_raw_parts(at, lanes))
                        };
                    }
                }
                let column = F::apply(column);
                for (row, value) in half.iter_mut().zip(column) {
                    row[x] = value;
                }
            }
            let bias = match epilogue {
                Epilogue::None => None,
                Epilogue::Bias(bias) | Epilogue::BiasRelu(bias) => {
                    Some(V::load_part(&bias[c..c + room]))
                }
            };
            let relu = matches!(epilogue, Epilogue::BiasRelu(_));
            for (y, row) in half.iter().enumerate() {
                if !target.rows.contains(&y) {
                    continue;
                }
                for (x, mut value) in F::apply(*row).into_iter().enumerate() {
                    if !target.columns.contains(&x) {
                        continue;
                    }
                    if let Some(bias) = bias {
                        value = V::add(value, bias);
                    }
                    if relu {
                        value = V::max(V::zero(), value);
                    }
                    let at = to.wrapping_add(y * target.row + x * target.column + c);
                    if room == V::LANES {
                        V::store(value, at);
                    } else {
                        V::store_part(value, std::slice::from_raw_parts_mut(at, room));
                    }
                }
            }
        }
    }
}

/// Where numbers of the pairs end, and those of all of them, or of 0, stand.
const ALL: usize = 3;

/// The numbers of a transform with `P` points.
pub(super) struct Points<const P: usize>;

impl<const P: usize> Points<P> {
    /// How many pairs of points there are beside 0 and infinity.
    pub(super) const PAIRS: usize = P / 2 - 1;
    /// The points, one of each pair.
    const VALUES: [f64; ALL] = [1.0, 2.0, 0.5];

    /// Powers of the points.
    const POWERS: [[f32; 5]; ALL] = {
        let mut powers = [[1.0; 5]; ALL];
        let mut k = 0;
        while k < ALL {
            let mut t = 1;
            while t < 5 {
                powers[k][t] = powers[k][t - 1] * Self::VALUES[k] as f32;
                t += 1;
            }
            k += 1;
        }
        powers
    };

    /// The coefficients of `prod(x^2 - a^2)` over all pairs but `pair`, the lowest first; none is left out for [`ALL`].
    const fn without(pair: usize) -> [f64; 4] {
        let mut product = [1.0, 0.0, 0.0, 0.0];
        let mut k = 0;
        while k < Self::PAIRS {
            if k != pair {
                let square = Self::VALUES[k] * Self::VALUES[k];
                let mut i = 3;
                while i > 0 {
                    product[i] = product[i - 1] - square * product[i];
                    i -= 1;
                }
                product[0] *= -square;
            }
            k += 1;
        }
        product
    }

    /// `prod(x^2 - a^2)`: over all pairs but `k`, and over all of them in the last place. Exact, they are short.
    const PRODUCTS: [[f32; 4]; 4] = {
        let mut products = [[0.0; 4]; 4];
        let mut k = 0;
        while k < 4 {
            let product = Self::without(k);
            let mut i = 0;
            while i < 4 {
                products[k][i] = product[i] as f32;
                i += 1;
            }
            k += 1;
        }
        products
    };

    /// The weights of the pairs, `1 / M'(a)`, and of 0 in the last place. That of infinity is 1.
    const WEIGHTS: [f32; 4] = {
        let mut weights = [0.0; 4];
        let mut k = 0;
        while k < Self::PAIRS {
            let square = Self::VALUES[k] * Self::VALUES[k];
            let c = Self::without(k);
            let at = c[0] + square * (c[1] + square * (c[2] + square * c[3]));
            weights[k] = (1.0 / (2.0 * square * at)) as f32;
            k += 1;
        }
        weights[ALL] = (1.0 / Self::without(ALL)[0]) as f32;
        weights
    };
}

/// `factor * x + y`.
#[inline(always)]
unsafe fn add_scaled<V: Vector>(factor: f32, x: V, y: V) -> V {
    // SAFETY: as promised by the caller.
    unsafe { V::mul_add(V::splat(factor), x, y) }
}

/// Data at the points.
pub(super) struct Data;

impl<V: Vector, const P: usize> Line<V, P, P> for Data {
    #[inline(always)]
    unsafe fn apply(d: [V; P]) -> [V; P] {
        let pairs = Points::<P>::PAIRS;
        // SAFETY: as promised by the caller.
        unsafe {
            let mut points = [V::zero(); P];
            let all = Points::<P>::PRODUCTS[ALL];
            let (mut zero, mut far) = (d[P - 2], d[P - 1]);
            for i in 0..pairs {
                zero = add_scaled(all[i], d[2 * i], zero);
                far = add_scaled(all[i], d[2 * i + 1], far);
            }
            (points[0], points[P - 1]) = (zero, far);
            for k in 0..pairs {
                let others = Points::<P>::PRODUCTS[k];
                let (mut even, mut odd) = (d[P - 2], d[P - 3]);
                for i in 0..pairs - 1 {
                    even = add_scaled(others[i], d[2 * i + 2], even);
                    odd = add_scaled(others[i], d[2 * i + 1], odd);
                }
                let value = Points::<P>::POWERS[k][1];
                points[2 * k + 1] = add_scaled(value, odd, even);
                points[2 * k + 2] = add_scaled(-value, odd, even);
            }
            points
        }
    }
}

/// The values of a polynomial of `N` terms at the points, times their weights where asked.
pub(super) struct Evaluate<const WEIGHTED: bool>;

impl<const WEIGHTED: bool> Evaluate<WEIGHTED> {
    /// The values at pair `k`.
    ///
    /// # Safety
    /// As for every function of [`Vector`].
    #[inline(always)]
    pub(super) unsafe fn pair<V: Vector, const N: usize, const P: usize>(
        k: usize,
        terms: &[V; N],
    ) -> [V; 2] {
        let weight = if WEIGHTED { Points::<P>::WEIGHTS[k] } else { 1.0 };
        let factor = |t: usize| weight * Points::<P>::POWERS[k][t];
        // SAFETY: as promised by the caller.
        unsafe {
            let mut even = V::mul(V::splat(factor(0)), terms[0]);
            let mut odd = V::mul(V::splat(factor(1)), terms[1]);
            for (t, term) in terms.iter().enumerate().skip(2) {
                let sum = if t % 2 == 0 { &mut even } else { &mut odd };
                *sum = add_scaled(factor(t), *term, *sum);
            }
            [V::add(even, odd), V::sub(even, odd)]
        }
    }
}

impl<V: Vector, const N: usize, const P: usize, const WEIGHTED: bool> Line<V, N, P>
    for Evaluate<WEIGHTED>
{
    #[inline(always)]
    unsafe fn apply(terms: [V; N]) -> [V; P] {
        let weight = if WEIGHTED { Points::<P>::WEIGHTS[ALL] } else { 1.0 };
        // SAFETY: as promised by the caller.
        unsafe {
            let mut points = [V::zero(); P];
            points[0] = V::mul(V::splat(weight), terms[0]);
            points[P - 1] = terms[N - 1];
            for k in 0..Points::<P>::PAIRS {
                [points[2 * k + 1], points[2 * k + 2]] = Self::pair::<V, N, P>(k, &terms);
            }
            points
        }
    }
}

/// The transpose of [`Evaluate`]: `N` sums of the points, each times its powers.
pub(super) struct Combine<const WEIGHTED: bool>;

impl<const WEIGHTED: bool> Combine<WEIGHTED> {
    /// The sums of the points 0 and infinity.
    ///
    /// # Safety
    /// As for every function of [`Vector`].
    #[inline(always)]
    pub(super) unsafe fn start<V: Vector, const P: usize, const N: usize>(
        zero: V,
        far: V,
    ) -> [V; N] {
        let weight = if WEIGHTED { Points::<P>::WEIGHTS[ALL] } else { 1.0 };
        // SAFETY: as promised by the caller.
        unsafe {
            let mut sums = [V::zero(); N];
            sums[0] = V::mul(V::splat(weight), zero);
            sums[N - 1] = far;
            sums
        }
    }

    /// Adds pair `k`.
    ///
    /// # Safety
    /// As for every function of [`Vector`].
    #[inline(always)]
    pub(super) unsafe fn add<V: Vector, const P: usize, const N: usize>(
        k: usize,
        [plus, minus]: [V; 2],
        sums: &mut [V; N],
    ) {
        let weight = if WEIGHTED { Points::<P>::WEIGHTS[k] } else { 1.0 };
        // SAFETY: as promised by the caller.
        unsafe {
            let parts = [V::add(plus, minus), V::sub(plus, minus)];
            for (t, sum) in sums.iter_mut().enumerate() {
                *sum = add_scaled(weight * Points::<P>::POWERS[k][t], parts[t % 2], *sum);
            }
        }
    }
}

impl<V: Vector, const P: usize, const N: usize, const WEIGHTED: bool> Line<V, P, N>
    for Combine<WEIGHTED>
{
    #[inline(always)]
    unsafe fn apply(points: [V; P]) -> [V; N] {
        // SAFETY: as promised by the caller.
        unsafe {
            let mut sums = Self::start::<V, P, N>(points[0], points[P - 1]);
            for k in 0..Points::<P>::PAIRS {
                let pair = [points[2 * k + 1], points[2 * k + 2]];
                Self::add::<V, P, N>(k, pair, &mut sums);
            }
            sums
        }
    }
}
