//! Pictures drawn by formula: ten classes to learn where CIFAR is not at hand.

use rayon::prelude::*;

use super::sampler::shuffle;
use super::{Pictures, Split};
use crate::util::rng::{Purpose, Stream};

/// A label is an index into these. Each looks alike when left and right are swapped.
const CLASSES: [&str; 10] = [
    "horizontal_stripes",
    "vertical_stripes",
    "diagonal_stripes",
    "checker",
    "disc",
    "ring",
    "cross",
    "square",
    "gradient",
    "dots",
];

/// Test pictures are drawn from stream indices that no training picture has.
const TEST: u64 = 1 << 40;
/// Nor do the labels' streams meet those of the pictures.
const LABELS: u64 = 1 << 41;

const WIDTH: usize = Pictures::WIDTH;
const AREA: usize = Pictures::HEIGHT * WIDTH;

/// Draws `count` pictures of a split.
///
/// The class shows in shape and texture alone: colours, size, place, phase, tilt and the strength of
/// the noise are random. Every ten pictures from a multiple of ten on show each class once. A
/// picture depends on seed, split and index only.
pub fn pictures(split: Split, count: usize, seed: u64) -> Pictures {
    let first = match split {
        Split::Train => 0,
        Split::Test => TEST,
    };
    let len = Pictures::record_len(0);
    let mut records = vec![0; count * len];
    records.par_chunks_exact_mut(len).enumerate().for_each(|(i, record)| {
        let index = first + i as u64;
        let class = label(seed, first + i as u64 / 10, i % 10);
        let (label, planes) = record.split_at_mut(1);
        label[0] = class;
        draw(class, &mut Stream::new(seed, Purpose::Synthetic, index), planes);
    });
    Pictures::new("synthetic", records, 0, CLASSES.map(str::to_owned).to_vec())
}

/// The class at `place` in the `ten`-th ten of pictures: each ten is shuffled.
fn label(seed: u64, ten: u64, place: usize) -> u8 {
    let mut classes: [u32; 10] = std::array::from_fn(|i| i as u32);
    shuffle(&mut classes, &mut Stream::new(seed, Purpose::Synthetic, LABELS | ten));
    classes[place] as u8
}

/// Draws one picture as 3 planes.
fn draw(class: u8, stream: &mut Stream, planes: &mut [u8]) {
    let form = Form::random(stream);
    let (paper, ink) = colours(stream);
    let noise = stream.range(16.0, 56.0) / 128.0;
    let mut mask = [0.0; AREA];
    for (y, row) in mask.chunks_exact_mut(WIDTH).enumerate() {
        for (x, cover) in row.iter_mut().enumerate() {
            *cover = form.cover(class, x as f32, y as f32);
        }
    }
    for (plane, (paper, ink)) in planes.chunks_exact_mut(AREA).zip(paper.into_iter().zip(ink)) {
        for (pixels, cover) in plane.chunks_exact_mut(4).zip(mask.chunks_exact(4)) {
            let random = stream.next_u32().to_le_bytes();
            for (pixel, (cover, random)) in pixels.iter_mut().zip(cover.iter().zip(random)) {
                let grain = noise * (f32::from(random) - 127.5);
                // Casts clamp to 0..=255.
                *pixel = (paper + (ink - paper) * cover + grain) as u8;
            }
        }
    }
}

/// Two random colours that can be told apart.
fn colours(stream: &mut Stream) -> ([f32; 3], [f32; 3]) {
    loop {
        let mut colour = || [0; 3].map(|_| stream.range(0.0, 256.0));
        let (paper, ink) = (colour(), colour());
        let apart: f32 = paper.iter().zip(ink).map(|(p, i)| (p - i).abs()).sum();
        if apart > 150.0 {
            return (paper, ink);
        }
    }
}

/// What varies between pictures of one class, lengths in pixels.
struct Form {
    centre: [f32; 2],
    tilt: f32,
    radius: f32,
    period: f32,
    phase: [f32; 2],
    /// 1 or -1: diagonals rise or fall.
    slope: f32,
    /// Direction of the gradient, up to flips.
    direction: [f32; 2],
}

impl Form {
    fn random(stream: &mut Stream) -> Self {
        let mut range = |low, high| stream.range(low, high);
        Self {
            // A crop of 24 x 24 always shows the larger part of a figure.
            centre: [range(12.0, 19.0), range(12.0, 19.0)],
            tilt: range(-0.12, 0.12),
            radius: range(5.5, 9.0),
            period: range(5.0, 8.5),
            phase: [range(0.0, 1.0), range(0.0, 1.0)],
            slope: if range(0.0, 1.0) < 0.5 { 1.0 } else { -1.0 },
            direction: [range(-1.0, 1.0), if range(0.0, 1.0) < 0.5 { 1.0 } else { -1.0 }],
        }
    }

    /// How much of a pixel is inked, 0 to 1.
    fn cover(&self, class: u8, x: f32, y: f32) -> f32 {
        let (dx, dy) = (x - self.centre[0], y - self.centre[1]);
        let (u, v) = (dx + self.tilt * dy, dy - self.tilt * dx);
        let r = self.radius;
        let distance = || (u * u + v * v).sqrt();
        match class {
            0 => self.wave(v, 0),
            1 => self.wave(u, 0),
            2 => self.wave((u + self.slope * v) * std::f32::consts::FRAC_1_SQRT_2, 0),
            3 => {
                let (a, b) = (self.wave(u, 0), self.wave(v, 1));
                a + b - 2.0 * a * b
            }
            4 => edge(r - distance()),
            5 => edge(1.5 - (distance() - r).abs()),
            6 => {
                let arm = |along: f32, across: f32| (1.5 - across.abs()).min(r - along.abs());
                edge(arm(u, v).max(arm(v, u)))
            }
            7 => edge(r - u.abs().max(v.abs())),
            8 => {
                let [a, b] = self.direction;
                (0.5 + (a * u + b * v) / (3.5 * r)).clamp(0.0, 1.0)
            }
            _ => {
                let (a, b) = (self.place(u, 0) - 0.5, self.place(v, 1) - 0.5);
                edge(self.period * (0.3 - (a * a + b * b).sqrt()))
            }
        }
    }

