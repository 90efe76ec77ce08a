//! The distortion of the TensorFlow CIFAR-10 tutorial (`cifar10_input.py`), fused into one pass.

use std::sync::Arc;

use super::pictures::of_pictures;
use super::{Pictures, Source};
use crate::tensor::Shape;
use crate::util::rng::{Purpose, Stream, example_index};

/// Rows and columns that are cut out of a picture.
pub const CROP: usize = 24;

const CHANNELS: usize = Pictures::CHANNELS;
const AREA: usize = CROP * CROP;
const VALUES: usize = AREA * CHANNELS;
/// The crop's largest offset.
const SLACK: usize = Pictures::HEIGHT - CROP;

/// The random part of a distortion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Row and column of the crop's first pixel, 0 to 8 each; larger ones count as 8.
    pub crop: [usize; 2],
    /// Whether left and right are swapped.
    pub flip: bool,
    /// Added to every value. Standardisation takes it out again, so it changes nothing.
    pub brightness: f32,
    /// Scales each channel's distance from its mean.
    pub contrast: f32,
}

impl Draw {
    /// The crop's place in the middle and nothing else: how pictures are evaluated.
    pub const CENTRAL: Self =
        Self { crop: [SLACK / 2; 2], flip: false, brightness: 0.0, contrast: 1.0 };

    /// The tutorial's ranges, drawn in the order of the fields.
    pub fn random(stream: &mut Stream) -> Self {
        let mut offset = || stream.below(SLACK as u32 + 1) as usize;
        let crop = [offset(), offset()];
        Self {
            crop,
            flip: stream.uniform() < 0.5,
            brightness: stream.range(-63.0, 63.0),
            contrast: stream.range(0.2, 1.8),
        }
    }
}

/// Distorts a picture: crop, flip, brightness, contrast, standardisation.
///
/// `planes` holds 3 x 32 x 32 bytes, `out` gets 24 x 24 x 3 values. By definition
///
/// - contrast: `(x - channel mean) * contrast + channel mean`,
/// - standardisation: `(x - mean) / max(std, 1 / sqrt(1728))` over all 1728 values.
///
/// Both are affine in each channel and their coefficients follow from the sums of the bytes and of
/// their squares, which integers hold exactly: the result has the same bits on every machine.
///
/// # Panics
/// If `planes` or `out` has another length.
pub fn distort(planes: &[u8], draw: Draw, out: &mut [f32]) {
    assert_eq!((planes.len(), out.len()), (Pictures::PIXELS, VALUES), "lengths of a picture");
    let mut crops = [[0; AREA]; CHANNELS];
    for (crop, plane) in crops.iter_mut().zip(planes.chunks_exact(Pictures::PIXELS / CHANNELS)) {
        cut(plane, draw, crop);
    }
    let affine = coefficients(&crops.each_ref().map(moments), draw.contrast);
    let [red, green, blue] = &crops;
    for (pixel, ((&r, &g), &b)) in
        out.chunks_exact_mut(CHANNELS).zip(red.iter().zip(green).zip(blue))
    {
        for (value, (x, a)) in pixel.iter_mut().zip([r, g, b].into_iter().zip(&affine)) {
            *value = a.scale * (f32::from(x) - a.centre) + a.offset;
        }
    }
}

/// Cuts the crop out of a plane, left and right swapped where the draw says so.
fn cut(plane: &[u8], draw: Draw, crop: &mut [u8; AREA]) {
    let [top, left] = draw.crop.map(|offset| offset.min(SLACK));
    let rows = plane.chunks_exact(Pictures::WIDTH).skip(top);
    for (to, row) in crop.chunks_exact_mut(CROP).zip(rows) {
        to.copy_from_slice(&row[left..left + CROP]);
        if draw.flip {
            to.reverse();
        }
    }
}

/// Mean and population variance of a channel's bytes.
#[derive(Clone, Copy)]
struct Moments {
    mean: f64,
    variance: f64,
}

