//! Convolutions by cuDNN, where it is there and knows the padding.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::cudnn::result::{self, CudnnError};
use cudarc::cudnn::sys::{self, cudnnStatus_t};

use super::Precision;
use super::driver::{Driver, Ptr};
use crate::device::DeviceError;
use crate::graph::Window;

/// Bytes of scratch memory that a convolution may use at most.
const WORKSPACE: usize = 256 << 20;

/// The library on one GPU.
pub(super) struct Dnn {
    driver: Arc<Driver>,
    handle: sys::cudnnHandle_t,
    math: sys::cudnnMathType_t,
}

// SAFETY: handles of the library may go to another thread.
unsafe impl Send for Dnn {}
// SAFETY: the handle is used by one tower at a time, whose device this belongs to.
unsafe impl Sync for Dnn {}

impl Dnn {
    pub(super) fn open(driver: Arc<Driver>, precision: Precision) -> Result<Self, DeviceError> {
        driver.bind()?;
        let handle = result::create_handle().map_err(|e| failure(&driver, "opening cuDNN", e))?;
        let math = match precision {
            // The default may round to TF32.
            Precision::F32 | Precision::Bf16 => sys::cudnnMathType_t::CUDNN_FMA_MATH,
            Precision::Tf32 => sys::cudnnMathType_t::CUDNN_DEFAULT_MATH,
        };
        let dnn = Self { driver, handle, math };
        // SAFETY: both are alive; the stream outlives the handle, as `dnn` holds the driver.
        let set = unsafe { result::set_stream(handle, dnn.driver.stream().cast()) };
        set.map_err(|e| failure(&dnn.driver, "opening cuDNN", e))?;
        Ok(dnn)
    }
}

impl Drop for Dnn {
    fn drop(&mut self) {
        let _ = self.driver.bind();
        // SAFETY: made in `open`; convolutions hold this.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Which of the three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `[x, filter] -> y`; with a bias, and cut at zero, where asked.
    Forward { bias: bool, relu: bool },
    /// `[dy, filter] -> dx`.
    InputGrad,
    /// `[x, dy] -> filter gradient`.
    FilterGrad,
}

/// Pictures, channels of the input and of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Channels {
    pub(super) pictures: usize,
    pub(super) input: usize,
    pub(super) output: usize,
}

/// The algorithm of a convolution.
#[derive(Clone, Copy)]
enum Algorithm {
    Forward(sys::cudnnConvolutionFwdAlgo_t),
    InputGrad(sys::cudnnConvolutionBwdDataAlgo_t),
    FilterGrad(sys::cudnnConvolutionBwdFilterAlgo_t),
}

/// A convolution whose algorithm is chosen. Filters are `[out][height][width][in]`, unlike everywhere else in this program.
pub(super) struct Convolution {
    dnn: Arc<Dnn>,
    kind: Kind,
    x: sys::cudnnTensorDescriptor_t,
    y: sys::cudnnTensorDescriptor_t,
    bias: sys::cudnnTensorDescriptor_t,
    filter: sys::cudnnFilterDescriptor_t,
    conv: sys::cudnnConvolutionDescriptor_t,
    activation: sys::cudnnActivationDescriptor_t,
    algorithm: Algorithm,
    workspace: usize,
}

// SAFETY: handles with one owner.
unsafe impl Send for Convolution {}

impl Convolution {
    /// Chooses the fastest algorithm that gives the same bits on every run. `None` where there is none, or where the zeros below and right
    /// of a picture are more than those above and left, which cuDNN cannot say.
    pub(super) fn new(
        dnn: Arc<Dnn>,
        kind: Kind,
        window: &Window,
        channels: Channels,
    ) -> Result<Option<Self>, DeviceError> {
        if !(0..2).all(|d| is_symmetric(window, d)) {
            return Ok(None);
        }
        let driver = dnn.driver.clone();
        driver.bind()?;
        let made = Self::make(dnn, kind, window, channels).and_then(|mut made| {
            let chosen = made.choose()?;
            Ok(chosen.map(|(algorithm, workspace)| {
                (made.algorithm, made.workspace) = (algorithm, workspace);
                made
            }))
        });
        match made {
            Err(CudnnError(cudnnStatus_t::CUDNN_STATUS_NOT_SUPPORTED)) => Ok(None),
            made => made.map_err(|e| {
                failure(&driver, &format!("choosing a convolution for {window:?}"), e)
            }),
        }
    }

