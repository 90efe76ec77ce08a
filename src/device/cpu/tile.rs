//! The micro-kernel of all products and convolutions: a block of sums held in registers.

use super::Epilogue;
use super::simd::{Vector, multiversion};

/// A band of rows, at most one panel wide:
/// `out[p][j] = sum over o, i of a[p * row + i * step + o * a_outer] * b[i * panel + j + o * b_outer]`.
///
/// The sum runs in this order, one fused multiply-add after the other, whatever the instruction set.
#[derive(Clone, Copy)]
pub(crate) struct Band<'a> {
    /// Left operand, from the first row's first term on. Rows may overlap.
    pub a: &'a [f32],
    /// Distance between rows of `a`.
    pub row: usize,
    /// Distance between the terms of an inner sum in `a`.
    pub step: usize,
    /// Distance between inner sums in `a`.
    pub a_outer: usize,
    /// Right operand: a packed panel, its columns padded to [`Isa::panel`](super::Isa::panel).
    pub b: &'a [f32],
    /// Distance between inner sums in `b`.
    pub b_outer: usize,
    /// Terms of an inner sum.
    pub inner: usize,
    /// Inner sums.
    pub outer: usize,
    /// Rows.
    pub rows: usize,
    /// Columns, at most a panel.
    pub columns: usize,
    /// Distance between rows of `out`.
    pub out_row: usize,
    /// Whether to go on from the sums in `out`.
    pub accumulate: bool,
    /// What to do with the finished sums.
    pub epilogue: Epilogue<'a>,
}

impl Band<'_> {
    /// Computes the band into `out`.
    pub(crate) fn run(&self, isa: super::Isa, out: &mut [f32]) {
        if self.rows == 0 {
            return;
        }
        assert!(
            (self.rows - 1) * self.out_row + self.columns <= out.len(),
            "band leaves the output"
        );
        // SAFETY: all rows lie in `out`.
        unsafe { self.run_raw(isa, out.as_mut_ptr()) }
    }

    /// Computes the band into memory that other threads may use between this band's rows.
    ///
    /// # Safety
    /// `columns` floats at each multiple of `out_row` from `out` on are this call's alone.
    pub(crate) unsafe fn run_raw(&self, isa: super::Isa, out: *mut f32) {
        let panel = isa.panel();
        assert!((1..=panel).contains(&self.columns), "a band is one panel wide");
        if self.rows > 0 && self.inner > 0 && self.outer > 0 {
            let (inner, outer) = (self.inner - 1, self.outer - 1);
            let last = (self.rows - 1) * self.row + inner * self.step + outer * self.a_outer;
            assert!(last < self.a.len(), "band leaves its left operand");
            assert!(
                inner * panel + outer * self.b_outer + panel <= self.b.len(),
                "band leaves its panel"
            );
        }
        assert!(
            !matches!(self.epilogue, Epilogue::Bias(b) | Epilogue::BiasRelu(b) if b.len() < self.columns),
            "one bias per column"
        );
        band(isa, self, out);
    }
}

multiversion! {
    /// All rows, in tiles of about equal height. Only [`Band::run_raw`] calls this, after its checks.
    fn band<V>(t: &Band<'_>, out: *mut f32) {
        let tiles = t.rows.div_ceil(V::ROWS);
        for i in 0..tiles {
            let (from, to) = (t.rows * i / tiles, t.rows * (i + 1) / tiles);
            // SAFETY: the operands were checked against the last row; `out` is the caller's promise.
            unsafe {
                let (a, out) = (t.a.as_ptr().wrapping_add(from * t.row), out.add(from * t.out_row));
                if t.columns > V::LANES {
                    by_height::<V, 2>(t, to - from, a, out);
                } else {
                    by_height::<V, 1>(t, to - from, a, out);
                }
            }
        }
    }
}

/// Picks the tile of `rows` rows and `N` vectors.
#[inline(always)]
unsafe fn by_height<V: Vector, const N: usize>(
    t: &Band<'_>,
    rows: usize,
    a: *const f32,
    out: *mut f32,
) {
    macro_rules! pick {
        ($($p:literal)*) => {
            match rows {
                // SAFETY: as promised by the caller.
                $($p if $p <= V::ROWS => unsafe { tile::<V, $p, N>(t, a, out) },)*
                _ => unreachable!("a tile has 1 to {} rows", V::ROWS),
            }
        };
    }
    pick!(1 2 3 4 5 6 7 8 9 10 11 12)
}

/// `P` rows of `N` vectors.
#[inline(always)]
unsafe fn tile<V: Vector, const P: usize, const N: usize>(
    t: &Band<'_>,
    a: *const f32,
    out: *mut f32,
) {
    let (row, step, inner) = (t.row, t.step, t.inner);
    let full = t.columns == N * V::LANES;
    // SAFETY: `Band::run_raw` has checked that every index of the sum lies in `a` and `b`; `out` is the caller's
    // promise for `columns` floats per row, and narrower stores go through `edge`.
    unsafe {
        let mut acc = [[V::zero(); N]; P];
        let mut edge = [0.0f32; 32];
        if t.accumulate {
            for (p, row) in acc.iter_mut().enumerate() {
                let mut from = out.add(p * t.out_row).cast_const();
                if !full {
                    from.copy_to_nonoverlapping(edge.as_mut_ptr(), t.columns);
                    from = edge.as_ptr();
                }
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = V::load(from.add(v * V::LANES));
                }
            }
        }
        for o in 0..t.outer {
            // Rows in threes: addresses of the form base + {0, 1, 2} * row cost no instruction on x86.
            let start = a.wrapping_add(o * t.a_outer);
            let mut rows: [*const f32; 4] =
                std::array::from_fn(|g| start.wrapping_add(3 * g * row));
            let mut b = t.b.as_ptr().wrapping_add(o * t.b_outer);
            for _ in 0..inner {
                let w: [V; N] = std::array::from_fn(|v| V::load(b.add(v * V::LANES)));
                for (p, sums) in acc.iter_mut().enumerate() {
                    let x = V::splat(*rows[p / 3].add(p % 3 * row));
                    for (sum, w) in sums.iter_mut().zip(w) {
                        *sum = V::mul_add(x, w, *sum);
                    }
                }
                rows = rows.map(|r| r.wrapping_add(step));
                b = b.wrapping_add(2 * V::LANES);
            }
        }
        for (p, sums) in acc.into_iter().enumerate() {
            let to = out.add(p * t.out_row);
            if full {
                for (v, mut sum) in sums.into_iter().enumerate() {
                    if let Epilogue::Bias(bias) | Epilogue::BiasRelu(bias) = t.epilogue {
                        sum = V::add(sum, V::load(bias.as_ptr().add(v * V::LANES)));
                    }
                    if let Epilogue::BiasRelu(_) = t.epilogue {
                        sum = V::max(V::zero(), sum);
                    }
                    V::store(sum, to.add(v * V::LANES));
                }
            } else {
                for (v, sum) in sums.into_iter().enumerate() {
                    V::store(sum, edge.as_mut_ptr().add(v * V::LANES));
                }
                for (j, sum) in edge.iter().enumerate().take(t.columns) {
                    *to.add(j) = t.epilogue.apply(*sum, j);
                }
            }
        }
    }
}
