//! [`Block`]: the one micro-kernel of all products in bfloat16, up to 32 rows of 32 sums, by each [`Unit`].

use std::marker::PhantomData;

use super::super::simd::multiversion;
use super::{BLOCK, COLUMNS, DEPTH, ROWS, TILE, Unit, amx};
use crate::device::cpu::{Isa, IsaLimit};
use crate::util::half::f32_from_bf16;

/// One or two left tiles times two panels, over `outer` times `inner` tiles along the sum.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    /// Left operand, from the first row's first term on. Rows may overlap.
    pub(super) a: &'a [u16],
    /// Distance between rows.
    pub(super) row: usize,
    /// Distance from a row of the first left tile to that of the second, if there is one.
    pub(super) second: Option<usize>,
    /// Distance between the tiles of an inner sum in `a`.
    pub(super) a_step: usize,
    /// Distance between inner sums in `a`.
    pub(super) a_outer: usize,
    /// Right operand.
    pub(super) b: &'a [u16],
    /// Where its two panels begin.
    pub(super) panels: [usize; 2],
    /// Distance between the tiles of an inner sum in `b`.
    pub(super) b_step: usize,
    /// Distance between inner sums in `b`.
    pub(super) b_outer: usize,
    /// Tiles of an inner sum, at least one.
    pub(super) inner: usize,
    /// Inner sums, at least one.
    pub(super) outer: usize,
    /// Whether to go on from the sums that are there.
    pub(super) accumulate: bool,
}

/// A thread's unit, set up for tiles of so many rows. No other may live on the thread meanwhile.
pub(super) struct Tiles {
    unit: Unit,
    rows: usize,
    /// The registers are this thread's.
    here: PhantomData<*mut ()>,
}

impl Tiles {
    /// Sets this thread up for left tiles of `rows` rows.
    pub(super) fn new(unit: Unit, rows: usize) -> Self {
        assert!((1..=ROWS).contains(&rows), "tiles have 1 to {ROWS} rows");
        let unit = unit.or_emulated();
        if unit == Unit::Amx {
            // SAFETY: `or_emulated` has it that AMX is permitted.
            unsafe { amx::configure(rows) };
        }
        Self { unit, rows, here: PhantomData }
    }