    fn make(
        dnn: Arc<Dnn>,
        kind: Kind,
        window: &Window,
        channels: Channels,
    ) -> Result<Self, CudnnError> {
        let float = sys::cudnnDataType_t::CUDNN_DATA_FLOAT;
        let nhwc = sys::cudnnTensorFormat_t::CUDNN_TENSOR_NHWC;
        let int = |n: usize| n as c_int;
        let algorithm = sys::cudnnConvolutionFwdAlgo_t::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM;
        let mut made = Self {
            x: null_mut(),
            y: null_mut(),
            bias: null_mut(),
            filter: null_mut(),
            conv: null_mut(),
            activation: null_mut(),
            algorithm: Algorithm::Forward(algorithm),
            workspace: 0,
            kind,
            dnn,
        };
        let Channels { pictures, input, output } = channels;
        let tensor = |c, [h, w]: [usize; 2]| [int(pictures), int(c), int(h), int(w)];
        // SAFETY: each description is set up right after it was made; dropping `made` frees those that are there.
        unsafe {
            made.x = result::create_tensor_descriptor()?;
            result::set_tensor4d_descriptor(made.x, nhwc, float, tensor(input, window.input))?;
            made.y = result::create_tensor_descriptor()?;
            result::set_tensor4d_descriptor(made.y, nhwc, float, tensor(output, window.output))?;
            made.bias = result::create_tensor_descriptor()?;
            result::set_tensor4d_descriptor(made.bias, nhwc, float, [1, int(output), 1, 1])?;
            made.filter = result::create_filter_descriptor()?;
            let [height, width] = window.kernel.map(int);
            let extents = [int(output), int(input), height, width];
            result::set_filter4d_descriptor(made.filter, float, nhwc, extents)?;
            made.conv = result::create_convolution_descriptor()?;
            let cross = sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION;
            let ([pad_h, pad_w], [stride_h, stride_w]) =
                (window.pad.map(int), window.stride.map(int));
            result::set_convolution2d_descriptor(
                made.conv, pad_h, pad_w, stride_h, stride_w, 1, 1, cross, float,
            )?;
            result::set_convolution_math_type(made.conv, made.dnn.math)?;
            if let Kind::Forward { bias: true, relu } = kind {
                sys::cudnnCreateActivationDescriptor(&mut made.activation).result()?;
                let mode = match relu {
                    true => sys::cudnnActivationMode_t::CUDNN_ACTIVATION_RELU,
                    false => sys::cudnnActivationMode_t::CUDNN_ACTIVATION_IDENTITY,
                };
                let nan = sys::cudnnNanPropagation_t::CUDNN_PROPAGATE_NAN;
                sys::cudnnSetActivationDescriptor(made.activation, mode, nan, 0.0).result()?;
            }
        }
        Ok(made)
    }

    /// The first algorithm in cuDNN's order, the fastest first, that will do, and its scratch memory.
    fn choose(&self) -> Result<Option<(Algorithm, usize)>, CudnnError> {
        /// Asks for the list of one kind.
        macro_rules! ask {
            ($ask:path, $perf:ty, $algorithm:path, [$($operand:expr),*], $fits:expr) => {{
                let mut list = Vec::<$perf>::with_capacity(16);
                let mut count: c_int = 0;
                // SAFETY: the descriptions are alive; `count` of the list's 16 places are written.
                unsafe {
                    $ask(self.dnn.handle, $($operand,)* 16, &mut count, list.as_mut_ptr())?;
                    list.set_len(count.clamp(0, 16) as usize);
                }
                let deterministic = sys::cudnnDeterminism_t::CUDNN_DETERMINISTIC;
                let works = |p: &&$perf| {
                    p.status == cudnnStatus_t::CUDNN_STATUS_SUCCESS
                        && p.determinism == deterministic
                        && p.memory <= WORKSPACE
                        && $fits(p)
                };
                Ok(list.iter().find(works).map(|p| ($algorithm(p.algo), p.memory)))
            }};
        }
        match self.kind {
            Kind::Forward { bias, relu } => {
                // Without a relu, bias and convolution go together in this algorithm only.
                let only = sys::cudnnConvolutionFwdAlgo_t::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM;
                ask!(
                    result::get_convolution_forward_algorithm,
                    sys::cudnnConvolutionFwdAlgoPerf_t,
                    Algorithm::Forward,
                    [self.x, self.filter, self.conv, self.y],
                    |p: &sys::cudnnConvolutionFwdAlgoPerf_t| !bias || relu || p.algo == only
                )
            }
            Kind::InputGrad => ask!(
                result::get_convolution_backward_data_algorithm,
                sys::cudnnConvolutionBwdDataAlgoPerf_t,
                Algorithm::InputGrad,
                [self.filter, self.y, self.conv, self.x],
                |_| true
            ),
            Kind::FilterGrad => ask!(
                result::get_convolution_backward_filter_algorithm,
                sys::cudnnConvolutionBwdFilterAlgoPerf_t,
                Algorithm::FilterGrad,
                [self.x, self.y, self.conv, self.filter],
                |_| true
            ),
        }
    }

