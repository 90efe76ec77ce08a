//! [`Interpreter`]: runs a program on the CPU, one match over [`Op`].

use std::sync::Arc;

use super::conv::Conv;
use super::depthwise::{self, Depthwise};
use super::gemm::Matmul;
use super::norm;
use super::products::Products;
use super::unpool::{OutputGrad, Unpool};
use super::{Ctx, Epilogue, elementwise, pool, reduce, softmax};
use crate::device::{DeviceError, Done, Executable, Feeds, Slab};
use crate::graph::{Op, Place, Program, Step, View, Window};
use crate::tensor::Shape;
use crate::util::trace::Trace;

/// A program with its memory and threads.
pub(super) struct Interpreter {
    program: Program,
    arena: Slab,
    scratch: Slab,
    ctx: Ctx,
    products: Products,
    pool: Option<Arc<rayon::ThreadPool>>,
    device: String,
    /// Where operations are drawn, and in which lane.
    trace: Option<(Arc<Trace>, String)>,
}

impl Interpreter {
    pub(super) fn new(
        program: Program,
        ctx: Ctx,
        products: Products,
        pool: Option<Arc<rayon::ThreadPool>>,
        device: String,
    ) -> Result<Self, DeviceError> {
        for step in &program.steps {
            let inside = |view: &View| {
                let len = match view.place {
                    Place::Feed(i) => program.feeds.get(i).map_or(0, Shape::elements),
                    Place::Variables | Place::Gradients => program.table.slab_len(),
                    Place::Arena => program.arena,
                };
                view.offset + view.len <= len
            };
            let apart = |(view, _): &(View, Shape)| {
                view.place != step.output.place
                    || view.offset + view.len <= step.output.offset
                    || step.output.offset + step.output.len <= view.offset
            };
            let writable = matches!(step.output.place, Place::Arena | Place::Gradients);
            let noted = step.winners.is_none_or(|winners| {
                let away = |view: &View| {
                    view.place != Place::Arena
                        || view.offset + view.len <= winners.offset
                        || winners.offset + winners.len <= view.offset
                };
                winners.place == Place::Arena
                    && inside(&winners)
                    && away(&step.output)
                    && step.inputs.iter().all(|(view, _)| away(view))
            });
            let fits = noted
                && writable
                && inside(&step.output)
                && step.output.len == step.shape.elements();
            if !(fits && step.inputs.iter().all(|i| inside(&i.0) && apart(i))) {
                let reason = format!("step {} has views that overlap or lie outside", step.name);
                return Err(DeviceError::Mismatch { device, reason });
            }
        }
        let needs = program.steps.iter().map(|step| scratch_len(ctx, products, step));
        let scratch = needs.max().unwrap_or(0);
        let memory = |len| {
            let bytes = len * size_of::<f32>();
            Slab::host(len).ok_or(DeviceError::OutOfMemory { device: device.clone(), bytes })
        };
        let (arena, scratch) = (memory(program.arena)?, memory(scratch)?);
        Ok(Self { program, arena, scratch, ctx, products, pool, device, trace: None })
    }

    fn mismatch(&self, reason: String) -> DeviceError {
        DeviceError::Mismatch { device: self.device.clone(), reason }
    }
}

