//! Data sets, their files, fetching and the input pipeline.

mod cifar;
mod fetch;
mod pipeline;
