//! Convolutions, pools and normalisation of pictures, by the trainer's kernels.

use super::broadcast::{extents, text};
use super::nn::channels_last;
use super::{Kernel, OpDef, context};
use crate::device::cpu::conv::{self, Conv};
use crate::device::cpu::norm::{self, MAX_RADIUS};
use crate::device::cpu::unpool::OutputGrad;
use crate::device::cpu::{Ctx, Epilogue, pool};
use crate::graph::{LrnParams, Padding, Window};
use crate::session::{DType, Node, OpError, Tensor, tensor_elements};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Conv2D", conv2d),
    OpDef::new("Conv2DBackpropInput", conv2d_input_grad),
    OpDef::new("Conv2DBackpropFilter", conv2d_filter_grad),
    OpDef::new("MaxPool", |node| pool_forward(node, pool::max_pool)),
    OpDef::new("MaxPoolGrad", max_pool_grad),
    OpDef::new("AvgPool", |node| pool_forward(node, pool::avg_pool)),
    OpDef::new("AvgPoolGrad", avg_pool_grad),
    OpDef::new("LRN", lrn),
    OpDef::new("LRNGrad", lrn_grad),
];

/// How windows slide, as attributes say it.
#[derive(Clone, Copy)]
pub(super) struct Slide {
    stride: [usize; 2],
    padding: Padding,
}

/// Height and width of an attribute of four numbers; batch and channels must have 1.
pub(super) fn pair(node: &Node<'_>, name: &str) -> Result<[usize; 2], OpError> {
    let inside = |n: i64| usize::try_from(n).ok().filter(|n| (1..1 << 30).contains(n));
    match node.ints(name)? {
        [] if name == "dilations" => Ok([1, 1]),
        &[1, h, w, 1] => match (inside(h), inside(w)) {
            (Some(h), Some(w)) => Ok([h, w]),
            _ => Err(node.wrong(name)),
        },
        _ => Err(OpError::unimplemented(format!(
            "{name} must be [1, height, width, 1]: batch and channels are not strided here"
        ))),
    }
}

impl Slide {
    pub(super) fn of(node: &Node<'_>) -> Result<Self, OpError> {
        channels_last(node)?;
        if pair(node, "dilations")? != [1, 1] {
            return Err(OpError::unimplemented("dilated convolutions are not supported"));
        }
        let padding = match node.text("padding")? {
            "SAME" => Padding::Same,
            "VALID" => Padding::Valid,
            other => {
                return Err(OpError::unimplemented(format!(
                    "padding {other} is not supported: use SAME or VALID"
                )));
            }
        };
        Ok(Self { stride: pair(node, "strides")?, padding })
    }

    fn window(&self, input: [usize; 2], kernel: [usize; 2]) -> Result<Window, OpError> {
        Window::new(input, kernel, self.stride, self.padding).ok_or_else(|| {
            OpError::invalid(format!(
                "Computed output size would be negative: a window of {kernel:?} does not fit a picture of {input:?}"
            ))
        })
    }

    /// The convolution of pictures by a filter of these shapes.
    pub(super) fn conv(&self, input: &[usize], filter: &[usize]) -> Result<Conv, OpError> {
        let (&[n, h, w, c], &[kh, kw, own, out]) = (input, filter) else {
            return Err(OpError::invalid(format!(
                "input and filter must be 4-dimensional: {} and {}",
                text(input),
                text(filter)
            )));
        };
        if c != own || c == 0 || out == 0 {
            return Err(OpError::invalid(format!(
                "input depth must be evenly divisible by filter depth: {c} vs {own}"
            )));
        }
        let window = self.window([h, w], [kh, kw])?;
        Ok(Conv { n, in_channels: c, out_channels: out, window })
    }
}

pub(super) fn four(tensor: &Tensor) -> Result<[usize; 4], OpError> {
    match **tensor.shape() {
        [n, h, w, c] if c > 0 => Ok([n, h, w, c]),
        _ => Err(OpError::invalid(format!(
            "tensor_in must be 4-dimensional, got {}",
            text(tensor.shape())
        ))),
    }
}

