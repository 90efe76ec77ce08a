//! Instruction sets: [`Isa`], the [`Vector`]s of the micro-kernel, and `multiversion!` for plain loops.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64 as x86;
use std::fmt;
use std::sync::OnceLock;

/// An instruction set that kernels exist for, the narrowest first.
///
/// All give the same bits, so a kernel that is asked for a set the machine lacks takes the best one it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// What the target always has.
    Portable,
    /// 256-bit vectors with FMA.
    Avx2,
    /// 512-bit vectors.
    Avx512,
}

/// What kernels may use at most, whatever the machine has: it then computes as a lesser one would.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum IsaLimit {
    /// Nothing beyond the target.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 without products of bfloat16.
    Avx512,
    /// AVX-512 with them, but no tile registers.
    Avx512Bf16,
    /// Everything.
    Amx,
}

static LIMIT: OnceLock<IsaLimit> = OnceLock::new();

impl IsaLimit {
    /// All, by the names that users write.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("portable", Self::Portable),
        ("avx2", Self::Avx2),
        ("avx512", Self::Avx512),
        ("avx512_bf16", Self::Avx512Bf16),
        ("amx", Self::Amx),
    ];

    /// Holds for the whole process. Only the first call counts, before anything is computed.
    pub fn set(self) {
        let _ = LIMIT.set(self);
    }

    /// Whether kernels may use this.
    pub(super) fn allows(self) -> bool {
        self <= *LIMIT.get_or_init(|| Self::Amx)
    }
}

impl Isa {
    /// The widest instruction set of this machine that [`IsaLimit`] allows.
    #[inline]
    pub fn detect() -> Self {
        static DETECTED: OnceLock<Isa> = OnceLock::new();
        *DETECTED.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            if IsaLimit::Avx2.allows()
                && is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
            {
                let wide = IsaLimit::Avx512.allows()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw");
                return if wide { Self::Avx512 } else { Self::Avx2 };
            }
            Self::Portable
        })
    }

    /// All instruction sets of this machine, the narrowest first.
    pub fn available() -> Vec<Self> {
        let all = [Self::Portable, Self::Avx2, Self::Avx512];
        all.into_iter().filter(|&isa| isa <= Self::detect()).collect()
    }

    /// Floats in a row of a packed panel: two vectors.
    pub(crate) fn panel(self) -> usize {
        match self.min(Self::detect()) {
            Self::Portable | Self::Avx2 => 16,
            Self::Avx512 => 32,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
        })
    }
}

/// 5/4 of the bits of one, less what makes the guess err equally in both directions.
const FOURTH_ROOT: u32 = 0x4f58_0000;

/// Floats in the widest vector.
pub(crate) const MAX_LANES: usize = 16;

/// A register of floats.
///
/// # Safety
/// Every method needs the vector's instruction set; `load` and `store` touch `LANES` floats at any alignment.
pub(crate) unsafe trait Vector: Copy {
    /// Floats in a vector.
    const LANES: usize;
    /// Rows of the micro-kernel: as many as leave room for the operands beside two accumulators per row.
    const ROWS: usize;
    unsafe fn zero() -> Self;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(this: Self, p: *mut f32);
    unsafe fn add(a: Self, b: Self) -> Self;
    unsafe fn sub(a: Self, b: Self) -> Self;
    unsafe fn mul(a: Self, b: Self) -> Self;
    unsafe fn div(a: Self, b: Self) -> Self;
    unsafe fn sqrt(a: Self) -> Self;
    /// `a * b + c`, rounded once.
    unsafe fn mul_add(a: Self, b: Self, c: Self) -> Self;
    /// `a > b ? a : b` per lane: `b` where either is NaN.
    unsafe fn max(a: Self, b: Self) -> Self;
    /// `a == b ? yes : no` per lane.
    unsafe fn if_equal(a: Self, b: Self, yes: Self, no: Self) -> Self;

    /// `x^(-1/4)` to a thirtieth, for positive `x`: minus a quarter of the exponent, by arithmetic on the bits.
    unsafe fn inverse_fourth_root_guess(x: Self) -> Self;

    /// The lanes of both in turns: of their first halves, and of their second ones.
    unsafe fn interleave(a: Self, b: Self) -> [Self; 2];

    /// Up to `LANES` values, zeros after them.
    #[inline(always)]
    unsafe fn load_part(x: &[f32]) -> Self {
        let mut padded = [0.0; MAX_LANES];
        let from = if x.len() >= Self::LANES {
            x
        } else {
            padded[..x.len()].copy_from_slice(x);
            &padded
        };
        // SAFETY: at least `LANES` floats; the instruction set is the caller's promise.
        unsafe { Self::load(from.as_ptr()) }
    }

