//! The input of a trainer: data sets, augmentation, the order of the examples and the threads that make batches.

mod archive;
mod augment;
mod cifar;
mod digest;
mod distortion;
mod error;
mod fetch;
mod line;
mod padded;
mod pictures;
mod pipeline;
mod sampler;
mod synthetic;

use crate::tensor::Shape;

pub use archive::{ArchiveInfo, unpack};
pub use augment::{Augmented, CROP, Central, Draw, Drawn, distort};
pub use cifar::{CifarSet, Split, load, load_file};
pub use digest::Digest;
pub use distortion::Distortion;
pub use error::DataError;
pub use fetch::fetch;
pub use line::Line;
pub use padded::{Padded, Shift, Whole};
pub use pictures::Pictures;
pub use pipeline::{InputPipeline, PipelineSpec};
pub use sampler::{Pick, Sampler};
pub use synthetic::pictures;

/// One tower's examples of one step, in the tower's input layout.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The examples' features one after the other, each in the source's shape, row-major.
    pub features: Vec<f32>,
    /// One label per example; whole numbers for classes, as the trainer's graph has one dtype.
    pub labels: Vec<f32>,
}

/// A set of examples that can be written into a batch.
///
/// Everything random in an example depends only on the seed, the epoch and the index.
pub trait Source: Send + Sync {
    /// What error messages call this set.
    fn name(&self) -> &str;

    /// The number of examples.
    fn len(&self) -> usize;

    /// Whether there are no examples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The names of the classes, by label; none where labels are no classes.
    fn classes(&self) -> &[String] {
        &[]
    }

    /// The shape of one example's features.
    fn feature_shape(&self) -> Shape;

    /// The same examples as draws of pictures, for a device that distorts them itself; `None` where they are none.
    fn drawn(&self) -> Option<Drawn> {
        None
    }

    /// What a model reads for the features of these examples: others than were written where a device makes them.
    fn unfolded(&self, features: &[f32]) -> Vec<f32> {
        features.to_vec()
    }

    /// Writes the features of example `index`, as it looks in `epoch`, and returns its label.
    ///
    /// `index` is below [`len`](Self::len), and `features` holds as many values as the shape says.
    fn write(&self, epoch: u64, index: usize, features: &mut [f32]) -> f32;
}
