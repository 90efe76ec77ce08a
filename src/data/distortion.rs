//! [`Distortion`]: the ways from pictures to features, by name.

use std::sync::Arc;

use super::{Augmented, Central, Draw, Padded, Pictures, Shift, Source, Whole, distort, padded};

/// How pictures become features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distortion {
    /// The tutorial's: a crop of 24x24, flip, brightness, contrast, standardisation.
    Tutorial,
    /// That of the residual networks: 32x32 out of the picture with 4 pixels of zeros around it, flip.
    Padded,
}

impl Distortion {
    /// Pictures to learn from, distorted anew in every epoch.
    pub fn training(self, pictures: Arc<Pictures>, seed: u64) -> Arc<dyn Source> {
        match self {
            Self::Tutorial => Arc::new(Augmented::new(pictures, seed)),
            Self::Padded => Arc::new(Padded::new(pictures, seed)),
        }
    }

    /// Pictures to judge by, as they are.
    pub fn evaluation(self, pictures: Arc<Pictures>) -> Arc<dyn Source> {
        match self {
            Self::Tutorial => Arc::new(Central::new(pictures)),
            Self::Padded => Arc::new(Whole::new(pictures)),
        }
    }

    /// One picture to judge: `planes` holds 3 x 32 x 32 bytes.
    ///
    /// # Panics
    /// If `planes` or `features` has another length.
    pub fn plain(self, planes: &[u8], features: &mut [f32]) {
        match self {
            Self::Tutorial => distort(planes, Draw::CENTRAL, features),
            Self::Padded => padded::shift(planes, Shift::NONE, features),
        }
    }
}