    /// Bands of ink, half a period wide.
    fn wave(&self, along: f32, axis: usize) -> f32 {
        edge(self.period * ((self.place(along, axis) - 0.5).abs() - 0.25))
    }

    /// The place in the period, in `[0, 1)`.
    fn place(&self, along: f32, axis: usize) -> f32 {
        // Positive, so that the cast rounds down.
        let periods = along / self.period + self.phase[axis] + 64.0;
        periods - periods as i32 as f32
    }
}

/// The cover of a pixel whose centre is `inside` pixels inside the figure's edge.
fn edge(inside: f32) -> f32 {
    (inside + 0.5).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_depend_on_seed_split_and_index_only() {
        let few = pictures(Split::Train, 30, 1);
        let many = pictures(Split::Train, 300, 1);
        let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let alone = one_thread.install(|| pictures(Split::Train, 30, 1));
        for i in 0..30 {
            assert_eq!((few.label(i), few.planes(i)), (many.label(i), many.planes(i)));
            assert_eq!((few.label(i), few.planes(i)), (alone.label(i), alone.planes(i)));
        }
        assert_ne!(few.planes(0), pictures(Split::Train, 1, 2).planes(0));
    }

    #[test]
    fn no_two_pictures_of_the_splits_are_alike() {
        let sets = [Split::Train, Split::Test].map(|split| pictures(split, 500, 1));
        let all: std::collections::HashSet<&[u8]> =
            sets.iter().flat_map(|set| (0..500).map(|i| set.planes(i))).collect();
        assert_eq!(all.len(), 1000);
    }

    #[test]
    fn every_ten_hold_each_class_in_an_order_of_their_own() {
        let set = pictures(Split::Train, 200, 3);
        let mut orders = std::collections::HashSet::new();
        for ten in 0..20 {
            let mut labels: Vec<u8> = (0..10).map(|i| set.label(ten * 10 + i)).collect();
            orders.insert(labels.clone());
            labels.sort();
            assert!(labels.iter().copied().eq(0..10));
        }
        assert!(orders.len() > 15);
        assert_eq!(set.classes().len(), 10);
        assert_eq!(pictures(Split::Test, 0, 3).len(), 0);
    }

    /// The mean of each channel in the middle 24 x 24, and the mean of all.
    fn colour(planes: &[u8]) -> [f64; 4] {
        let mut means = [0.0; 4];
        for (c, plane) in planes.chunks_exact(AREA).enumerate() {
            let rows = plane.chunks_exact(WIDTH).skip(4).take(24);
            let sum: u32 = rows.flat_map(|row| &row[4..28]).map(|&p| u32::from(p)).sum();
            means[c] = f64::from(sum) / 576.0;
            means[3] += means[c] / 3.0;
        }
        means
    }

    #[test]
    fn colour_and_brightness_do_not_give_the_class_away() {
        // Five nearest neighbours by colour, a classifier that would find any such rule.
        let [train, test] = [(Split::Train, 3000), (Split::Test, 500)]
            .map(|(split, count)| pictures(split, count, 1));
        let known: Vec<_> = (0..train.len()).map(|i| colour(train.planes(i))).collect();
        let right = (0..test.len())
            .filter(|&i| {
                let colour = colour(test.planes(i));
                let mut nearest: Vec<(f64, u8)> = known
                    .iter()
                    .enumerate()
                    .map(|(j, k)| {
                        let d = k.iter().zip(colour).map(|(a, b)| (a - b) * (a - b)).sum();
                        (d, train.label(j))
                    })
                    .collect();
                nearest.sort_by(|a, b| a.0.total_cmp(&b.0));
                let mut votes = [0; 10];
                nearest[..5].iter().for_each(|(_, label)| votes[usize::from(*label)] += 1);
                let best = (0..10u8).max_by_key(|&class| votes[usize::from(class)]);
                best == Some(test.label(i))
            })
            .count();
        assert!(right < 100, "{right} of 500 by colour alone; chance is 50");
    }

    /// Mean absolute differences of neighbours: across columns and across rows.
    fn edges(planes: &[u8]) -> [f64; 2] {
        let at = |i: usize| f64::from(planes[i]);
        let inner =
            (0..planes.len()).filter(|i| i % WIDTH < WIDTH - 2 && i % AREA < AREA - 2 * WIDTH);
        let mut sums = [0.0; 2];
        for i in inner {
            sums[0] += (at(i) - at(i + 2)).abs();
            sums[1] += (at(i) - at(i + 2 * WIDTH)).abs();
        }
        sums
    }

    #[test]
    fn stripes_run_as_their_names_say() {
        let set = &pictures(Split::Test, 1000, 1);
        let of = |class: u8| (0..set.len()).filter(move |&i| set.label(i) == class);
        let ratio = |i: usize| {
            let [columns, rows] = edges(set.planes(i));
            rows / columns
        };
        assert!(of(0).filter(|&i| ratio(i) > 1.1).count() >= 98);
        assert!(of(1).filter(|&i| ratio(i) < 1.0 / 1.1).count() >= 98);
        assert!(of(2).filter(|&i| (0.8..1.25).contains(&ratio(i))).count() >= 98);
    }
}
