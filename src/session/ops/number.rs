//! [`Number`]: arithmetic on every type of number that tensors hold, as TensorFlow does it.

use crate::session::Element;

/// A number. Whole numbers wrap; a division of one by zero is the caller's to refuse, and gives zero here.
pub(super) trait Number: Element + Copy + PartialOrd {
    /// What sums of it are kept in.
    type Sum: Copy;
    /// Whether it is a whole number.
    const WHOLE: bool;
    const ZERO: Self;
    const ONE: Self;
    const LEAST: Self;
    const GREATEST: Self;
    const NO_SUM: Self::Sum;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Whole numbers towards zero.
    fn div(self, other: Self) -> Self;
    fn floor_div(self, other: Self) -> Self;
    /// With the sign of the divisor.
    fn floor_mod(self, other: Self) -> Self;
    /// With the sign of the dividend.
    fn trunc_mod(self, other: Self) -> Self;
    fn pow(self, other: Self) -> Self;
    fn neg(self) -> Self;
    fn abs(self) -> Self;
    fn sign(self) -> Self;
    fn to_f64(self) -> f64;
    fn from_f64(value: f64) -> Self;
    fn sum(sum: Self::Sum, value: Self) -> Self::Sum;
    /// A sum divided by a count, 1 for the sum itself.
    fn mean(sum: Self::Sum, count: usize) -> Self;

    /// The lesser; NaN wins.
    fn lesser(self, other: Self) -> Self {
        #[expect(clippy::eq_op, reason = "only NaN differs from itself")]
        if other < self || other != other { other } else { self }
    }

    /// The greater; NaN wins.
    fn greater(self, other: Self) -> Self {
        #[expect(clippy::eq_op, reason = "only NaN differs from itself")]
        if other > self || other != other { other } else { self }
    }
}

/// A number with a point.
pub(super) trait Float: Number + Real {}
impl Float for f32 {}
impl Float for f64 {}

pub(super) use functions::Real;

mod functions {
    /// Functions of numbers with a point.
    pub(crate) trait Real: Sized {
        fn sqrt(self) -> Self;
        fn exp(self) -> Self;
        fn exp_m1(self) -> Self;
        fn ln(self) -> Self;
        fn ln_1p(self) -> Self;
        fn floor(self) -> Self;
        fn ceil(self) -> Self;
        fn round(self) -> Self;
        fn sin(self) -> Self;
        fn cos(self) -> Self;
        fn tan(self) -> Self;
        fn tanh(self) -> Self;
        fn nan(self) -> bool;
        fn infinite(self) -> bool;
        fn finite(self) -> bool;
    }

    macro_rules! real {
        ($($t:ident),*) => {$(
            impl Real for $t {
                fn sqrt(self) -> Self { $t::sqrt(self) }
                fn exp(self) -> Self { $t::exp(self) }
                fn exp_m1(self) -> Self { $t::exp_m1(self) }
                fn ln(self) -> Self { $t::ln(self) }
                fn ln_1p(self) -> Self { $t::ln_1p(self) }
                fn floor(self) -> Self { $t::floor(self) }
                fn ceil(self) -> Self { $t::ceil(self) }
                fn round(self) -> Self { $t::round_ties_even(self) }
                fn sin(self) -> Self { $t::sin(self) }
                fn cos(self) -> Self { $t::cos(self) }
                fn tan(self) -> Self { $t::tan(self) }
                fn tanh(self) -> Self { $t::tanh(self) }
                fn nan(self) -> bool { $t::is_nan(self) }
                fn infinite(self) -> bool { $t::is_infinite(self) }
                fn finite(self) -> bool { $t::is_finite(self) }
            }
        )*};
    }
    real!(f32, f64);
}

macro_rules! floats {
    ($($t:ident),*) => {$(
        impl Number for $t {
            // Wider than what is summed, so that the order of a sum does not show.
            type Sum = f64;
            const WHOLE: bool = false;
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const LEAST: Self = $t::NEG_INFINITY;
            const GREATEST: Self = $t::INFINITY;
            const NO_SUM: f64 = 0.0;
            fn add(self, other: Self) -> Self { self + other }
            fn sub(self, other: Self) -> Self { self - other }
            fn mul(self, other: Self) -> Self { self * other }
            fn div(self, other: Self) -> Self { self / other }
            fn floor_div(self, other: Self) -> Self { (self / other).floor() }
            fn floor_mod(self, other: Self) -> Self {
                let rest = self % other;
                if rest != 0.0 && (rest < 0.0) != (other < 0.0) { rest + other } else { rest }
            }
            fn trunc_mod(self, other: Self) -> Self { self % other }
            fn pow(self, other: Self) -> Self { self.powf(other) }
            fn neg(self) -> Self { -self }
            fn abs(self) -> Self { self.abs() }
            fn sign(self) -> Self {
                if self > 0.0 { 1.0 } else if self < 0.0 { -1.0 } else { self }
            }
            fn to_f64(self) -> f64 { f64::from(self) }
            fn from_f64(value: f64) -> Self { value as $t }
            fn sum(sum: f64, value: Self) -> f64 { sum + f64::from(value) }
            fn mean(sum: f64, count: usize) -> Self { (sum / count as f64) as $t }
        }
    )*};
}

