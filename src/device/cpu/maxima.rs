//! A picture's maxima with those who won, and the way back: for all channels, or for those of one vector.

use std::ops::Range;

use super::simd::{MAX_LANES, Vector, multiversion};
use crate::graph::Window;

/// 2^23: the lowest bits of a float from there on are those of a whole number, so that vectors of floats carry tap numbers.
const WHOLE: f32 = 8_388_608.0;

/// The number of a byte, as a vector carries it.
#[inline(always)]
fn whole(byte: u8) -> f32 {
    f32::from_bits(WHOLE.to_bits() | u32::from(byte))
}

/// What never wins below a relu.
pub(super) const NEVER: f32 = -1.0;

/// The same windows over a picture with something around it, so that all of their taps lie in it.
pub(super) fn padded(w: &Window) -> Window {
    let needed = |d: usize| (w.output[d] - 1) * w.stride[d] + w.kernel[d];
    let input = [0, 1].map(|d| needed(d).max(w.pad[d] + w.input[d]));
    Window { input, pad: [0, 0], ..*w }
}

/// Neighbouring windows that are looked at together.
const RUN: usize = 4;

/// Neighbouring windows whose taps in the picture are the same ones.
struct Place {
    /// How many: [`RUN`] or one.
    run: usize,
    /// The first of them.
    at: usize,
    /// Row and column of its first tap.
    start: [usize; 2],
    /// Rows and columns of the kernel.
    taps: [Range<usize>; 2],
}

impl Place {
    /// All windows of a picture.
    #[inline(always)]
    fn all(w: &Window) -> impl Iterator<Item = Self> {
        let (mut y, mut x) = (0, 0);
        std::iter::from_fn(move || {
            if x >= w.output[1] {
                (y, x) = (y + 1, 0);
            }
            if y >= w.output[0] {
                return None;
            }
            let ((rows, top), (columns, left)) = (w.taps(0, y), w.taps(1, x));
            let alike = x + RUN <= w.output[1] && w.taps(1, x + RUN - 1).0 == columns;
            let (run, at) = (if alike { RUN } else { 1 }, y * w.output[1] + x);
            x += run;
            Some(Self { run, at, start: [top, left], taps: [rows, columns] })
        })
    }
}

/// Some channels of some windows.
#[derive(Clone, Copy)]
struct Cut<'a> {
    window: &'a Window,
    place: &'a Place,
    channels: Channels,
    /// The first channel, and how many.
    first: usize,
    count: usize,
}

impl Cut<'_> {
    /// Where the first value lies above the pool, and below.
    #[inline(always)]
    fn starts(&self) -> [usize; 2] {
        let (c, [y, x]) = (&self.channels, self.place.start);
        let above = self.place.at * c.all + c.first + self.first;
        [above, (y * self.window.input[1] + x) * c.pitch + self.first]
    }

    /// For each row of taps where it lies from the first, and the number of its first.
    #[inline(always)]
    fn rows(&self) -> impl Iterator<Item = (usize, f32)> {
        let (w, [rows, columns]) = (self.window, &self.place.taps);
        let (row, first) = (w.input[1] * self.channels.pitch, columns.start);
        rows.clone()
            .enumerate()
            .map(move |(i, y)| (i * row, WHOLE + (y * w.kernel[1] + first) as f32))
    }

    /// For each tap of a row where it lies from the first.
    #[inline(always)]
    fn columns(&self) -> impl DoubleEndedIterator<Item = usize> {
        let pitch = self.channels.pitch;
        (0..self.place.taps[1].len()).map(move |i| i * pitch)
    }

    /// Floats from the first tap of the first of `windows` to the end of the last tap of the last.
    #[inline(always)]
    fn reach(&self, windows: usize) -> usize {
        let [rows, columns] = [0, 1].map(|d| self.place.taps[d].len().saturating_sub(1));
        (rows * self.window.input[1] + columns) * self.channels.pitch
            + (windows - 1) * self.step()
            + self.count
    }

    /// Distance between the places of neighbouring windows.
    #[inline(always)]
    fn step(&self) -> usize {
        self.window.stride[1] * self.channels.pitch
    }

    /// The maxima of `N` windows and who won.
    ///
    /// # Safety
    /// As for every function of [`Vector`].
    #[inline(always)]
    unsafe fn max<V: Vector, const N: usize, const ALL: bool>(
        &self,
        x: &[f32],
        y: &mut [f32],
        winners: &mut [u8],
    ) {
        let ([above, below], pitch, count) = (self.starts(), self.channels.all, self.count);
        let x = &x[below..][..self.reach(N)];
        let (y, winners) = (&mut y[above..], &mut winners[above..]);
        // SAFETY: the caller's promise; `x` reaches as far as the last tap, and `numbers` holds a vector.
        unsafe {
            let mut best = [V::splat(f32::NEG_INFINITY); N];
            let (mut who, mut sum) = ([V::splat(WHOLE); N], [V::zero(); N]);
            for (row, number) in self.rows() {
                let mut number = V::splat(number);
                for column in self.columns() {
                    for i in 0..N {
                        let at = row + column + i * self.step();
                        let x = if ALL {
                            V::load(x.as_ptr().add(at))
                        } else {
                            V::load_part(&x[at..][..count])
                        };
                        let higher = V::max(best[i], x);
                        who[i] = V::if_equal(higher, best[i], who[i], number);
                        best[i] = higher;
                        sum[i] = V::add(sum[i], x);
                    }
                    number = V::add(number, V::splat(1.0));
                }
            }
            for i in 0..N {
                // A maximum may lose a NaN; a sum does not, and of what is not negative it makes none.
                let best = V::if_equal(sum[i], sum[i], best[i], sum[i]);
                V::store_lanes::<ALL>(best, &mut y[i * pitch..], count);
                let mut numbers = [WHOLE; MAX_LANES];
                V::store(who[i], numbers.as_mut_ptr());
                let bytes = numbers.map(|number| number.to_bits() as u8);
                let count = if ALL { V::LANES } else { count };
                winners[i * pitch..][..count].copy_from_slice(&bytes[..count]);
            }
        }
    }

    /// Adds what `N` windows hand on to those that won.
    ///
    /// # Safety
    /// As for every function of [`Vector`].
    #[inline(always)]
    unsafe fn spread<V: Vector, const N: usize, const ALL: bool>(
        &self,
        handed: &[f32],
        winners: &[u8],
        dx: &mut [f32],
    ) {
        let ([above, below], pitch, count) = (self.starts(), self.channels.all, self.count);
        let (handed, winners) = (&handed[above..], &winners[above..]);
        let dx = &mut dx[below..][..self.reach(N)];
        // SAFETY: the caller's promise; `dx` reaches as far as the last tap, and `numbers` holds a vector.
        unsafe {
            let (mut who, mut all) = ([V::zero(); N], [V::zero(); N]);
            for i in 0..N {
                let count = if ALL { V::LANES } else { count };
                let winners = &winners[i * pitch..][..count];
                let numbers: [f32; MAX_LANES] =
                    std::array::from_fn(|i| if i < count { whole(winners[i]) } else { 0.0 });
                who[i] = V::load(numbers.as_ptr());
                all[i] = V::load_lanes::<ALL>(&handed[i * pitch..], count);
            }
            let last = self.place.taps[1].len().saturating_sub(1);
            for (row, number) in self.rows() {
                let mut number = V::splat(number + last as f32);
                // The last first: then a place gets what windows hand on in the order of the windows.
                for column in self.columns().rev() {
                    for i in 0..N {
                        let at = row + column + i * self.step();
                        let taken = V::if_equal(who[i], number, all[i], V::zero());
                        if ALL {
                            let dx = dx.as_mut_ptr().add(at);
                            V::store(V::add(V::load(dx), taken), dx);
                        } else {
                            let dx = &mut dx[at..][..count];
                            V::store_part(V::add(V::load_part(dx), taken), dx);
                        }
                    }
                    number = V::sub(number, V::splat(1.0));
                }
            }
        }
    }
}

