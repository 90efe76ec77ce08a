//! The distortion of the residual networks: a shift by up to four pixels, and a flip.

use std::sync::Arc;

use super::pictures::of_pictures;
use super::{Pictures, Source};
use crate::tensor::Shape;
use crate::util::rng::{Purpose, Stream, example_index};

const SIDE: usize = Pictures::HEIGHT;
const CHANNELS: usize = Pictures::CHANNELS;
/// Rows and columns of zeros around a picture.
const PAD: usize = 4;

/// The random part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shift {
    /// Row and column of the padded picture where the cut begins, 0 to 8 each; larger ones count as 8.
    pub from: [usize; 2],
    /// Whether left and right are swapped.
    pub flip: bool,
}

impl Shift {
    /// The picture as it is.
    pub const NONE: Self = Self { from: [PAD; 2], flip: false };

    /// Drawn in the order of the fields.
    pub fn random(stream: &mut Stream) -> Self {
        let mut offset = || stream.below(2 * PAD as u32 + 1) as usize;
        let from = [offset(), offset()];
        Self { from, flip: stream.uniform() < 0.5 }
    }
}

/// Cuts 32x32 out of a picture with zeros around it, and maps its bytes onto -1 to 1: `byte / 127.5 - 1`, the padding too.
///
/// `planes` holds 3 x 32 x 32 bytes, `out` gets 32 x 32 x 3 values.
///
/// # Panics
/// If `planes` or `out` has another length.
pub(super) fn shift(planes: &[u8], shift: Shift, out: &mut [f32]) {
    assert_eq!(
        (planes.len(), out.len()),
        (Pictures::PIXELS, Pictures::PIXELS),
        "lengths of a picture"
    );
    let [top, left] = shift.from.map(|from| from.min(2 * PAD));
    out.fill(value(0));
    for (y, row) in out.chunks_exact_mut(SIDE * CHANNELS).enumerate() {
        let Some(y) = (y + top).checked_sub(PAD).filter(|y| *y < SIDE) else { continue };
        for (x, pixel) in row.chunks_exact_mut(CHANNELS).enumerate() {
            let x = if shift.flip { SIDE - 1 - x } else { x };
            let Some(x) = (x + left).checked_sub(PAD).filter(|x| *x < SIDE) else { continue };
            for (c, out) in pixel.iter_mut().enumerate() {
                *out = value(planes[(c * SIDE + y) * SIDE + x]);
            }
        }
    }
}

fn value(byte: u8) -> f32 {
    f32::from(byte) / 127.5 - 1.0
}

/// Pictures shifted and flipped anew in every epoch, to learn from.
pub struct Padded {
    pictures: Arc<Pictures>,
    seed: u64,
}

impl Padded {
    /// Shifts `pictures`.
    pub fn new(pictures: Arc<Pictures>, seed: u64) -> Self {
        Self { pictures, seed }
    }
}

/// Whole pictures, to evaluate on.
pub struct Whole {
    pictures: Arc<Pictures>,
}

impl Whole {
    /// Shows `pictures` as they are.
    pub fn new(pictures: Arc<Pictures>) -> Self {
        Self { pictures }
    }
}

impl Source for Padded {
    of_pictures!();

    fn feature_shape(&self) -> Shape {
        [SIDE, SIDE, CHANNELS].into()
    }

    fn write(&self, epoch: u64, index: usize, features: &mut [f32]) -> f32 {
        let mut stream = Stream::new(self.seed, Purpose::Augment, example_index(epoch, index));
        shift(self.pictures.planes(index), Shift::random(&mut stream), features);
        f32::from(self.pictures.label(index))
    }
}

impl Source for Whole {
    of_pictures!();

    fn feature_shape(&self) -> Shape {
        [SIDE, SIDE, CHANNELS].into()
    }

    fn write(&self, _epoch: u64, index: usize, features: &mut [f32]) -> f32 {
        shift(self.pictures.planes(index), Shift::NONE, features);
        f32::from(self.pictures.label(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planes() -> Vec<u8> {
        (0..3072u32).map(|j| ((37 * j + 11) % 255 + 1) as u8).collect()
    }

    fn shifted(from: [usize; 2], flip: bool) -> Vec<f32> {
        let mut out = vec![f32::NAN; Pictures::PIXELS];
        shift(&planes(), Shift { from, flip }, &mut out);
        out
    }

    #[test]
    fn a_shift_is_a_cut_out_of_the_padded_picture() {
        // The definition: pad, cut, flip.
        let mut wide = vec![0u8; 3 * 40 * 40];
        for (i, byte) in planes().into_iter().enumerate() {
            wide[(i / 1024 * 40 + i / 32 % 32 + 4) * 40 + i % 32 + 4] = byte;
        }
        for (from, flip) in [([4, 4], false), ([0, 8], false), ([8, 0], true), ([3, 5], true)] {
            let got = shifted(from, flip);
            for (i, got) in got.into_iter().enumerate() {
                let (y, x, c) = (i / 96, i / 3 % 32, i % 3);
                let x = if flip { 31 - x } else { x };
                let byte = wide[(c * 40 + y + from[0]) * 40 + x + from[1]];
                assert_eq!(got, f32::from(byte) / 127.5 - 1.0, "{from:?} {flip} {i}");
            }
        }
    }

    #[test]
    fn shifts_fill_their_range() {
        let (mut seen, mut flips) = ([[0; 9]; 2], 0);
        for i in 0..9000 {
            let shift = Shift::random(&mut Stream::new(1, Purpose::Augment, i));
            seen[0][shift.from[0]] += 1;
            seen[1][shift.from[1]] += 1;
            flips += u32::from(shift.flip);
        }
        assert!(seen.iter().flatten().all(|n| (850..1150).contains(n)), "{seen:?}");
        assert!((4300..4700).contains(&flips), "{flips}");
    }

    #[test]
    fn sources_depend_on_seed_epoch_and_index_only() {
        let pictures = Arc::new(crate::data::pictures(crate::data::Split::Train, 20, 1));
        let write = |seed, epoch, index| {
            let mut out = vec![0.0; Pictures::PIXELS];
            let label = Padded::new(pictures.clone(), seed).write(epoch, index, &mut out);
            (label, out)
        };
        assert_eq!(write(1, 2, 3), write(1, 2, 3));
        assert!((0..5).any(|epoch| write(1, epoch, 3).1 != write(1, 9, 3).1));
        let mut whole = vec![0.0; Pictures::PIXELS];
        assert_eq!(Whole::new(pictures.clone()).write(5, 3, &mut whole), write(1, 2, 3).0);
        assert_eq!(whole[2], f32::from(pictures.planes(3)[2048]) / 127.5 - 1.0);
    }
}
