//! [`Wire`]: how the floats of a message travel.

use bytes::Bytes;

use super::ReduceError;
use crate::util::half::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};

// Floats travel as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"), "the wire is little-endian");

/// How the floats of a message travel; sums are f32 always. What is rounded is rounded to nearest, ties to even, and keeps
/// infinities and NaNs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wire {
    /// As they are, 4 bytes each.
    #[default]
    F32,
    /// As bfloat16, 2 bytes each: 8 bits of precision.
    Bf16,
    /// As IEEE half precision, 2 bytes each: 11 bits of precision, infinite from 65,520.
    F16,
}

impl Wire {
    /// Bytes of a float.
    pub fn width(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Makes of floats a message of [`Wire::width`] bytes for each.
    pub fn encode(self, floats: &[f32], message: &mut [u8]) {
        match self {
            Self::F32 => message.copy_from_slice(bytemuck::cast_slice(floats)),
            Self::Bf16 => encode(bf16_from_f32, floats, message),
            Self::F16 => encode(f16_from_f32, floats, message),
        }
    }

    /// The floats of a message of [`Wire::width`] bytes for each.
    pub fn decode(self, message: &[u8], into: &mut [f32]) {
        match self {
            Self::F32 => bytemuck::cast_slice_mut(into).copy_from_slice(message),
            Self::Bf16 => decode(f32_from_bf16, message, into),
            Self::F16 => decode(f32_from_f16, message, into),
        }
    }

    /// The floats of a message in which they lie ready.
    pub fn floats(self, message: &[u8]) -> Option<&[f32]> {
        (self == Self::F32).then(|| bytemuck::try_cast_slice(message).ok()).flatten()
    }

    /// Makes of floats what arrives when they are sent.
    pub fn round(self, floats: &mut [f32]) {
        match self {
            Self::F32 => {}
            Self::Bf16 => floats.iter_mut().for_each(|x| *x = f32_from_bf16(bf16_from_f32(*x))),
            Self::F16 => floats.iter_mut().for_each(|x| *x = f32_from_f16(f16_from_f32(*x))),
        }
    }

    /// Fails when a message of rank `from` does not hold so many floats.
    pub fn expect(self, from: usize, message: &Bytes, expected: usize) -> Result<(), ReduceError> {
        if message.len() == expected * self.width() {
            return Ok(());
        }
        Err(ReduceError::Length { rank: from, expected, found: message.len() / self.width() })
    }
}

fn encode(half: impl Fn(f32) -> u16, floats: &[f32], message: &mut [u8]) {
    let (halves, _) = message.as_chunks_mut::<2>();
    halves.iter_mut().zip(floats).for_each(|(h, x)| *h = half(*x).to_le_bytes());
}

fn decode(float: impl Fn(u16) -> f32, message: &[u8], into: &mut [f32]) {
    let (halves, _) = message.as_chunks::<2>();
    into.iter_mut().zip(halves).for_each(|(x, h)| *x = float(u16::from_le_bytes(*h)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_arrives_rounded() {
        let floats: Vec<f32> = (0..2500).map(|i| (i as f32 - 1200.0) / 7.0).collect();
        for wire in [Wire::F32, Wire::Bf16, Wire::F16] {
            let mut message = vec![0; floats.len() * wire.width()];
            wire.encode(&floats, &mut message);
            let (mut arrived, mut rounded) = (vec![0.0; floats.len()], floats.clone());
            wire.decode(&message, &mut arrived);
            wire.round(&mut rounded);
            assert_eq!(arrived, rounded);
            assert_eq!(arrived == floats, wire == Wire::F32);
        }
    }
}