/// Some channels of a picture below a pool.
#[derive(Clone, Copy)]
pub(super) struct Channels {
    /// Channels of what is above the pool.
    pub all: usize,
    /// The first of these, with which the picture begins.
    pub first: usize,
    /// How many.
    pub count: usize,
    /// Distance between columns of the picture.
    pub pitch: usize,
}

impl Channels {
    /// All of `c`.
    pub(super) fn all(c: usize) -> Self {
        Self { all: c, first: 0, count: c, pitch: c }
    }
}

multiversion! {
    /// The maxima of some channels of a relu's values, and who won.
    pub(super) fn max_picture<V>(w: &Window, c: Channels, x: &[f32], y: &mut [f32], winners: &mut [u8]) {
        for place in Place::all(w) {
            for first in (0..c.count).step_by(V::LANES) {
                let count = V::LANES.min(c.count - first);
                let cut = Cut { window: w, place: &place, channels: c, first, count };
                // SAFETY: this copy is compiled for `V`.
                unsafe {
                    match (place.run, count == V::LANES) {
                        (RUN, true) => cut.max::<V, RUN, true>(x, y, winners),
                        (RUN, false) => cut.max::<V, RUN, false>(x, y, winners),
                        (_, true) => cut.max::<V, 1, true>(x, y, winners),
                        (_, false) => cut.max::<V, 1, false>(x, y, winners),
                    }
                }
            }
        }
    }
}

multiversion! {
    /// What maxima hand on: below a relu, nothing where they are zero or no number.
    pub(super) fn hand<V>(y: &[f32], dy: &[f32], handed: &mut [f32]) {
        for ((to, y), dy) in handed.iter_mut().zip(y).zip(dy) {
            *to = if *y > 0.0 { *dy } else { 0.0 };
        }
    }
}

multiversion! {
    /// The gradient of some channels of a relu's operand, from what the maxima hand on.
    pub(super) fn grad_picture<V>(w: &Window, c: Channels, handed: &[f32], winners: &[u8], dx: &mut [f32]) {
        dx.fill(0.0);
        for place in Place::all(w) {
            for first in (0..c.count).step_by(V::LANES) {
                let count = V::LANES.min(c.count - first);
                let cut = Cut { window: w, place: &place, channels: c, first, count };
                // SAFETY: this copy is compiled for `V`.
                unsafe {
                    match (place.run, count == V::LANES) {
                        (RUN, true) => cut.spread::<V, RUN, true>(handed, winners, dx),
                        (RUN, false) => cut.spread::<V, RUN, false>(handed, winners, dx),
                        (_, true) => cut.spread::<V, 1, true>(handed, winners, dx),
                        (_, false) => cut.spread::<V, 1, false>(handed, winners, dx),
                    }
                }
            }
        }
    }
}