fn result(conv: &Conv) -> [usize; 4] {
    let [h, w] = conv.window.output;
    [conv.n, h, w, conv.out_channels]
}

/// Zeros to be filled.
fn zeros(shape: &[usize]) -> Result<Vec<f32>, OpError> {
    Ok(vec![0.0; tensor_elements(DType::F32, shape)?])
}

fn same(what: &str, wanted: &[usize], found: &[usize]) -> Result<(), OpError> {
    if wanted == found {
        return Ok(());
    }
    let (wanted, found) = (text(wanted), text(found));
    Err(OpError::invalid(format!("{what} must be of shape {wanted}, got {found}")))
}

fn conv2d(node: &Node<'_>) -> Result<Kernel, OpError> {
    let slide = Slide::of(node)?;
    Ok(Kernel::new(move |call| {
        let (x, filter) = (call.tensor(0)?, call.tensor(1)?);
        let conv = slide.conv(x.shape(), filter.shape())?;
        let mut y = zeros(&result(&conv))?;
        if !y.is_empty() {
            let ctx = context();
            let mut scratch = vec![0.0; conv::forward_scratch(ctx, &conv)];
            let (x, filter) = (x.slice()?, filter.slice()?);
            conv::forward(ctx, &conv, x, filter, Epilogue::None, &mut y, &mut scratch);
        }
        call.set(0, Tensor::new(result(&conv), y)?);
        Ok(())
    }))
}

fn conv2d_input_grad(node: &Node<'_>) -> Result<Kernel, OpError> {
    let slide = Slide::of(node)?;
    Ok(Kernel::new(move |call| {
        let (shape, filter, dy) = (extents(&call.tensor(0)?)?, call.tensor(1)?, call.tensor(2)?);
        let conv = slide.conv(&shape, filter.shape())?;
        same("out_backprop", &result(&conv), dy.shape())?;
        let mut dx = zeros(&shape)?;
        if conv.n > 0 {
            let ctx = context();
            let mut scratch = vec![0.0; conv::input_grad_scratch(ctx, &conv)];
            conv::input_grad(ctx, &conv, dy.slice()?, filter.slice()?, &mut dx, &mut scratch);
        }
        call.set(0, Tensor::new(shape, dx)?);
        Ok(())
    }))
}

fn conv2d_filter_grad(node: &Node<'_>) -> Result<Kernel, OpError> {
    let slide = Slide::of(node)?;
    Ok(Kernel::new(move |call| {
        let (x, shape, dy) = (call.tensor(0)?, extents(&call.tensor(1)?)?, call.tensor(2)?);
        let conv = slide.conv(x.shape(), &shape)?;
        same("out_backprop", &result(&conv), dy.shape())?;
        let mut dw = zeros(&shape)?;
        if conv.n > 0 {
            let ctx = context();
            let dy = OutputGrad::Dense(dy.slice()?);
            let mut scratch = vec![0.0; conv::filter_grad_scratch(ctx, &conv, &dy)];
            conv::filter_grad(ctx, &conv, x.slice()?, dy, &mut dw, &mut scratch);
        }
        call.set(0, Tensor::new(shape, dw)?);
        Ok(())
    }))
}

/// A pool's windows over pictures of this shape, and the shape of the result.
pub(super) fn pooled(
    slide: Slide,
    kernel: [usize; 2],
    shape: [usize; 4],
) -> Result<(Window, [usize; 4]), OpError> {
    let [n, h, w, c] = shape;
    let window = slide.window([h, w], kernel)?;
    let [h, w] = window.output;
    Ok((window, [n, h, w, c]))
}

/// A pool by one of the device's kernels.
fn pool_forward(
    node: &Node<'_>,
    kernel_of_device: fn(Ctx, &Window, usize, usize, &[f32], &mut [f32]),
) -> Result<Kernel, OpError> {
    let (slide, kernel) = (Slide::of(node)?, pair(node, "ksize")?);
    Ok(Kernel::new(move |call| {
        let x = call.tensor(0)?;
        let (window, to) = pooled(slide, kernel, four(&x)?)?;
        let mut y = zeros(&to)?;
        if !y.is_empty() {
            kernel_of_device(context(), &window, to[0], to[3], x.slice()?, &mut y);
        }
        call.set(0, Tensor::new(to, y)?);
        Ok(())
    }))
}

