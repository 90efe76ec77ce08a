//! 16-bit floats as bit patterns: bfloat16 and IEEE half precision, rounded to nearest, ties to even.
//!
//! Selections in place of branches, so that loops over them become vector code.

/// The bfloat16 nearest to `x`. Keeps infinities; a NaN stays one.
#[inline]
pub fn bf16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let even = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7fff + even) >> 16;
    // Rounding could carry a NaN into an infinity: a quiet one in its place.
    let nan = (bits >> 16) | 0x40;
    (if bits << 1 > INFINITY << 1 { nan } else { rounded }) as u16
}

/// The value of a bfloat16, which f32 holds exactly.
#[inline]
pub fn f32_from_bf16(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// Bits of f32's infinity.
const INFINITY: u32 = 0x7f80_0000;

/// Bits of 0.5. Floats of [0.5, 1) lie 2^-24 apart, as half precision's subnormal numbers do.
const HALF: u32 = 0x3f00_0000;

/// Between the exponent fields of the two formats for the same value.
const REBIAS: u32 = (127 - 15) << 23;

/// Half precision's infinity and its smallest normal number.
const F16_INFINITY: u32 = 0x7c00;
const F16_NORMAL: u32 = 0x0400;

/// The half nearest to `x`: infinite from 65,520, zero up to 2^-25. Keeps infinities; a NaN stays one.
#[inline]
pub fn f16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, size) = ((bits >> 16) & 0x8000, bits & 0x7fff_ffff);
    let even = (size >> 13) & 1;
    let normal = size.wrapping_sub(REBIAS).wrapping_add(0xfff + even) >> 13;
    // The sum rounds to multiples of 2^-24.
    let subnormal = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(HALF);
    let nan = F16_INFINITY | 0x200 | ((size >> 13) & 0x3ff);
    let finite = if size < REBIAS + (1 << 23) { subnormal } else { normal.min(F16_INFINITY) };
    (sign | if size > INFINITY { nan } else { finite }) as u16
}

/// The value of a half, which f32 holds exactly.
#[inline]
pub fn f32_from_f16(half: u16) -> f32 {
    let (sign, size) = (u32::from(half & 0x8000) << 16, u32::from(half & 0x7fff));
    let normal = (size << 13) + REBIAS;
    let subnormal = (f32::from_bits(size | HALF) - 0.5).to_bits();
    let beyond = (size << 13) | INFINITY;
    let finite = if size < F16_NORMAL { subnormal } else { normal };
    f32::from_bits(sign | if size >= F16_INFINITY { beyond } else { finite })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Format = (fn(f32) -> u16, fn(u16) -> f32, u32);

    /// With the bits of the mantissa.
    const FORMATS: [Format; 2] =
        [(bf16_from_f32, f32_from_bf16, 7), (f16_from_f32, f32_from_f16, 10)];

    /// A pattern's value by the definition of the formats.
    fn defined(half: u16, mantissa: u32) -> f64 {
        let exponents = (1i32 << (15 - mantissa)) - 1;
        let exponent = i32::from(half >> mantissa) & exponents;
        let fraction = f64::from(half & ((1 << mantissa) - 1)) / f64::from(1u32 << mantissa);
        let bias = exponents / 2;
        let size = match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            e if e < exponents => (1.0 + fraction) * 2f64.powi(e - bias),
            _ if fraction == 0.0 => f64::INFINITY,
            _ => f64::NAN,
        };
        if half >> 15 == 1 { -size } else { size }
    }

    #[test]
    fn every_pattern_has_its_value_and_comes_back() {
        for (encode, decode, mantissa) in FORMATS {
            for half in 0..=u16::MAX {
                let (value, expected) = (decode(half), defined(half, mantissa));
                if expected.is_nan() {
                    let quiet = 1 << (mantissa - 1);
                    assert!(value.is_nan(), "{half:#x}");
                    assert_eq!(encode(value), half | quiet, "{half:#x}");
                    continue;
                }
                assert_eq!(f64::from(value), expected, "{half:#x}");
                assert_eq!(value.is_sign_negative(), half >> 15 == 1, "{half:#x}");
                assert_eq!(encode(value), half, "{half:#x}");
            }
        }
    }

    /// Between any two neighbours: the middle goes to the even one, and what is beside it to the nearer one.
    #[test]
    fn rounds_to_nearest_and_ties_to_even() {
        for (encode, decode, mantissa) in FORMATS {
            let infinity = ((1u16 << (15 - mantissa)) - 1) << mantissa;
            for sign in [0, 0x8000] {
                for low in 0..infinity {
                    let high = low + 1;
                    // Infinity takes the place of the number that would follow the largest one.
                    let above = match high == infinity {
                        true => 2.0 * f64::from(decode(low)) - f64::from(decode(low - 1)),
                        false => f64::from(decode(high)),
                    };
                    let middle = ((f64::from(decode(low)) + above) / 2.0) as f32;
                    let even = if low % 2 == 0 { low } else { high };
                    let signed = |x: f32| if sign == 0 { x } else { -x };
                    assert_eq!(encode(signed(middle)), sign | even, "{low:#x}");
                    assert_eq!(encode(signed(middle.next_down())), sign | low, "{low:#x}");
                    assert_eq!(encode(signed(middle.next_up())), sign | high, "{low:#x}");
                }
            }
        }
    }

    #[test]
    fn special_values_are_kept() {
        for (encode, decode, _) in FORMATS {
            for x in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY] {
                assert_eq!(decode(encode(x)).to_bits(), x.to_bits());
            }
            for bits in [0x7f80_0001, 0x7fff_ffff, 0xff80_0001, 0xffff_ffff, 0x7fc0_0000] {
                assert!(decode(encode(f32::from_bits(bits))).is_nan(), "{bits:#x}");
            }
        }
        assert_eq!(f32_from_f16(f16_from_f32(f32::MAX)), f32::INFINITY);
        assert_eq!(f16_from_f32(f32::from_bits(1)), 0);
    }
}
