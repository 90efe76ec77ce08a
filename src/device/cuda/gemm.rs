//! Matrix products by cuBLASLt.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasLtEpilogue_t as Epilogue, cublasLtMatmulDescAttributes_t as Desc,
    cublasLtMatmulPreferenceAttributes_t as Preference,
};

use super::Precision;
use super::driver::{Driver, Ptr};
use crate::device::DeviceError;

/// Bytes of scratch memory that a product may use at most.
const WORKSPACE: usize = 32 << 20;
/// Views of slabs and arenas begin at multiples of this.
const ALIGNMENT: u32 = 64;

/// The library on one GPU.
pub(super) struct Blas {
    driver: Arc<Driver>,
    handle: sys::cublasLtHandle_t,
    compute: sys::cublasComputeType_t,
}

// SAFETY: cuBLASLt's handle may be used by several threads.
unsafe impl Send for Blas {}
// SAFETY: likewise.
unsafe impl Sync for Blas {}

impl Blas {
    pub(super) fn open(driver: Arc<Driver>, precision: Precision) -> Result<Self, DeviceError> {
        driver.bind()?;
        let handle =
            result::create_handle().map_err(|e| failure(&driver, "opening cuBLASLt", e))?;
        let compute = match precision {
            Precision::F32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            Precision::Tf32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            // Matrices are f32 in memory.
            Precision::Bf16 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_16BF,
        };
        Ok(Self { driver, handle, compute })
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let _ = self.driver.bind();
        // SAFETY: made in `open`; products hold this.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Sizes of `out[m][n] = a[m][k] b[k][n]`, row by row, and what belongs to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sizes {
    pub(super) m: usize,
    pub(super) k: usize,
    pub(super) n: usize,
    /// `a` is stored transposed.
    pub(super) transpose_a: bool,
    /// `b` is stored transposed.
    pub(super) transpose_b: bool,
    /// One value per column is added.
    pub(super) bias: bool,
    /// The result is cut at zero; only with a bias.
    pub(super) relu: bool,
}

/// A product whose algorithm is chosen.
pub(super) struct Product {
    blas: Arc<Blas>,
    desc: sys::cublasLtMatmulDesc_t,
    /// Of `b`, of `a` and of the result: see [`Product::new`].
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

// SAFETY: handles with one owner.
unsafe impl Send for Product {}

impl Product {
    /// Chooses an algorithm. cuBLASLt's matrices lie column by column, so that our rows are its columns: it computes the
    /// transposed product `out^T = b^T a^T` from the same memory.
    pub(super) fn new(blas: Arc<Blas>, sizes: Sizes) -> Result<Self, DeviceError> {
        blas.driver.bind()?;
        let Sizes { m, k, n, transpose_a, transpose_b, bias, relu } = sizes;
        let fail = |e| failure(&blas.driver, &format!("choosing how to multiply {sizes:?}"), e);
        let float = sys::cudaDataType::CUDA_R_32F;
        let layout = |rows: usize, columns: usize| {
            result::create_matrix_layout(float, rows as u64, columns as u64, rows as i64)
        };
        let (b_rows, b_columns) = if transpose_b { (k, n) } else { (n, k) };
        let (a_rows, a_columns) = if transpose_a { (m, k) } else { (k, m) };
        let layouts = [
            layout(b_rows, b_columns).map_err(fail)?,
            layout(a_rows, a_columns).map_err(fail)?,
            layout(n, m).map_err(fail)?,
        ];
        let desc = result::create_matmul_desc(blas.compute, float).map_err(fail)?;
        // From here on dropping frees what was made.
        let algorithm = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
        let mut product = Self { blas: blas.clone(), desc, layouts, algorithm, workspace: 0 };
        let epilogue = match (bias, relu) {
            (true, true) => Epilogue::CUBLASLT_EPILOGUE_RELU_BIAS,
            (true, false) => Epilogue::CUBLASLT_EPILOGUE_BIAS,
            (false, _) => Epilogue::CUBLASLT_EPILOGUE_DEFAULT,
        };
        product.set(Desc::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(transpose_b)).map_err(fail)?;
        product.set(Desc::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(transpose_a)).map_err(fail)?;
        product.set(Desc::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as u32)).map_err(fail)?;
        let chosen = product.choose().map_err(fail)?;
        product.algorithm = chosen.algo;
        product.workspace = chosen.workspaceSize;
        Ok(product)
    }

    fn set<T>(&self, attribute: Desc, value: &T) -> Result<(), CublasError> {
        let value_at = std::ptr::from_ref(value).cast::<c_void>();
        // SAFETY: the description is alive, and the attribute is copied.
        unsafe { result::set_matmul_desc_attribute(self.desc, attribute, value_at, size_of::<T>()) }
    }

    /// Asks for the fastest algorithm within bounds.
    fn choose(&self) -> Result<sys::cublasLtMatmulHeuristicResult_t, CublasError> {
        let preference = result::create_matmul_pref()?;
        let set = |attribute, value: *const c_void, len| {
            // SAFETY: the preference is alive, and the attribute is copied.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, value, len) }
        };
        let alignments = [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        let workspace = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let mut asked = set(workspace, std::ptr::from_ref(&WORKSPACE).cast(), size_of::<usize>());
        for attribute in alignments {
            asked =
                asked.and(set(attribute, std::ptr::from_ref(&ALIGNMENT).cast(), size_of::<u32>()));
        }
        let [b, a, out] = self.layouts;
        // SAFETY: everything was made above and is alive.
        unsafe {
            let handle = self.blas.handle;
            let chosen = asked.and_then(|()| {
                result::get_matmul_algo_heuristic(handle, self.desc, b, a, out, out, preference)
            });
            result::destroy_matmul_pref(preference).and(chosen)
        }
    }

    /// Bytes of scratch memory that it needs.
    pub(super) fn workspace(&self) -> usize {
        self.workspace
    }

    /// Enqueues `out = a b (+ bias)`, or `out = a b + factor * x`, where `x` is laid out as `out` is.
    pub(super) fn run(
        &self,
        [a, b, bias]: [Ptr; 3],
        plus: Option<(f32, Ptr)>,
        out: Ptr,
        workspace: Ptr,
    ) -> Result<(), DeviceError> {
        let fail = |e| failure(&self.blas.driver, "multiplying matrices", e);
        if bias != Ptr::NULL {
            self.set(Desc::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.0).map_err(fail)?;
        }
        let (beta, x) = plus.unwrap_or((0.0, out));
        let one = 1f32;
        let [b_layout, a_layout, out_layout] = self.layouts;
        // SAFETY: all handles are alive, the operands are as long as the layouts say (the plan checked them), and both factors
        // are read before the call returns.
        let enqueued = unsafe {
            result::matmul(
                self.blas.handle,
                self.desc,
                (&raw const one).cast(),
                (&raw const beta).cast(),
                b.raw(),
                b_layout,
                a.raw(),
                a_layout,
                x.raw(),
                out_layout,
                out.raw(),
                out_layout,
                &self.algorithm,
                workspace.raw(),
                self.workspace,
                self.blas.driver.stream().cast(),
            )
        };
        enqueued.map_err(fail)
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        let _ = self.blas.driver.bind();
        // SAFETY: made in `new`, given back once.
        unsafe {
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.desc);
        }
    }
}

fn failure(driver: &Driver, what: &str, error: CublasError) -> DeviceError {
    DeviceError::Gpu {
        device: driver.name().to_owned(),
        what: what.to_owned(),
        reason: format!("cuBLASLt says {error}"),
    }
}
