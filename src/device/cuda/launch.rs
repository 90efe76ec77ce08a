//! [`Launch::enqueue`]: one match over [`Task`].

use super::driver::Ptr;
use super::kernels::{ConvArg, Grid, Kernels, LrnArg, WindowArg};
use super::plan::{Launch, Means};
use super::scratch::{
    LRN_CHANNELS, TILE, column_blocks, filter_grad_blocks, lrn_blocks, sum_blocks, table,
};
use super::task::Task;
use crate::device::DeviceError;
use crate::graph::{Place, View, Window};
use crate::tensor::Shape;

/// The memories of a run.
pub(super) struct Memories<'a> {
    /// One per feed.
    pub(super) feeds: &'a [Ptr],
    pub(super) variables: Ptr,
    pub(super) gradients: Ptr,
    pub(super) arena: Ptr,
    pub(super) workspace: Ptr,
    pub(super) counters: Ptr,
}

impl Memories<'_> {
    pub(super) fn find(&self, view: &View) -> Ptr {
        let start = match view.place {
            Place::Feed(i) => self.feeds[i],
            Place::Variables => self.variables,
            Place::Gradients => self.gradients,
            Place::Arena => self.arena,
        };
        start.at(view.offset)
    }
}

fn conv_arg(window: &Window, x: &Shape, y: &Shape) -> ConvArg {
    let sizes = [x[0], x[3], y[3]].map(|n| n as i32);
    ConvArg { window: window.into(), sizes }
}