impl Executable for Interpreter {
    fn run(
        &mut self,
        variables: &Slab,
        feeds: Feeds<'_>,
        gradients: Option<&mut Slab>,
        done: Done<'_>,
    ) -> Result<(), DeviceError> {
        let (expected, feeds) = (&self.program.feeds, feeds.now);
        let fed = feeds.len() == expected.len()
            && feeds.iter().zip(expected).all(|(feed, shape)| feed.len() == shape.elements());
        if !fed {
            let lengths: Vec<usize> = feeds.iter().map(|feed| feed.len()).collect();
            return Err(self.mismatch(format!("feeds of {lengths:?} floats for {expected:?}")));
        }
        let len = self.program.table.slab_len();
        let variables = variables.as_host().filter(|slab| slab.len() == len);
        let Some(variables) = variables else {
            return Err(self.mismatch(format!("the variables are no host slab of {len} floats")));
        };
        let gradients = match gradients {
            Some(slab) => slab.as_host_mut().filter(|slab| slab.len() == len),
            None if self.program.steps.iter().any(|s| s.output.place == Place::Gradients) => None,
            None => Some(&mut [][..]),
        };
        let Some(gradients) = gradients else {
            return Err(self.mismatch(format!("the gradients are no host slab of {len} floats")));
        };
        let (Some(arena), Some(scratch)) = (self.arena.as_host_mut(), self.scratch.as_host_mut())
        else {
            return Err(self.mismatch("its memory is not on the host".to_owned()));
        };
        let mut memory =
            Memory { feeds, variables, gradients: Raw::of(gradients), arena: Raw::of(arena) };
        let (ctx, products) = (self.ctx, self.products);
        let (steps, trace) = (&self.program.steps, &self.trace);
        let mut all = || {
            for step in steps {
                let start = trace.as_ref().and_then(|(trace, _)| trace.start());
                execute(ctx, products, step, &mut memory, scratch);
                if let Some((trace, lane)) = trace {
                    trace.span(start, lane, || step.name.clone());
                }
                // Each row is the output of one step.
                let View { place, offset, len } = step.output;
                if place == Place::Gradients {
                    done(offset..offset + len, memory.get(step.output));
                }
            }
        };
        match &self.pool {
            Some(pool) => pool.install(all),
            None => all(),
        }
        Ok(())
    }

    fn fetch(&self, index: usize, into: &mut [f32]) -> Result<(), DeviceError> {
        let fetch = self.program.fetches.get(index);
        let values = fetch.filter(|f| f.view.place == Place::Arena && f.view.len == into.len());
        match (values, self.arena.as_host()) {
            (Some(fetch), Some(arena)) => {
                into.copy_from_slice(&arena[fetch.view.offset..][..fetch.view.len]);
                Ok(())
            }
            _ => Err(self.mismatch(format!("no fetch {index} of {} floats", into.len()))),
        }
    }

    fn trace(&mut self, trace: Arc<Trace>, lane: &str) {
        self.trace = Some((trace, lane.to_owned()));
    }

    fn program(&self) -> &Program {
        &self.program
    }
}

/// The memories of a run; what steps write is behind raw pointers, since a step reads and writes the same one.
struct Memory<'a> {
    feeds: &'a [&'a [f32]],
    variables: &'a [f32],
    gradients: Raw,
    arena: Raw,
}

/// A slice that is borrowed piecewise.
struct Raw {
    start: *mut f32,
    len: usize,
}

// SAFETY: `Raw` stands for an exclusive borrow of a slice, which may go to another thread.
unsafe impl Send for Raw {}

impl Raw {
    fn of(slice: &mut [f32]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len() }
    }

    fn get(&self, view: View) -> &[f32] {
        assert!(view.offset + view.len <= self.len);
        // SAFETY: inside the slice; `Interpreter::new` has checked that the step's output, the only exclusive borrow
        // alive, does not overlap.
        unsafe { std::slice::from_raw_parts(self.start.add(view.offset), view.len) }
    }
}