fn moments(values: &[u8; AREA]) -> Moments {
    let sum: u32 = values.iter().map(|&x| u32::from(x)).sum();
    let squares: u32 = values.iter().map(|&x| u32::from(x) * u32::from(x)).sum();
    let (sum, squares, n) = (u64::from(sum), u64::from(squares), AREA as u64);
    Moments {
        mean: sum as f64 / n as f64,
        variance: (n * squares - sum * sum) as f64 / (n * n) as f64,
    }
}

/// `scale * (x - centre) + offset`; the whole number `centre` is close to the channel's mean, so
/// that no digits cancel.
#[derive(Clone, Copy)]
struct Affine {
    scale: f32,
    centre: f32,
    offset: f32,
}

/// Contrast and standardisation of channels with the given moments.
fn coefficients(channels: &[Moments; CHANNELS], contrast: f32) -> [Affine; CHANNELS] {
    let contrast = f64::from(contrast);
    let mean = channels.iter().map(|c| c.mean).sum::<f64>() / CHANNELS as f64;
    // Contrast keeps a channel's mean and scales its spread; channels are of one size.
    let variance = channels
        .iter()
        .map(|c| contrast * contrast * c.variance + (c.mean - mean) * (c.mean - mean))
        .sum::<f64>()
        / CHANNELS as f64;
    let deviation = variance.sqrt().max(1.0 / (VALUES as f64).sqrt());
    channels.map(|c| {
        let centre = c.mean.round();
        Affine {
            scale: (contrast / deviation) as f32,
            centre: centre as f32,
            offset: ((contrast * (centre - c.mean) + c.mean - mean) / deviation) as f32,
        }
    })
}

/// Pictures distorted anew in every epoch, to learn from.
pub struct Augmented {
    pictures: Arc<Pictures>,
    seed: u64,
}

impl Augmented {
    /// Distorts `pictures`.
    pub fn new(pictures: Arc<Pictures>, seed: u64) -> Self {
        Self { pictures, seed }
    }
}

/// The examples of [`Augmented`] as draws: for each, [`Drawn::LEN`] floats in place of its features.
#[derive(Clone)]
pub struct Drawn {
    pictures: Arc<Pictures>,
    seed: u64,
}

impl Drawn {
    /// The picture's number, the crop's first row and column, whether it is flipped, the contrast. Brightness changes nothing.
    pub const LEN: usize = 5;
    /// f32 holds numbers of pictures below it exactly.
    const MOST: usize = 1 << 24;

    /// The pictures that are drawn from.
    pub fn pictures(&self) -> &Pictures {
        &self.pictures
    }
}

impl Source for Drawn {
    of_pictures!();

    fn feature_shape(&self) -> Shape {
        [Self::LEN].into()
    }

    fn unfolded(&self, features: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; features.len() / Self::LEN * VALUES];
        for (drawn, out) in features.chunks_exact(Self::LEN).zip(out.chunks_exact_mut(VALUES)) {
            let crop = [drawn[1] as usize, drawn[2] as usize];
            let draw = Draw { crop, flip: drawn[3] != 0.0, brightness: 0.0, contrast: drawn[4] };
            let index = (drawn[0] as usize).min(self.pictures.len() - 1);
            distort(self.pictures.planes(index), draw, out);
        }
        out
    }

    fn write(&self, epoch: u64, index: usize, features: &mut [f32]) -> f32 {
        let mut stream = Stream::new(self.seed, Purpose::Augment, example_index(epoch, index));
        let Draw { crop: [top, left], flip, contrast, .. } = Draw::random(&mut stream);
        features.copy_from_slice(&[
            index as f32,
            top as f32,
            left as f32,
            f32::from(u8::from(flip)),
            contrast,
        ]);
        f32::from(self.pictures.label(index))
    }
}

impl Source for Augmented {
    fn drawn(&self) -> Option<Drawn> {
        let Self { pictures, seed } = self;
        (pictures.len() < Drawn::MOST).then(|| Drawn { pictures: pictures.clone(), seed: *seed })
    }

    of_pictures!();

    fn feature_shape(&self) -> Shape {
        [CROP, CROP, CHANNELS].into()
    }

    fn write(&self, epoch: u64, index: usize, features: &mut [f32]) -> f32 {
        let mut stream = Stream::new(self.seed, Purpose::Augment, example_index(epoch, index));
        distort(self.pictures.planes(index), Draw::random(&mut stream), features);
        f32::from(self.pictures.label(index))
    }
}