    /// The first `count` values: all lanes where it is known that there are as many, [`Self::load_part`] otherwise, whose call makes a
    /// loop forget its registers.
    #[inline(always)]
    unsafe fn load_lanes<const ALL: bool>(x: &[f32], count: usize) -> Self {
        // SAFETY: a slice of all lanes; the instruction set is the caller's promise.
        unsafe {
            if ALL { Self::load(x[..Self::LANES].as_ptr()) } else { Self::load_part(&x[..count]) }
        }
    }

    /// Stores `count` lanes, as [`Self::load_lanes`] loads them.
    #[inline(always)]
    unsafe fn store_lanes<const ALL: bool>(this: Self, to: &mut [f32], count: usize) {
        // SAFETY: as above.
        unsafe {
            if ALL {
                Self::store(this, to[..Self::LANES].as_mut_ptr());
            } else {
                Self::store_part(this, &mut to[..count]);
            }
        }
    }

    /// Stores as many lanes as there is room for.
    #[inline(always)]
    unsafe fn store_part(this: Self, to: &mut [f32]) {
        // SAFETY: stores go where `LANES` floats are; the instruction set is the caller's promise.
        unsafe {
            if to.len() >= Self::LANES {
                Self::store(this, to.as_mut_ptr());
            } else {
                let mut padded = [0.0; MAX_LANES];
                Self::store(this, padded.as_mut_ptr());
                to.copy_from_slice(&padded[..to.len()]);
            }
        }
    }
}

