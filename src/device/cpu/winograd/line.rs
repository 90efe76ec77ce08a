//! The transform of one column or row of a tile.
//!
//! The points are 0, +-1, +-2, perhaps +-1/2, and infinity. With `M(x) = x * prod(x^2 - a^2)` over the pairs `+-a`, data at
//! a point `p` are their product with the coefficients of `M(x) / (x - p)`, at infinity with those of `M`; a polynomial's
//! value at a pair is the sum and the difference of its even and its odd terms.

use crate::device::cpu::simd::Vector;

/// A transform of one column or row.
pub(super) trait Line<V: Vector, const A: usize, const B: usize> {
    /// # Safety
    /// As for every function of [`Vector`].
    unsafe fn apply(x: [V; A]) -> [V; B];
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