macro_rules! wholes {
    ($($t:ident),*) => {$(
        impl Number for $t {
            type Sum = $t;
            const WHOLE: bool = true;
            const ZERO: Self = 0;
            const ONE: Self = 1;
            const LEAST: Self = $t::MIN;
            const GREATEST: Self = $t::MAX;
            const NO_SUM: $t = 0;
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            fn sub(self, other: Self) -> Self { self.wrapping_sub(other) }
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            fn div(self, other: Self) -> Self {
                if other == 0 { 0 } else { self.wrapping_div(other) }
            }
            #[allow(unused_comparisons, reason = "for the types with a sign")]
            fn floor_div(self, other: Self) -> Self {
                let rest = self.trunc_mod(other);
                let down = rest != 0 && (rest < 0) != (other < 0);
                self.div(other).wrapping_sub(down as $t)
            }
            #[allow(unused_comparisons, reason = "for the types with a sign")]
            fn floor_mod(self, other: Self) -> Self {
                let rest = self.trunc_mod(other);
                if rest != 0 && (rest < 0) != (other < 0) { rest.wrapping_add(other) } else { rest }
            }
            fn trunc_mod(self, other: Self) -> Self {
                if other == 0 { 0 } else { self.wrapping_rem(other) }
            }
            fn pow(self, other: Self) -> Self {
                u32::try_from(other).map_or(0, |other| self.wrapping_pow(other))
            }
            fn neg(self) -> Self { self.wrapping_neg() }
            #[allow(unused_comparisons, reason = "for the types with a sign")]
            fn abs(self) -> Self { if self < 0 { self.wrapping_neg() } else { self } }
            #[allow(unused_comparisons, reason = "for the types with a sign")]
            fn sign(self) -> Self {
                if self > 0 { 1 } else if self < 0 { (0 as $t).wrapping_sub(1) } else { 0 }
            }
            fn to_f64(self) -> f64 { self as f64 }
            fn from_f64(value: f64) -> Self { value as $t }
            fn sum(sum: $t, value: Self) -> $t { sum.wrapping_add(value) }
            fn mean(sum: $t, count: usize) -> Self {
                $t::try_from(count).map_or(0, |count| sum.div(count))
            }
        }
    )*};
}

floats!(f32, f64);
wholes!(i32, i64, u8);

/// Runs a piece of code with `$t` as the type of the listed ones that `$dtype` says.
macro_rules! of_types {
    ($dtype:expr, $t:ident => $body:expr, [$($name:ident $rust:ty),*] $(, $other:pat => $error:expr)?) => {{
        use $crate::session::DType;
        match $dtype {
            $(DType::$name => {
                type $t = $rust;
                $body
            })*
            $($other => $error,)?
        }
    }};
}

/// Runs a piece of code with `$t` as the type of number that `$dtype` says.
macro_rules! numbers {
    ($dtype:expr, $t:ident => $body:expr) => {{
        let dtype = $dtype;
        $crate::session::ops::number::of_types!(
            dtype, $t => $body, [F32 f32, F64 f64, I32 i32, I64 i64, U8 u8],
            _ => Err($crate::session::ops::no_kernel(dtype))
        )
    }};
}

/// The same for numbers with a point.
macro_rules! reals {
    ($dtype:expr, $t:ident => $body:expr) => {{
        let dtype = $dtype;
        $crate::session::ops::number::of_types!(
            dtype, $t => $body, [F32 f32, F64 f64],
            _ => Err($crate::session::ops::no_kernel(dtype))
        )
    }};
}

/// The same for every type that tensors have.
macro_rules! all_types {
    ($dtype:expr, $t:ident => $body:expr) => {
        $crate::session::ops::number::of_types!(
            $dtype, $t => $body,
            [F32 f32, F64 f64, I32 i32, I64 i64, U8 u8, Bool bool, Str bytes::Bytes]
        )
    };
}

pub(super) use {all_types, numbers, of_types, reals};