impl Memory<'_> {
    fn get(&self, view: View) -> &[f32] {
        match view.place {
            Place::Feed(i) => &self.feeds[i][view.offset..][..view.len],
            Place::Variables => &self.variables[view.offset..][..view.len],
            Place::Gradients => self.gradients.get(view),
            Place::Arena => self.arena.get(view),
        }
    }

    /// The operands and the output of a step.
    fn split(&mut self, step: &Step) -> ([&[f32]; 5], &mut [f32], &mut [f32]) {
        let view = step.output;
        let raw = if view.place == Place::Gradients { &self.gradients } else { &self.arena };
        assert!(view.offset + view.len <= raw.len);
        // SAFETY: inside the slice, and `Interpreter::new` has checked that it overlaps no operand of this step; both
        // borrows end with this step, as they borrow `self` exclusively.
        let out = unsafe { std::slice::from_raw_parts_mut(raw.start.add(view.offset), view.len) };
        let winners = match step.winners {
            // SAFETY: as above: inside the arena, and apart from the operands and the output.
            Some(view) => unsafe {
                assert!(view.offset + view.len <= self.arena.len);
                std::slice::from_raw_parts_mut(self.arena.start.add(view.offset), view.len)
            },
            None => &mut [][..],
        };
        let mut operands: [&[f32]; 5] = [&[]; 5];
        for (operand, (view, _)) in operands.iter_mut().zip(&step.inputs) {
            *operand = self.get(*view);
        }
        (operands, out, winners)
    }
}

fn conv(window: &Window, x: &Shape, y: &Shape) -> Conv {
    let (n, in_channels, out_channels) = (x[0], x[3], y[3]);
    Conv { n, in_channels, out_channels, window: *window }
}

fn depthwise(window: &Window, x: &Shape, y: &Shape) -> Depthwise {
    Depthwise { n: x[0], channels: x[3], multiplier: y[3] / x[3], window: *window }
}

fn product(a: &Shape, out: &Shape, trans_a: bool, trans_b: bool) -> Matmul {
    let k = if trans_a { a[0] } else { a[1] };
    Matmul { m: out[0], k, n: out[1], trans_a, trans_b }
}

fn unpool<'a>(
    window: &'a Window,
    of: &Shape,
    winners: &'a [f32],
    y: &'a [f32],
    dy: &'a [f32],
) -> Unpool<'a> {
    Unpool { window, channels: of.last_dim(), y, dy, winners }
}

/// The shapes of `x` and `y` of a sliding-window step, wherever they stand among its operands.
fn ends(step: &Step) -> (&Shape, &Shape) {
    match step.op {
        Op::Conv2dInputGrad(_) | Op::DepthwiseConv2dInputGrad(_) => {
            (&step.shape, &step.inputs[0].1)
        }
        Op::Conv2dFilterGrad(_)
        | Op::Conv2dPoolFilterGrad { .. }
        | Op::DepthwiseConv2dFilterGrad(_) => (&step.inputs[0].1, &step.inputs[1].1),
        _ => (&step.inputs[0].1, &step.shape),
    }
}

/// Floats of scratch that a step needs.
fn scratch_len(ctx: Ctx, products: Products, step: &Step) -> usize {
    let (x, y) = match step.inputs.is_empty() {
        true => return 0,
        false => ends(step),
    };
    let channels = x.last_dim();
    match &step.op {
        Op::Conv2d(w) | Op::Conv2dBias { window: w, .. } => {
            products.forward_scratch(ctx, &conv(w, x, y))
        }
        Op::Conv2dInputGrad(w) => products.input_grad_scratch(ctx, &conv(w, x, y)),
        Op::Conv2dFilterGrad(w) => {
            products.filter_grad_scratch(ctx, &conv(w, x, y), &OutputGrad::Dense(&[]))
        }
        Op::Conv2dPoolFilterGrad { window, pool } => {
            let dy = OutputGrad::Pooled(unpool(pool, y, &[], &[], &[]));
            products.filter_grad_scratch(ctx, &conv(window, x, y), &dy)
        }
        Op::Conv2dPool { window, pool } => {
            products.forward_pool_scratch(ctx, &conv(window, x, y), pool)
        }
        Op::LrnPool { pool, .. } => norm::lrn_pool_scratch(ctx, pool, x[0], channels),
        Op::LrnPoolGrad { pool, .. } => {
            norm::lrn_pool_grad_scratch(ctx, x[0], &unpool(pool, x, &[], &[], &[]))
        }
        Op::DepthwiseConv2dFilterGrad(w) => depthwise::filter_grad_scratch(&depthwise(w, x, y)),
        &Op::MatMul { transpose_a, transpose_b } => {
            products.matmul_scratch(ctx, &product(x, y, transpose_a, transpose_b))
        }
        Op::MatMulBias { .. } => products.matmul_scratch(ctx, &product(x, y, false, false)),
        Op::BiasAddGrad | Op::BiasReluGrad => reduce::column_sums_scratch(channels),
        Op::Moments
        | Op::BatchNorm { .. }
        | Op::BatchNormSums { .. }
        | Op::BatchNormInputGrad { .. } => norm::batch_norm_scratch(channels),
        _ => 0,
    }
}