fn max_pool_grad(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (slide, kernel) = (Slide::of(node)?, pair(node, "ksize")?);
    Ok(Kernel::new(move |call| {
        let (x, y, dy) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?);
        let (window, to) = pooled(slide, kernel, four(&x)?)?;
        same("orig_output", &to, y.shape())?;
        same("grad", &to, dy.shape())?;
        let mut dx = zeros(x.shape())?;
        if to[0] > 0 {
            let operands = (x.slice()?, y.slice()?, dy.slice()?);
            let (x, y, dy) = operands;
            pool::max_pool_grad(context(), &window, to[0], to[3], false, x, y, dy, &mut dx);
        }
        call.set(0, Tensor::new(x.shape().clone(), dx)?);
        Ok(())
    }))
}

fn avg_pool_grad(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (slide, kernel) = (Slide::of(node)?, pair(node, "ksize")?);
    Ok(Kernel::new(move |call| {
        let (shape, dy) = (extents(&call.tensor(0)?)?, call.tensor(1)?);
        let [n, h, w, c] = shape[..] else {
            return Err(OpError::invalid("orig_input_shape must have four elements"));
        };
        if c == 0 {
            return Err(OpError::invalid("pictures without channels"));
        }
        let (window, to) = pooled(slide, kernel, [n, h, w, c])?;
        same("grad", &to, dy.shape())?;
        let mut dx = zeros(&shape)?;
        if n > 0 {
            pool::avg_pool_grad(context(), &window, n, c, dy.slice()?, &mut dx);
        }
        call.set(0, Tensor::new(shape, dx)?);
        Ok(())
    }))
}

pub(super) fn lrn_params(node: &Node<'_>) -> Result<LrnParams, OpError> {
    let radius =
        usize::try_from(node.int("depth_radius", 5)?).map_err(|_| node.wrong("depth_radius"))?;
    let (bias, alpha) = (node.float("bias", 1.0)?, node.float("alpha", 1.0)?);
    Ok(LrnParams { radius, bias, alpha, beta: node.float("beta", 0.5)? })
}

/// The channels of pictures that fit the kernel.
pub(super) fn lrn_channels(params: &LrnParams, shape: [usize; 4]) -> Result<usize, OpError> {
    match params.radius.min(shape[3]) {
        reach if reach > MAX_RADIUS => Err(OpError::unimplemented(format!(
            "depth_radius {} reaches further than {MAX_RADIUS} channels",
            params.radius
        ))),
        _ => Ok(shape[3]),
    }
}

fn lrn(node: &Node<'_>) -> Result<Kernel, OpError> {
    let params = lrn_params(node)?;
    Ok(Kernel::new(move |call| {
        let x = call.tensor(0)?;
        let channels = lrn_channels(&params, four(&x)?)?;
        let mut y = zeros(x.shape())?;
        if !y.is_empty() {
            norm::lrn(context(), &params, channels, x.slice()?, &mut y);
        }
        call.set(0, Tensor::new(x.shape().clone(), y)?);
        Ok(())
    }))
}

fn lrn_grad(node: &Node<'_>) -> Result<Kernel, OpError> {
    let params = lrn_params(node)?;
    Ok(Kernel::new(move |call| {
        let (dy, x) = (call.tensor(0)?, call.tensor(1)?);
        let channels = lrn_channels(&params, four(&x)?)?;
        same("input_grads", x.shape(), dy.shape())?;
        let mut dx = zeros(x.shape())?;
        if !dx.is_empty() {
            norm::lrn_grad(context(), &params, channels, false, x.slice()?, dy.slice()?, &mut dx);
        }
        call.set(0, Tensor::new(x.shape().clone(), dx)?);
        Ok(())
    }))
}
