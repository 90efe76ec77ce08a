//! How own kernels share out their work, and the scratch memory that this needs. A function of shapes alone: sums are added in an order
//! that no card and no run can change.

use super::plan::Launch;
use super::task::Task;
use crate::graph::Window;
use crate::tensor::Shape;

/// The largest radius of response normalisation that matters, as in `norm.cu`.
pub(super) const LRN_RADIUS: usize = 128;
/// Channels of a row that a block of response normalisation treats at most, and floats of its buffer.
pub(super) const LRN_CHANNELS: usize = 512;
const LRN_BUFFER: usize = 2048;
/// Rows and columns of a block's tile in `conv.cu`.
pub(super) const TILE: usize = 64;
/// Positions that a chunk of a filter gradient has at least, and blocks that are enough.
const DEPTH: usize = 256;
const BLOCKS: usize = 512;

/// Blocks of a sum over `n` elements.
pub(super) fn sum_blocks(n: usize) -> usize {
    n.div_ceil(256 * 8).clamp(1, 256)
}

/// Blocks of 32 columns, and chunks of rows, of sums over columns.
pub(super) fn column_blocks(rows: usize, columns: usize) -> [usize; 2] {
    [columns.div_ceil(32), rows.div_ceil(64).clamp(1, 256)]
}

/// Rows per block, and pieces of each row's channels, of response normalisation.
pub(super) fn lrn_blocks(channels: usize, halo: usize) -> (usize, usize) {
    let pitch = channels.min(LRN_CHANNELS) + 2 * halo;
    ((LRN_BUFFER / pitch).max(1), channels.div_ceil(LRN_CHANNELS))
}

/// Positions per chunk of a filter gradient, and tiles and chunks.
pub(super) fn filter_grad_blocks(window: &Window, x: &Shape, y: &Shape) -> (usize, [usize; 3]) {
    let positions = y.elements() / y.last_dim();
    let rows = window.kernel[0] * window.kernel[1] * x.last_dim();
    let tiles = [rows.div_ceil(TILE), y.last_dim().div_ceil(TILE)];
    let wanted = BLOCKS.div_ceil(tiles[0] * tiles[1]);
    let per = positions.div_ceil(wanted).max(DEPTH).next_multiple_of(16);
    (per, [tiles[0], tiles[1], positions.div_ceil(per)])
}

/// Rows and columns of a tensor as sums over columns see it.
pub(super) fn table(shape: &Shape) -> (usize, usize) {
    (shape.elements() / shape.last_dim().max(1), shape.last_dim())
}

/// Floats and counters that a launch of an own kernel needs beside its operands.
pub(super) fn scratch(launch: &Launch) -> (usize, usize) {
    let shape = |i: usize| &launch.inputs[i].1;
    let columns = |sums: usize, shape: &Shape| {
        let (rows, columns) = table(shape);
        let [blocks, chunks] = column_blocks(rows, columns);
        (sums * chunks * columns, blocks)
    };
    match &launch.task {
        Task::Sum { .. } => (sum_blocks(shape(0).elements()), 1),
        Task::ColumnSums | Task::ReluBiasGrad => columns(1, shape(0)),
        Task::CrossEntropy { .. } => (0, 1),
        Task::Moments { .. } | Task::BatchNormSums(_) => columns(2, shape(0)),
        Task::DepthwiseFilterGrad(w) => {
            let (floats, counters) = columns(1, shape(1));
            let taps = w.kernel[0] * w.kernel[1];
            (taps * floats, taps * counters)
        }
        Task::ConvFilterGrad(w) => {
            let (_, [x, y, chunks]) = filter_grad_blocks(w, shape(0), shape(1));
            (chunks * launch.outputs[0].1.elements(), x * y)
        }
        _ => (0, 0),
    }
}
