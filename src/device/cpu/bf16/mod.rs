//! Products and convolutions in bfloat16: operands rounded to nearest even, sums in f32.
//!
//! The definition is that of AMX. The terms of a sum, padded with zeros to a multiple of 32, are taken 32 at a time: those at even
//! places are added one after the other with fused multiply-adds, those at odd places likewise, then `sum += even + odd`.
//! [`Unit::Amx`] and [`Unit::Emulated`] give the same bits, but that AMX takes what is below the smallest normal number (1.2e-38)
//! for zero. [`Unit::Avx512`] adds pair after pair, which is another order: its sums differ in rounding. No unit's results depend
//! on threads.
//!
//! Operands are laid out for tiles: *rows* of the left one are 32 neighbouring values at any distance from each other, so that
//! neighbouring windows of a picture overlap and nothing is copied per window; the right one is in *panels* of 16 columns,
//! `[pair of terms][16 columns][2]`.

mod amx;
mod block;
pub mod conv;
mod filter_grad;
pub mod gemm;
mod pack;
pub(super) mod peak;

use std::fmt;
use std::sync::OnceLock;

/// Terms of a sum that a tile holds.
const DEPTH: usize = 32;
/// Columns of a panel.
const COLUMNS: usize = 16;
/// Values of a right tile.
const TILE: usize = DEPTH * COLUMNS;
/// Columns of a block: two panels.
const BLOCK: usize = 2 * COLUMNS;
/// Rows of a tile at most.
const ROWS: usize = 16;

/// What multiplies bfloat16 values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// f32 arithmetic on rounded values.
    Emulated,
    /// `VDPBF16PS` of AVX-512.
    Avx512,
    /// `TDPBF16PS` on tile registers.
    Amx,
}

impl Unit {
    /// The best that this machine has. Asks Linux for the tile registers at the first call; without its leave there are none.
    pub fn detect() -> Self {
        Self::available().last().copied().unwrap_or(Self::Emulated)
    }

    /// All that this machine has, the slowest first.
    pub fn available() -> &'static [Self] {
        static AVAILABLE: OnceLock<Vec<Unit>> = OnceLock::new();
        AVAILABLE.get_or_init(|| {
            let mut all = vec![Self::Emulated];
            if block::has_avx512() {
                all.push(Self::Avx512);
            }
            if amx::permitted() {
                all.push(Self::Amx);
            }
            all
        })
    }

    /// This one, or where the machine lacks it, what always runs.
    fn or_emulated(self) -> Self {
        if Self::available().contains(&self) { self } else { Self::Emulated }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Emulated => "bf16 by f32",
            Self::Avx512 => "bf16 by AVX-512",
            Self::Amx => "bf16 by AMX",
        })
    }
}

/// The bfloat16 values in a part of the scratch memory.
fn halves(scratch: &mut [f32]) -> &mut [u16] {
    bytemuck::cast_slice_mut(scratch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_ends_with_the_detected_one() {
        assert_eq!(Unit::available()[0], Unit::Emulated);
        assert_eq!(Unit::available().last(), Some(&Unit::detect()));
    }
}
