//! Instruction sets: [`Isa`], the [`Vector`]s of the micro-kernel, and `multiversion!` for plain loops.

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

impl Isa {
    /// The widest instruction set of this machine.
    #[inline]
    pub fn detect() -> Self {
        static DETECTED: OnceLock<Isa> = OnceLock::new();
        *DETECTED.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                let wide = is_x86_feature_detected!("avx512f")
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
    unsafe fn store(self, p: *mut f32);
    unsafe fn add(self, b: Self) -> Self;
    /// `self * b + c`, rounded once.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// `self < 0 ? 0 : self` per lane; NaN passes.
    unsafe fn relu(self) -> Self;
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
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller promises eight writable floats.
        unsafe { p.cast::<Self>().write_unaligned(self) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        std::array::from_fn(|i| self[i] + b[i])
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        std::array::from_fn(|i| self[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn relu(self) -> Self {
        self.map(|v| if v < 0.0 { 0.0 } else { v })
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! x86_vector {
    ($vector:ident, $lanes:literal, $rows:literal, $zero:ident, $splat:ident, $load:ident, $store:ident,
     $add:ident, $fma:ident, $max:ident) => {
        // SAFETY: each method is the intrinsic of its name; the caller promises the instruction set.
        unsafe impl Vector for std::arch::x86_64::$vector {
            const LANES: usize = $lanes;
            const ROWS: usize = $rows;
            #[inline(always)]
            unsafe fn zero() -> Self {
                // SAFETY: as promised by the caller.
                unsafe { std::arch::x86_64::$zero() }
            }
            #[inline(always)]
            unsafe fn splat(x: f32) -> Self {
                // SAFETY: as promised by the caller.
                unsafe { std::arch::x86_64::$splat(x) }
            }
            #[inline(always)]
            unsafe fn load(p: *const f32) -> Self {
                // SAFETY: as promised by the caller.
                unsafe { std::arch::x86_64::$load(p) }
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut f32) {
                // SAFETY: as promised by the caller.
                unsafe { std::arch::x86_64::$store(p, self) }
            }
            #[inline(always)]
            unsafe fn add(self, b: Self) -> Self {
                // SAFETY: as promised by the caller.
                unsafe { std::arch::x86_64::$add(self, b) }
            }
            #[inline(always)]
            unsafe fn mul_add(self, b: Self, c: Self) -> Self {
                // SAFETY: as promised by the caller.
                unsafe { std::arch::x86_64::$fma(self, b, c) }
            }
            #[inline(always)]
            unsafe fn relu(self) -> Self {
                // SAFETY: as promised by the caller. The maximum is its second operand when either is NaN.
                unsafe { std::arch::x86_64::$max(Self::zero(), self) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
x86_vector!(
    __m256,
    8,
    6,
    _mm256_setzero_ps,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_add_ps,
    _mm256_fmadd_ps,
    _mm256_max_ps
);
#[cfg(target_arch = "x86_64")]
x86_vector!(
    __m512,
    16,
    12,
    _mm512_setzero_ps,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_add_ps,
    _mm512_fmadd_ps,
    _mm512_max_ps
);

/// Up to `N` values, zeros after them.
#[inline(always)]
pub(crate) fn load<const N: usize>(x: &[f32]) -> [f32; N] {
    if let Some(full) = x.first_chunk::<N>() {
        return *full;
    }
    let mut padded = [0.0; N];
    padded[..x.len()].copy_from_slice(x);
    padded
}

/// Stores the first of `values`, as many as there is room for.
#[inline(always)]
pub(crate) fn store<const N: usize>(values: &[f32; N], to: &mut [f32]) {
    if let Some(full) = to.first_chunk_mut::<N>() {
        *full = *values;
    } else {
        to.copy_from_slice(&values[..to.len()]);
    }
}

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