// SAFETY: plain arrays, no instruction set needed.
unsafe impl Vector for [f32; 8] {
    const LANES: usize = 8;
    const ROWS: usize = 4;
    #[inline(always)]
    unsafe fn zero() -> Self {
        [0.0; 8]
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller promises eight readable floats.
        unsafe { p.cast::<Self>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(this: Self, p: *mut f32) {
        // SAFETY: the caller promises eight writable floats.
        unsafe { p.cast::<Self>().write_unaligned(this) }
    }
    #[inline(always)]
    unsafe fn add(a: Self, b: Self) -> Self {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self, b: Self) -> Self {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self, b: Self) -> Self {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: Self, b: Self) -> Self {
        std::array::from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn sqrt(a: Self) -> Self {
        a.map(f32::sqrt)
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self, b: Self, c: Self) -> Self {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn max(a: Self, b: Self) -> Self {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn if_equal(a: Self, b: Self, yes: Self, no: Self) -> Self {
        std::array::from_fn(|i| if a[i] == b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    unsafe fn inverse_fourth_root_guess(x: Self) -> Self {
        x.map(|x| f32::from_bits(FOURTH_ROOT.wrapping_sub(x.to_bits() >> 2)))
    }
    #[inline(always)]
    unsafe fn interleave(a: Self, b: Self) -> [Self; 2] {
        [0, 4].map(|first| std::array::from_fn(|i| [a, b][i % 2][first + i / 2]))
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! x86_vector {
    ($vector:ident, lanes $lanes:literal, rows $rows:literal, [$($name:ident($($arg:ident: $ty:ty),*)
     $(-> $ret:ty)? = $value:expr;)*]) => {
        // SAFETY: each method is the intrinsic of its name; the caller promises the instruction set.
        unsafe impl Vector for x86::$vector {
            const LANES: usize = $lanes;
            const ROWS: usize = $rows;
            $(
                #[inline(always)]
                unsafe fn $name($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: as promised by the caller.
                    unsafe { $value }
                }
            )*
        }
    };
}
#[cfg(target_arch = "x86_64")]
x86_vector!(__m256, lanes 8, rows 6, [
    zero() -> Self = x86::_mm256_setzero_ps();
    splat(x: f32) -> Self = x86::_mm256_set1_ps(x);
    load(p: *const f32) -> Self = x86::_mm256_loadu_ps(p);
    store(this: Self, p: *mut f32) = x86::_mm256_storeu_ps(p, this);
    add(a: Self, b: Self) -> Self = x86::_mm256_add_ps(a, b);
    sub(a: Self, b: Self) -> Self = x86::_mm256_sub_ps(a, b);
    mul(a: Self, b: Self) -> Self = x86::_mm256_mul_ps(a, b);
    div(a: Self, b: Self) -> Self = x86::_mm256_div_ps(a, b);
    sqrt(a: Self) -> Self = x86::_mm256_sqrt_ps(a);
    mul_add(a: Self, b: Self, c: Self) -> Self = x86::_mm256_fmadd_ps(a, b, c);
    max(a: Self, b: Self) -> Self = x86::_mm256_max_ps(a, b);
    if_equal(a: Self, b: Self, yes: Self, no: Self) -> Self =
        x86::_mm256_blendv_ps(no, yes, x86::_mm256_cmp_ps::<{ x86::_CMP_EQ_OQ }>(a, b));
    inverse_fourth_root_guess(x: Self) -> Self = x86::_mm256_castsi256_ps(x86::_mm256_sub_epi32(
        x86::_mm256_set1_epi32(FOURTH_ROOT as i32),
        x86::_mm256_srli_epi32::<2>(x86::_mm256_castps_si256(x)),
    ));
    interleave(a: Self, b: Self) -> [Self; 2] = {
        let (low, high) = (x86::_mm256_unpacklo_ps(a, b), x86::_mm256_unpackhi_ps(a, b));
        [x86::_mm256_permute2f128_ps::<0x20>(low, high), x86::_mm256_permute2f128_ps::<0x31>(low, high)]
    };
]);

#[cfg(target_arch = "x86_64")]
x86_vector!(__m512, lanes 16, rows 12, [
    zero() -> Self = x86::_mm512_setzero_ps();
    splat(x: f32) -> Self = x86::_mm512_set1_ps(x);
    load(p: *const f32) -> Self = x86::_mm512_loadu_ps(p);
    store(this: Self, p: *mut f32) = x86::_mm512_storeu_ps(p, this);
    add(a: Self, b: Self) -> Self = x86::_mm512_add_ps(a, b);
    sub(a: Self, b: Self) -> Self = x86::_mm512_sub_ps(a, b);
    mul(a: Self, b: Self) -> Self = x86::_mm512_mul_ps(a, b);
    div(a: Self, b: Self) -> Self = x86::_mm512_div_ps(a, b);
    sqrt(a: Self) -> Self = x86::_mm512_sqrt_ps(a);
    mul_add(a: Self, b: Self, c: Self) -> Self = x86::_mm512_fmadd_ps(a, b, c);
    max(a: Self, b: Self) -> Self = x86::_mm512_max_ps(a, b);
    if_equal(a: Self, b: Self, yes: Self, no: Self) -> Self =
        x86::_mm512_mask_blend_ps(x86::_mm512_cmp_ps_mask::<{ x86::_CMP_EQ_OQ }>(a, b), no, yes);
    inverse_fourth_root_guess(x: Self) -> Self = x86::_mm512_castsi512_ps(x86::_mm512_sub_epi32(
        x86::_mm512_set1_epi32(FOURTH_ROOT as i32),
        x86::_mm512_srli_epi32::<2>(x86::_mm512_castps_si512(x)),
    ));
    interleave(a: Self, b: Self) -> [Self; 2] = {
        let first = x86::_mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        let second = x86::_mm512_add_epi32(first, x86::_mm512_set1_epi32(8));
        [x86::_mm512_permutex2var_ps(a, first, b), x86::_mm512_permutex2var_ps(a, second, b)]
    };
]);

/// Compiles a function once per instruction set; the result takes an [`Isa`] as its first argument.
///
/// `fn name<V>(..)` may use the set's [`Vector`] as `V` in its body. The compiler turns plain loops into vectors by
/// itself and never changes a result, so loops that keep their sums in arrays of fixed length give the same bits.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        multiversion! { $(#[$meta])* $vis fn $name<V>($($arg: $ty),*) $(-> $ret)? $body }
    };
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$v:ident>($($arg:ident: $ty:ty),* $(,)?)
     $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, reason = "the instruction set comes on top")]
        $vis fn $name(isa: $crate::device::cpu::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$v: $crate::device::cpu::simd::Vector>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                body::<std::arch::x86_64::__m512>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                body::<std::arch::x86_64::__m256>($($arg),*)
            }

            match isa.min($crate::device::cpu::simd::Isa::detect()) {
                // SAFETY: no wider than what was detected.
                #[cfg(target_arch = "x86_64")]
                $crate::device::cpu::simd::Isa::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: no wider than what was detected.
                #[cfg(target_arch = "x86_64")]
                $crate::device::cpu::simd::Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => body::<[f32; 8]>($($arg),*),
            }
        }
    };
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_ends_with_the_detected_one() {
        let all = Isa::available();
        assert_eq!((all[0], all.last()), (Isa::Portable, Some(&Isa::detect())));
        assert!(all.is_sorted());
    }

    multiversion! {
        fn lanes<V>() -> usize { V::LANES }
    }

    #[test]
    fn a_missing_instruction_set_falls_back() {
        assert_eq!(lanes(Isa::Portable), 8);
        assert_eq!(lanes(Isa::Avx512), lanes(Isa::detect()));
        assert_eq!(Isa::Avx512.panel(), Isa::detect().panel());
    }
}