fn execute(
    ctx: Ctx,
    products: Products,
    step: &Step,
    memory: &mut Memory<'_>,
    scratch: &mut [f32],
) {
    let ([a, b, c, d, e], out, winners) = memory.split(step);
    let shape = |i: usize| &step.inputs[i].1;
    match &step.op {
        Op::Placeholder(_) | Op::Variable { .. } | Op::Reshape(_) => {
            unreachable!("lowering makes views of these")
        }
        Op::Fill(value, _) => elementwise::fill(ctx, *value, out),
        &Op::MatMul { transpose_a, transpose_b } => {
            let p = product(shape(0), &step.shape, transpose_a, transpose_b);
            products.matmul(ctx, &p, a, b, Epilogue::None, out, scratch);
        }
        Op::MatMulBias { relu } => {
            let p = product(shape(0), &step.shape, false, false);
            products.matmul(ctx, &p, a, b, epilogue(c, *relu), out, scratch);
        }
        Op::Conv2d(w) => {
            let conv = conv(w, shape(0), &step.shape);
            products.forward(ctx, &conv, a, b, Epilogue::None, out, scratch);
        }
        Op::Conv2dBias { window, relu } => {
            let conv = conv(window, shape(0), &step.shape);
            products.forward(ctx, &conv, a, b, epilogue(c, *relu), out, scratch);
        }
        Op::Conv2dInputGrad(w) => {
            let (x, y) = ends(step);
            products.input_grad(ctx, &conv(w, x, y), a, b, out, scratch);
        }
        Op::Conv2dFilterGrad(w) => {
            let (x, y) = ends(step);
            let dy = OutputGrad::Dense(b);
            products.filter_grad(ctx, &conv(w, x, y), a, dy, out, scratch);
        }
        Op::Conv2dPool { window, pool } => {
            let conv = conv(window, shape(0), &step.shape);
            products.forward_pool(ctx, &conv, pool, a, b, c, out, winners, scratch);
        }
        Op::Conv2dPoolFilterGrad { window, pool } => {
            let (x, y) = ends(step);
            let dy = OutputGrad::Pooled(unpool(pool, y, b, c, d));
            products.filter_grad(ctx, &conv(window, x, y), a, dy, out, scratch);
        }
        Op::DepthwiseConv2d(w) => {
            let (x, y) = ends(step);
            depthwise::forward(ctx, &depthwise(w, x, y), a, b, out);
        }
        Op::DepthwiseConv2dInputGrad(w) => {
            let (x, y) = ends(step);
            depthwise::input_grad(ctx, &depthwise(w, x, y), a, b, out);
        }
        Op::DepthwiseConv2dFilterGrad(w) => {
            let (x, y) = ends(step);
            depthwise::filter_grad(ctx, &depthwise(w, x, y), a, b, out, scratch);
        }
        Op::MaxPool(w) => pool::max_pool(ctx, w, shape(0)[0], shape(0)[3], a, out),
        Op::MaxPoolGrad(w) | Op::MaxPoolReluGrad(w) => {
            let relu = matches!(step.op, Op::MaxPoolReluGrad(_));
            pool::max_pool_grad(ctx, w, shape(0)[0], shape(0)[3], relu, a, b, c, out);
        }
        Op::AvgPool(w) => pool::avg_pool(ctx, w, shape(0)[0], shape(0)[3], a, out),
        Op::AvgPoolGrad(w) => pool::avg_pool_grad(ctx, w, shape(0)[0], shape(0)[3], a, out),
        Op::Lrn(p) => norm::lrn(ctx, p, shape(0).last_dim(), a, out),
        Op::LrnGrad(p) | Op::LrnReluGrad(p) => {
            let relu = matches!(step.op, Op::LrnReluGrad(_));
            norm::lrn_grad(ctx, p, shape(0).last_dim(), relu, a, b, out);
        }
        Op::LrnPool { lrn, pool } => {
            norm::lrn_pool(ctx, lrn, pool, shape(0).last_dim(), a, out, winners, scratch);
        }
        Op::LrnPoolGrad { lrn, pool } => {
            let dy = unpool(pool, shape(0), b, c, d);
            norm::lrn_pool_grad(ctx, lrn, a, dy, out, scratch);
        }
        Op::Moments => norm::moments(ctx, a, out, scratch),
        &Op::BatchNorm { epsilon } => norm::batch_norm(ctx, epsilon, a, b, c, d, out, scratch),
        &Op::BatchNormSums { epsilon } => {
            norm::batch_norm_sums(ctx, epsilon, a, b, c, out, scratch);
        }
        &Op::BatchNormInputGrad { epsilon } => {
            norm::batch_norm_input_grad(ctx, epsilon, a, b, c, d, e, out, scratch);
        }
        Op::BiasAdd => elementwise::bias_add(ctx, a, b, out),
        Op::BiasAddGrad => reduce::column_sums(ctx, shape(0).last_dim(), a, out, scratch),
        Op::BiasReluGrad => {
            reduce::positive_column_sums(ctx, shape(0).last_dim(), a, b, out, scratch);
        }
        Op::Relu => elementwise::relu(ctx, a, out),
        Op::ReluGrad => elementwise::relu_grad(ctx, a, b, out),
        Op::SoftmaxCrossEntropy => softmax::cross_entropy(ctx, shape(0)[1], a, b, out),
        Op::SoftmaxCrossEntropyGrad => {
            softmax::cross_entropy_grad(ctx, shape(1)[1], a, b, c, out);
        }
        Op::Add => elementwise::add(ctx, a, b, out),
        Op::Sub => elementwise::sub(ctx, a, b, out),
        Op::Mul if b.len() == 1 => elementwise::scale(ctx, b[0], a, out),
        Op::Mul => elementwise::mul(ctx, a, b, out),
        Op::Scale(factor) => elementwise::scale(ctx, *factor, a, out),
        Op::Square => elementwise::square(ctx, a, out),
        Op::L2Loss => out[0] = 0.5 * reduce::sum_squares(ctx, a),
        Op::Mean => out[0] = reduce::sum(ctx, a) / a.len() as f32,
        Op::Sum => out[0] = reduce::sum(ctx, a),
        Op::Broadcast(_) => elementwise::fill(ctx, a[0], out),
        Op::Concat => {
            let (left, right) = (shape(0).last_dim(), shape(1).last_dim());
            let rows = out.chunks_exact_mut((left + right).max(1));
            for (i, row) in rows.enumerate() {
                row[..left].copy_from_slice(&a[i * left..][..left]);
                row[left..].copy_from_slice(&b[i * right..][..right]);
            }
        }
        Op::Slice { start, len } => {
            let width = shape(0).last_dim();
            for (i, row) in out.chunks_exact_mut((*len).max(1)).enumerate() {
                row.copy_from_slice(&a[i * width + start..][..*len]);
            }
        }
        Op::AddScaled(factor) => elementwise::sum_scaled(ctx, a, *factor, b, out),
    }
}

fn epilogue(bias: &[f32], relu: bool) -> Epilogue<'_> {
    if relu { Epilogue::BiasRelu(bias) } else { Epilogue::Bias(bias) }
}