    /// Bytes of scratch memory that it needs.
    pub(super) fn workspace(&self) -> usize {
        self.workspace
    }

    /// Enqueues it; operands as [`Kind`] says, `bias` where it has one.
    pub(super) fn run(
        &self,
        [a, b, bias]: [Ptr; 3],
        out: Ptr,
        workspace: Ptr,
    ) -> Result<(), DeviceError> {
        let (one, zero) = (1f32, 0f32);
        let (one, zero) = ((&raw const one).cast(), (&raw const zero).cast());
        let (handle, conv) = (self.dnn.handle, self.conv);
        let (scratch, len) = (workspace.raw(), self.workspace);
        // SAFETY: all descriptions are alive, the operands are as long as they say (the plan checked them), and the factors are
        // read before the call returns.
        let enqueued = unsafe {
            match self.algorithm {
                Algorithm::Forward(algorithm) if bias != Ptr::NULL => {
                    result::convolution_bias_activation_forward(
                        handle,
                        one,
                        self.x,
                        a.raw(),
                        self.filter,
                        b.raw(),
                        conv,
                        algorithm,
                        scratch,
                        len,
                        zero,
                        self.y,
                        out.raw(),
                        self.bias,
                        bias.raw(),
                        self.activation,
                        self.y,
                        out.raw(),
                    )
                }
                Algorithm::Forward(algorithm) => result::convolution_forward(
                    handle,
                    one,
                    self.x,
                    a.raw(),
                    self.filter,
                    b.raw(),
                    conv,
                    algorithm,
                    scratch,
                    len,
                    zero,
                    self.y,
                    out.raw(),
                ),
                Algorithm::InputGrad(algorithm) => result::convolution_backward_data(
                    handle,
                    one,
                    self.filter,
                    b.raw(),
                    self.y,
                    a.raw(),
                    conv,
                    algorithm,
                    scratch,
                    len,
                    zero,
                    self.x,
                    out.raw(),
                ),
                Algorithm::FilterGrad(algorithm) => result::convolution_backward_filter(
                    handle,
                    one,
                    self.x,
                    a.raw(),
                    self.y,
                    b.raw(),
                    conv,
                    algorithm,
                    scratch,
                    len,
                    zero,
                    self.filter,
                    out.raw(),
                ),
            }
        };
        enqueued.map_err(|e| failure(&self.dnn.driver, "convolving", e))
    }
}

/// Whether as many zeros below and right as above and left give the same output.
fn is_symmetric(w: &Window, d: usize) -> bool {
    let padded = w.input[d] + 2 * w.pad[d];
    padded >= w.kernel[d] && (padded - w.kernel[d]) / w.stride[d] + 1 == w.output[d]
}

impl Drop for Convolution {
    fn drop(&mut self) {
        let _ = self.dnn.driver.bind();
        // SAFETY: made in `make`, given back once; those that were never made are null.
        unsafe {
            for tensor in [self.x, self.y, self.bias].into_iter().filter(|t| !t.is_null()) {
                let _ = result::destroy_tensor_descriptor(tensor);
            }
            if !self.filter.is_null() {
                let _ = result::destroy_filter_descriptor(self.filter);
            }
            if !self.conv.is_null() {
                let _ = result::destroy_convolution_descriptor(self.conv);
            }
            if !self.activation.is_null() {
                let _ = sys::cudnnDestroyActivationDescriptor(self.activation);
            }
        }
    }
}

fn failure(driver: &Driver, what: &str, error: CudnnError) -> DeviceError {
    DeviceError::Gpu {
        device: driver.name().to_owned(),
        what: what.to_owned(),
        reason: format!("cuDNN says {:?}", error.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Padding;

    #[test]
    fn knows_which_paddings_are_symmetric() {
        let symmetric = |input, kernel, stride, padding| {
            let w = Window::new([input; 2], [kernel; 2], [stride; 2], padding).unwrap();
            is_symmetric(&w, 0)
        };
        assert!(symmetric(24, 5, 1, Padding::Same));
        assert!(symmetric(11, 3, 2, Padding::Same) && symmetric(11, 5, 3, Padding::Valid));
        // One zero below and none above.
        assert!(!symmetric(24, 3, 2, Padding::Same) && !symmetric(8, 2, 1, Padding::Same));
    }
}