/// The middle of pictures, standardised, to evaluate on.
pub struct Central {
    pictures: Arc<Pictures>,
}

impl Central {
    /// Cuts out the middle of `pictures`.
    pub fn new(pictures: Arc<Pictures>) -> Self {
        Self { pictures }
    }
}

impl Source for Central {
    of_pictures!();

    fn feature_shape(&self) -> Shape {
        [CROP, CROP, CHANNELS].into()
    }

    fn write(&self, _epoch: u64, index: usize, features: &mut [f32]) -> f32 {
        distort(self.pictures.planes(index), Draw::CENTRAL, features);
        f32::from(self.pictures.label(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, step by step.
    fn plain(planes: &[u8], draw: Draw) -> Vec<f64> {
        let mut values = Vec::with_capacity(VALUES);
        for y in 0..CROP {
            for x in 0..CROP {
                let x = if draw.flip { CROP - 1 - x } else { x };
                for c in 0..CHANNELS {
                    let at = (c * 32 + y + draw.crop[0]) * 32 + x + draw.crop[1];
                    values.push(f64::from(planes[at]) + f64::from(draw.brightness));
                }
            }
        }
        for c in 0..CHANNELS {
            let mean = values.iter().skip(c).step_by(3).sum::<f64>() / AREA as f64;
            for value in values.iter_mut().skip(c).step_by(3) {
                *value = (*value - mean) * f64::from(draw.contrast) + mean;
            }
        }
        let n = VALUES as f64;
        let mean = values.iter().sum::<f64>() / n;
        let std = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt();
        values.iter().map(|v| (v - mean) / std.max(1.0 / n.sqrt())).collect()
    }

    fn fused(planes: &[u8], draw: Draw) -> Vec<f32> {
        let mut out = vec![f32::NAN; VALUES];
        distort(planes, draw, &mut out);
        out
    }

    fn farthest(a: &[f32], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
    }

    fn draws() -> impl Strategy<Value = Draw> {
        ([0..=SLACK, 0..=SLACK], any::<bool>(), -63f32..63.0, 0.2f32..1.8).prop_map(
            |(crop, flip, brightness, contrast)| Draw { crop, flip, brightness, contrast },
        )
    }

    fn planes() -> impl Strategy<Value = Vec<u8>> {
        // Few levels make nearly constant pictures likely, where the deviation's floor matters.
        (1u16..=256, any::<u8>()).prop_flat_map(|(levels, base)| {
            let pixel = (0..levels).prop_map(move |p| base.wrapping_add(p as u8));
            prop::collection::vec(pixel, Pictures::PIXELS)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn fused_pass_is_the_definition(planes in planes(), draw in draws()) {
            prop_assert!(farthest(&fused(&planes, draw), &plain(&planes, draw)) < 1e-5);
        }

        #[test]
        fn brightness_changes_nothing(planes in planes(), draw in draws(), other in -63f32..63.0) {
            let lit = Draw { brightness: other, ..draw };
            prop_assert_eq!(fused(&planes, draw), fused(&planes, lit));
            // Nor does it by the definition, which does add it.
            let twin = plain(&planes, draw).iter().map(|&v| v as f32).collect::<Vec<_>>();
            prop_assert!(farthest(&twin, &plain(&planes, lit)) < 1e-5);
        }

        #[test]
        fn flipping_mirrors(planes in planes(), draw in draws()) {
            let there = fused(&planes, Draw { flip: false, ..draw });
            let back = fused(&planes, Draw { flip: true, ..draw });
            for (row, mirrored) in there.chunks(CROP * 3).zip(back.chunks(CROP * 3)) {
                prop_assert!(row.chunks(3).eq(mirrored.chunks(3).rev()));
            }
        }
    }

    #[test]
    fn constant_pictures_become_zero() {
        for level in [0, 1, 128, 255] {
            let draw = Draw { contrast: 1.7, ..Draw::CENTRAL };
            assert!(fused(&[level; 3072], draw).iter().all(|&v| v == 0.0));
        }
    }

    #[test]
    fn draws_stay_in_the_ranges_and_fill_them() {
        let mut crops = [[0; SLACK + 1]; 2];
        let mut flips = 0;
        let (mut low, mut high) = ([f32::MAX; 2], [f32::MIN; 2]);
        for i in 0..9000 {
            let draw = Draw::random(&mut Stream::new(1, Purpose::Augment, i));
            crops[0][draw.crop[0]] += 1;
            crops[1][draw.crop[1]] += 1;
            flips += u32::from(draw.flip);
            for (j, value) in [draw.brightness, draw.contrast].into_iter().enumerate() {
                low[j] = low[j].min(value);
                high[j] = high[j].max(value);
            }
        }
        assert!(crops.iter().flatten().all(|c| (850..1150).contains(c)), "{crops:?}");
        assert!((4300..4700).contains(&flips), "{flips}");
        assert!(low[0] >= -63.0 && low[0] < -62.8 && high[0] < 63.0 && high[0] > 62.8);
        assert!(low[1] >= 0.2 && low[1] < 0.202 && high[1] < 1.8 && high[1] > 1.798);
    }

    #[test]
    fn sources_depend_on_seed_epoch_and_index_only() {
        let pictures = Arc::new(crate::data::pictures(crate::data::Split::Train, 20, 1));
        let write = |seed, epoch, index| {
            let mut out = vec![0.0; VALUES];
            let label = Augmented::new(pictures.clone(), seed).write(epoch, index, &mut out);
            (label, out)
        };
        assert_eq!(write(1, 2, 3), write(1, 2, 3));
        assert_ne!(write(1, 2, 3).1, write(1, 3, 3).1);
        assert_ne!(write(1, 2, 3).1, write(2, 2, 3).1);
        assert_eq!(write(1, 2, 3).0, f32::from(pictures.label(3)));

        let mut centre = vec![0.0; VALUES];
        let label = Central::new(pictures.clone()).write(5, 3, &mut centre);
        assert_eq!(label, f32::from(pictures.label(3)));
        assert!(farthest(&centre, &plain(pictures.planes(3), Draw::CENTRAL)) < 1e-5);
    }

    #[test]
    fn draws_unfold_to_the_same_examples() {
        let pictures = Arc::new(crate::data::pictures(crate::data::Split::Train, 20, 1));
        let augmented = Augmented::new(pictures, 3);
        let drawn = augmented.drawn().unwrap();
        for (epoch, index) in [(0, 0), (1, 19), (7, 4)] {
            let (mut whole, mut short) = (vec![0.0; VALUES], vec![0.0; Drawn::LEN]);
            let labels =
                (augmented.write(epoch, index, &mut whole), drawn.write(epoch, index, &mut short));
            assert_eq!(labels.0, labels.1);
            assert_eq!(drawn.unfolded(&short), whole);
        }
    }

    #[test]
    fn matches_the_golden_values() {
        let text = std::fs::read_to_string("tests/golden/input.json").unwrap();
        let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
        let planes: Vec<u8> = (0..3072u32).map(|j| ((37 * j + 11) % 256) as u8).collect();
        let cases = golden["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 3);
        for case in cases {
            let number = |value: &serde_json::Value| value.as_f64().unwrap();
            let draw = Draw {
                crop: [0, 1].map(|i| number(&case["crop"][i]) as usize),
                flip: case["flip"].as_bool().unwrap(),
                brightness: number(&case["brightness"]) as f32,
                contrast: number(&case["contrast"]) as f32,
            };
            let out = fused(&planes, draw);
            let image = &case["image"];
            let (at, values) =
                (image["at"].as_array().unwrap(), image["values"].as_array().unwrap());
            assert_eq!((at.len(), values.len()), (48, 48));
            for (at, value) in at.iter().zip(values) {
                let got = out[number(at) as usize];
                assert!((f64::from(got) - number(value)).abs() < 1e-5, "{got} {value}");
            }
            let l2 = out.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
            let abs_max = out.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert!((l2 - number(&image["l2"])).abs() < 1e-4);
            assert!((f64::from(abs_max) - number(&image["abs_max"])).abs() < 1e-5);
        }
    }
}