impl Launch {
    /// Enqueues it.
    pub(super) fn enqueue(&self, k: &Kernels, memories: &Memories<'_>) -> Result<(), DeviceError> {
        let mut operands = [Ptr::NULL; 5];
        for (operand, (view, _)) in operands.iter_mut().zip(&self.inputs) {
            *operand = memories.find(view);
        }
        let mut results = [Ptr::NULL; 3];
        for (result, (view, _)) in results.iter_mut().zip(&self.outputs) {
            *result = memories.find(view);
        }
        let ([a, b, c, d, e], out) = (operands, results[0]);
        let (workspace, counters) = (memories.workspace, memories.counters);
        match &self.means {
            Means::Product(product) => {
                return match self.task {
                    Task::Product { plus: Some(factor), .. } => {
                        product.run([a, b, Ptr::NULL], Some((factor, c)), out, workspace)
                    }
                    _ => product.run([a, b, c], None, out, workspace),
                };
            }
            Means::Convolution(convolution) => return convolution.run([a, b, c], out, workspace),
            Means::Kernel | Means::Bf16Kernel => {}
        }

        let bf16 = matches!(self.means, Means::Bf16Kernel);
        let shape = |i: usize| &self.inputs[i].1;
        let out_shape = &self.outputs[0].1;
        let count = out_shape.elements();
        let (n, each) = (count as i32, Grid::each(count));
        let channels = out_shape.last_dim() as i32;
        let columns = |shape: &Shape, taps: usize| {
            let (rows, columns) = table(shape);
            let [blocks, chunks] = column_blocks(rows, columns);
            (rows as i32, columns as i32, Grid::tiles([blocks, chunks, taps]))
        };
        let window = WindowArg::from;
        match &self.task {
            Task::Fill(value) => k.fill(each, out, *value, n),
            Task::Product { .. } => unreachable!("products are always cuBLASLt's"),
            Task::Conv { window, relu, .. } => {
                let arg = conv_arg(window, shape(0), out_shape);
                let grid = tiles(count / out_shape[3], out_shape[3], 1);
                let relu = i32::from(*relu);
                match bf16 {
                    true => k.conv_bf16(grid, a, b, c, out, arg, relu),
                    false => k.conv(grid, a, b, c, out, arg, relu),
                }
            }
            Task::ConvInputGrad(window) => {
                let arg = conv_arg(window, out_shape, shape(0));
                let grid = tiles(count / out_shape[3], out_shape[3], 1);
                match bf16 {
                    true => k.conv_input_grad_bf16(grid, a, b, out, arg),
                    false => k.conv_input_grad(grid, a, b, out, arg),
                }
            }
            Task::ConvFilterGrad(window) => {
                let arg = conv_arg(window, shape(0), shape(1));
                let (per, blocks) = filter_grad_blocks(window, shape(0), shape(1));
                let grid = Grid::blocks(blocks);
                let per = per as i32;
                match bf16 {
                    true => k.conv_filter_grad_bf16(grid, a, b, out, arg, per, workspace, counters),
                    false => k.conv_filter_grad(grid, a, b, out, arg, per, workspace, counters),
                }
            }
            &Task::Transpose { rows, columns } => {
                let grid = Grid::tiles([columns.div_ceil(32), rows.div_ceil(32), 1]);
                k.transpose(grid, a, out, rows as i32, columns as i32)
            }
            Task::Depthwise(w) => {
                let (from, to) = (shape(0).last_dim(), out_shape.last_dim());
                k.depthwise(each, a, b, out, window(w), from as i32, (to / from) as i32, n)
            }
            Task::DepthwiseInputGrad(w) => {
                let (from, to) = (out_shape.last_dim(), shape(0).last_dim());
                k.depthwise_input_grad(
                    each,
                    a,
                    b,
                    out,
                    window(w),
                    from as i32,
                    (to / from) as i32,
                    n,
                )
            }
            Task::DepthwiseFilterGrad(w) => {
                let (from, to) = (shape(0).last_dim(), shape(1).last_dim());
                let (rows, _, grid) = columns(shape(1), w.kernel[0] * w.kernel[1]);
                let (from, per) = (from as i32, (to / from) as i32);
                k.depthwise_filter_grad(
                    grid,
                    a,
                    b,
                    out,
                    window(w),
                    from,
                    per,
                    rows,
                    workspace,
                    counters,
                )
            }
            Task::MaxPool(w) => k.max_pool(each, a, out, window(w), channels, n),
            Task::MaxPoolGrad { window: w, relu } => {
                k.max_pool_grad(each, a, b, c, out, window(w), channels, i32::from(*relu), n)
            }
            Task::AvgPool(w) => k.avg_pool(each, a, out, window(w), channels, n),
            Task::AvgPoolGrad(w) => k.avg_pool_grad(each, a, out, window(w), channels, n),
            Task::Lrn(p) => {
                let arg = LrnArg::new(p, channels as usize);
                let (rows, per, grid) = lrn_grid(count, channels as usize, arg.radius as usize);
                k.lrn(grid, a, out, arg, rows, per, channels)
            }
            Task::LrnGrad { params, relu } => {
                let arg = LrnArg::new(params, channels as usize);
                let (rows, per, grid) = lrn_grid(count, channels as usize, 2 * arg.radius as usize);
                k.lrn_grad(grid, a, b, out, arg, i32::from(*relu), rows, per, channels)
            }
            Task::Moments { unbias } => {
                let (rows, width, grid) = columns(shape(0), 1);
                let [_, by_mean, by_variance] = results;
                let unbias = unbias.unwrap_or(1.0);
                k.batch_norm_moments(
                    grid,
                    a,
                    out,
                    b,
                    c,
                    by_mean,
                    by_variance,
                    unbias,
                    rows,
                    width,
                    workspace,
                    counters,
                )
            }
            Task::BatchNorm(epsilon) => k.batch_norm(each, a, b, c, d, out, *epsilon, channels, n),
            Task::BatchNormSums(epsilon) => {
                let (rows, width, grid) = columns(shape(0), 1);
                let [_, by_scale, by_offset] = results;
                k.batch_norm_sums(
                    grid, a, b, c, out, by_scale, by_offset, *epsilon, rows, width, workspace,
                    counters,
                )
            }
            Task::BatchNormInputGrad(epsilon) => {
                let rows = (count / channels.max(1) as usize) as i32;
                k.batch_norm_input_grad(each, a, b, c, d, e, out, *epsilon, rows, channels, n)
            }
            Task::BiasAdd => k.bias_add(each, a, b, out, channels, 0, n),
            Task::ColumnSums => {
                let (rows, width, grid) = columns(shape(0), 1);
                k.column_sums(grid, a, out, rows, width, workspace, counters)
            }
            Task::Relu => k.relu(each, a, out, n),
            Task::ReluGrad => k.relu_grad(each, a, b, out, n),
            Task::ReluBiasGrad => {
                let (rows, width, grid) = columns(shape(0), 1);
                k.relu_bias_grad(grid, a, b, out, results[1], rows, width, workspace, counters)
            }
            Task::CrossEntropy { mean, gradient } => {
                let (mean, gradient_at) = match (mean, gradient) {
                    (true, Some(_)) => (results[1], results[2]),
                    (true, None) => (results[1], Ptr::NULL),
                    (false, _) => (Ptr::NULL, results[1]),
                };
                let (rows, classes) = (shape(0)[0], shape(0)[1] as i32);
                let grid = Grid::blocks([rows.div_ceil(8), 1, 1]);
                let up = gradient.unwrap_or(0.0);
                let (none, rows) = (Ptr::NULL, rows as i32);
                k.cross_entropy(
                    grid,
                    a,
                    b,
                    none,
                    up,
                    out,
                    gradient_at,
                    mean,
                    rows,
                    classes,
                    counters,
                )
            }
            Task::CrossEntropyGrad => {
                let (rows, classes) = (shape(1)[0], shape(1)[1] as i32);
                let grid = Grid::blocks([rows.div_ceil(8), 1, 1]);
                let (none, rows) = (Ptr::NULL, rows as i32);
                k.cross_entropy(grid, b, c, a, 0.0, none, out, none, rows, classes, counters)
            }
            Task::Add => k.add(each, a, b, out, n),
            Task::Sub => k.sub(each, a, b, out, n),
            Task::Mul => k.mul(each, a, b, out, n),
            Task::ScaleBy => k.scale_by(each, a, b, out, n),
            Task::Scale(factor) => k.scale(each, a, out, *factor, n),
            Task::Square => k.square(each, a, out, n),
            Task::Sum { squares, factor } => {
                let count = shape(0).elements();
                let grid = Grid::blocks([sum_blocks(count), 1, 1]);
                let squares = i32::from(*squares);
                k.sum(grid, a, out, squares, *factor, count as i32, workspace, counters)
            }
            Task::Broadcast => k.broadcast(each, a, out, n),
            Task::Concat => {
                let [left, right] = [0, 1].map(|i| shape(i).last_dim() as i32);
                k.concat(each, a, b, out, left, right, n)
            }
            Task::Slice { start, len } => {
                let width = shape(0).last_dim() as i32;
                k.slice(each, a, out, *start as i32, *len as i32, width, n)
            }
            Task::AddScaled(factor) => k.add_scaled(each, a, b, out, *factor, n),
        }
    }
}

/// The grid of a product of `rows` by `columns` in tiles.
fn tiles(rows: usize, columns: usize, chunks: usize) -> Grid {
    Grid::blocks([rows.div_ceil(TILE), columns.div_ceil(TILE), chunks])
}

/// Rows, rows per block, and the grid of response normalisation.
fn lrn_grid(count: usize, channels: usize, halo: usize) -> (i32, i32, Grid) {
    let rows = count / channels;
    let (per, pieces) = lrn_blocks(channels, halo);
    debug_assert!(pieces == 1 || channels > LRN_CHANNELS);
    (rows as i32, per as i32, Grid::blocks([rows.div_ceil(per), pieces, 1]))
}
