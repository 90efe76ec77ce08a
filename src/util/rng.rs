//! Counter-based random numbers: the same `(seed, stream, index)` gives the same numbers on any thread or device.
//!
//! The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).

/// What numbers are drawn for. Streams never overlap, whatever their indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// Initial values; the index is the variable's position in the layout.
    Init = 1,
    /// The order of the examples of one epoch; the index is the epoch.
    Shuffle = 2,
    /// Augmentation; the index is [`example_index`] of the epoch and the example.
    Augment = 3,
    /// Pictures and labels of the synthetic data set; the index is the example.
    Synthetic = 4,
    /// Free use in tests and benchmarks.
    Test = 5,
}

/// The index of an example in one epoch, for streams that differ from epoch to epoch.
pub fn example_index(epoch: u64, example: usize) -> u64 {
    (epoch << 32) | example as u64
}

/// One block of Philox4x32-10.
pub fn philox(mut key: [u32; 2], mut ctr: [u32; 4]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(ctr[0]) * 0xD251_1F53;
        let b = u64::from(ctr[2]) * 0xCD9E_8D57;
        ctr = [
            (b >> 32) as u32 ^ ctr[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ ctr[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    ctr
}

/// The numbers of one `(seed, purpose, index)`, in order.
#[derive(Clone, Debug)]
pub struct Stream {
    key: [u32; 2],
    /// `[block, index low, index high, purpose]`.
    counter: [u32; 4],
    block: [u32; 4],
    used: usize,
}

impl Stream {
    /// A stream at its first number.
    pub fn new(seed: u64, purpose: Purpose, index: u64) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
            counter: [0, index as u32, (index >> 32) as u32, purpose as u32],
            block: [0; 4],
            used: 4,
        }
    }

    /// 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == 4 {
            self.block = philox(self.key, self.counter);
            self.counter[0] = self.counter[0].wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.block[self.used - 1]
    }

    /// Uniform in `[0, 1)`, a multiple of 2^-24.
    pub fn uniform(&mut self) -> f32 {
        (self.next_u32() >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// Uniform in `[low, high)`.
    pub fn range(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.uniform()
    }

    /// Uniform in `0..n`, without bias (Lemire's method).
    pub fn below(&mut self, n: u32) -> u32 {
        debug_assert!(n > 0);
        loop {
            let wide = u64::from(self.next_u32()) * u64::from(n);
            if wide as u32 >= n.wrapping_neg() % n {
                return (wide >> 32) as u32;
            }
        }
    }

    /// Standard normal (Box-Muller, in f64 so that every host rounds alike).
    pub fn normal(&mut self) -> f32 {
        let u = (f64::from(self.next_u32()) + 1.0) / 4_294_967_296.0;
        let v = f64::from(self.next_u32()) / 4_294_967_296.0;
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }

    /// Standard normal, drawn again while outside two standard deviations, as TensorFlow's `truncated_normal`.
    pub fn truncated_normal(&mut self) -> f32 {
        loop {
            let x = self.normal();
            if x.abs() < 2.0 {
                return x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_published_test_vectors() {
        assert_eq!(philox([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 2], [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn below_covers_its_range_evenly() {
        let mut stream = Stream::new(7, Purpose::Test, 0);
        let mut counts = [0u32; 9];
        (0..9000).for_each(|_| counts[stream.below(9) as usize] += 1);
        assert!(counts.iter().all(|&c| (850..1150).contains(&c)), "{counts:?}");
    }

    #[test]
    fn truncated_normal_has_the_known_spread() {
        let mut stream = Stream::new(3, Purpose::Test, 1);
        let x: Vec<f64> = (0..200_000).map(|_| f64::from(stream.truncated_normal())).collect();
        let std = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64).sqrt();
        assert!((std - 0.879_625_7).abs() < 0.003, "{std}");
        assert!(x.iter().all(|v| v.abs() < 2.0));
    }
}