    /// Computes a block: its first tile's sums into rows of 32 floats at `out[first..]`, `out_row` apart, its second's at
    /// `out[second..]`.
    pub(super) fn run(&self, t: &Block<'_>, out: &mut [f32], out_row: usize, at: [usize; 2]) {
        t.check(self.rows);
        for &first in &at[..1 + usize::from(t.second.is_some())] {
            assert!(
                out_row >= BLOCK && first + (self.rows - 1) * out_row + BLOCK <= out.len(),
                "a block leaves its output"
            );
        }
        match self.unit {
            Unit::Emulated => {
                for (&at, from) in at.iter().zip(t.tiles()) {
                    emulate(Isa::detect(), t, from, self.rows, &mut out[at..], out_row);
                }
            }
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => {
                for (&at, from) in at.iter().zip(t.tiles()) {
                    let rows = (0..self.rows).step_by(GROUP);
                    for first in rows {
                        let (a, out) =
                            (from + first * t.row, out[at + first * out_row..].as_mut_ptr());
                        // SAFETY: the unit is there; the operands were checked, and the rows of `out` above.
                        unsafe { avx512::rows(t, a, GROUP.min(self.rows - first), out, out_row) };
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            Unit::Amx => {
                let out = out.as_mut_ptr();
                // SAFETY: `new` has configured this thread for `rows` rows; operands and output were checked.
                unsafe { amx::multiply(t, out.add(at[0]), out_row, out.wrapping_add(at[1])) };
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("only the emulation is available"),
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        if self.unit == Unit::Amx {
            // SAFETY: AMX is there, as it was in `new`.
            unsafe { amx::release() };
        }
    }
}

/// Rows of sums that AVX-512 keeps in registers.
const GROUP: usize = 8;

/// Whether this machine has `VDPBF16PS`, and what is used beside it.
pub(super) fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    return Isa::detect() == Isa::Avx512
        && IsaLimit::Avx512Bf16.allows()
        && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

impl Block<'_> {
    /// Where the left tiles begin.
    fn tiles(&self) -> impl Iterator<Item = usize> {
        std::iter::once(0).chain(self.second)
    }

    /// Asserts that all operands of a block of `rows` rows are there.
    fn check(&self, rows: usize) {
        assert!(self.inner > 0 && self.outer > 0, "a block has terms");
        let (inner, outer) = (self.inner - 1, self.outer - 1);
        let last = (rows - 1) * self.row
            + self.second.unwrap_or(0)
            + inner * self.a_step
            + outer * self.a_outer
            + DEPTH;
        assert!(
            last <= self.a.len(),
            "a block leaves its left operand: {last} of {}",
            self.a.len()
        );
        let last =
            self.panels[0].max(self.panels[1]) + inner * self.b_step + outer * self.b_outer + TILE;
        assert!(last <= self.b.len(), "a block leaves its panels: {last} of {}", self.b.len());
    }
}

multiversion! {
    /// One left tile, from `a[from..]` on, by the definition.
    fn emulate(t: &Block<'_>, from: usize, rows: usize, out: &mut [f32], out_row: usize) {
        for row in 0..rows {
            for panel in 0..2 {
                let out = &mut out[row * out_row + panel * COLUMNS..][..COLUMNS];
                let mut sums = [0.0f32; COLUMNS];
                if t.accumulate {
                    sums.copy_from_slice(out);
                }
                for o in 0..t.outer {
                    for i in 0..t.inner {
                        let a = &t.a[from + row * t.row + i * t.a_step + o * t.a_outer..][..DEPTH];
                        let b = &t.b[t.panels[panel] + i * t.b_step + o * t.b_outer..][..TILE];
                        let (mut even, mut odd) = ([0.0f32; COLUMNS], [0.0f32; COLUMNS]);
                        for (a, b) in a.as_chunks::<2>().0.iter().zip(b.as_chunks::<BLOCK>().0) {
                            let [a0, a1] = a.map(f32_from_bf16);
                            for (j, b) in b.as_chunks::<2>().0.iter().enumerate() {
                                even[j] = a0.mul_add(f32_from_bf16(b[0]), even[j]);
                                odd[j] = a1.mul_add(f32_from_bf16(b[1]), odd[j]);
                            }
                        }
                        for ((sum, even), odd) in sums.iter_mut().zip(even).zip(odd) {
                            *sum += even + odd;
                        }
                    }
                }
                out.copy_from_slice(&sums);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::{
        __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512,
        _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
    };

    use super::{BLOCK, Block, COLUMNS};

    /// `rows` rows, up to [`GROUP`](super::GROUP), of a left tile that begin at `a[from]`.
    ///
    /// # Safety
    /// AVX-512 with BF16; the block is checked; the rows of `out` are this call's.
    pub(super) unsafe fn rows(
        t: &Block<'_>,
        from: usize,
        rows: usize,
        out: *mut f32,
        out_row: usize,
    ) {
        macro_rules! pick {
            ($($n:literal)*) => {
                match rows {
                    // SAFETY: as promised by the caller.
                    $($n => unsafe { group::<$n>(t, from, out, out_row) },)*
                    _ => unreachable!("a group has 1 to 8 rows"),
                }
            };
        }
        pick!(1 2 3 4 5 6 7 8)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn group<const N: usize>(t: &Block<'_>, from: usize, out: *mut f32, out_row: usize) {
        // SAFETY: `Block::check` covers every row, tile and panel that is read; `out` is the caller's promise.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); 2]; N];
            if t.accumulate {
                for (row, sums) in sums.iter_mut().enumerate() {
                    let from = out.add(row * out_row);
                    *sums = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(COLUMNS))];
                }
            }
            for o in 0..t.outer {
                for i in 0..t.inner {
                    let a = t.a.as_ptr().add(from + i * t.a_step + o * t.a_outer);
                    let b = t.b.as_ptr().add(i * t.b_step + o * t.b_outer);
                    for pair in 0..16 {
                        let right = |panel: usize| {
                            let b = b.add(t.panels[panel] + pair * BLOCK);
                            std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(b.cast()))
                        };
                        let b = [right(0), right(1)];
                        for (row, sums) in sums.iter_mut().enumerate() {
                            let a = a.add(row * t.row + 2 * pair).cast::<i32>().read_unaligned();
                            let a = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(a));
                            for (sum, b) in sums.iter_mut().zip(b) {
                                *sum = _mm512_dpbf16_ps(*sum, a, b);
                            }
                        }
                    }
                }
            }
            for (row, sums) in sums.into_iter().enumerate() {
                let to = out.add(row * out_row);
                _mm512_storeu_ps(to, sums[0]);
                _mm512_storeu_ps(to.add(COLUMNS), sums[1]);
            }
        }
    }
}
