//! Reductions, sums and products of matrices.

use super::array::whole;
use super::broadcast::{self, axis, text};
use super::number::{Number, numbers};
use super::parts::around;
use super::{Kernel, OpDef, context};
use crate::device::cpu::Epilogue;
use crate::device::cpu::gemm::{Matmul, matmul as gemm, matmul_scratch};
use crate::session::{DType, Node, OpError, Tensor, tensor_elements};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("Sum", reduction),
    OpDef::new("Mean", reduction),
    OpDef::new("Prod", reduction),
    OpDef::new("Max", reduction),
    OpDef::new("Min", reduction),
    OpDef::new("All", truth),
    OpDef::new("Any", truth),
    OpDef::new("ArgMax", arg),
    OpDef::new("ArgMin", arg),
    OpDef::new("AddN", add_n),
    OpDef::new("AccumulateNV2", add_n),
    OpDef::new("L2Loss", l2_loss),
    OpDef::new("MatMul", matmul),
    OpDef::new("BatchMatMul", batch_matmul),
    OpDef::new("BatchMatMulV2", batch_matmul),
    OpDef::new("Cumsum", cumsum),
];

/// How a tensor shrinks: which axes go, and what remains.
pub(super) struct Shrink {
    /// Runs of neighbouring extents, outermost first, and whether they go.
    pub(super) runs: Vec<(usize, bool)>,
    pub(super) result: Vec<usize>,
    /// Elements behind each of the result.
    count: usize,
}

impl Shrink {
    pub(super) fn new(shape: &[usize], axes: &Tensor, keep: bool) -> Result<Self, OpError> {
        let rank = shape.len();
        let axes: Result<Vec<usize>, OpError> =
            axes.integers()?.into_iter().map(|at| axis(at, rank)).collect();
        let axes = axes.map_err(|_| {
            OpError::invalid(format!(
                "Invalid reduction dimension for input with {rank} dimension(s)"
            ))
        })?;
        let (mut runs, mut result, mut count): (Vec<(usize, bool)>, _, _) =
            (Vec::new(), Vec::new(), 1);
        for (at, &extent) in shape.iter().enumerate() {
            let goes = axes.contains(&at);
            match goes {
                true => {
                    count *= extent;
                    if keep {
                        result.push(1);
                    }
                }
                false => result.push(extent),
            }
            match runs.last_mut() {
                Some((run, same)) if *same == goes => *run *= extent,
                _ => runs.push((extent, goes)),
            }
        }
        Ok(Self { runs, result, count })
    }

    /// Folds every element into its place of the result.
    fn fold<T: Copy, S: Copy>(&self, values: &[T], start: S, f: impl Fn(S, T) -> S) -> Vec<S> {
        let mut sums = vec![start; self.result.iter().product()];
        // What lies in front of the innermost run.
        let Some((&(run, goes), outer)) = self.runs.split_last() else {
            return values.iter().map(|&x| f(start, x)).collect();
        };
        if run == 0 || sums.is_empty() {
            return sums;
        }
        let mut stride = if goes { 1 } else { run };
        let mut steps = vec![(0, 0); outer.len()];
        for (step, &(extent, goes)) in steps.iter_mut().zip(outer).rev() {
            *step = (extent, if goes { 0 } else { stride });
            stride *= if goes { 1 } else { extent };
        }
        let mut at = vec![0; outer.len()];
        let mut place = 0;
        for row in values.chunks_exact(run) {
            match goes {
                true => sums[place] = row.iter().fold(sums[place], |sum, &x| f(sum, x)),
                false => {
                    let sums = &mut sums[place..place + run];
                    sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum = f(*sum, x));
                }
            }
            for (at, &(extent, stride)) in at.iter_mut().zip(&steps).rev() {
                *at += 1;
                place += stride;
                if *at < extent {
                    break;
                }
                place -= stride * extent;
                *at = 0;
            }
        }
        sums
    }
}

fn reduction(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (op, keep) = (node.op().to_owned(), node.bool("keep_dims", false)?);
    numbers!(node.dtype("T")?, T => Ok(Kernel::new(move |call| {
        let value = call.tensor(0)?;
        let shrink = Shrink::new(value.shape(), &call.tensor(1)?, keep)?;
        let x = value.slice::<T>()?;
        let out: Vec<T> = match op.as_str() {
            "Sum" | "Mean" => {
                let sums = shrink.fold(x, T::NO_SUM, T::sum);
                let count = if op == "Sum" { 1 } else { shrink.count };
                sums.into_iter().map(|sum| T::mean(sum, count)).collect()
            }
            "Prod" => shrink.fold(x, T::ONE, T::mul),
            "Max" => shrink.fold(x, T::LEAST, T::greater),
            _ => shrink.fold(x, T::GREATEST, T::lesser),
        };
        call.set(0, Tensor::new(shrink.result, out)?);
        Ok(())
    })))
}

fn truth(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (all, keep) = (node.op() == "All", node.bool("keep_dims", false)?);
    Ok(Kernel::new(move |call| {
        let value = call.tensor(0)?;
        let shrink = Shrink::new(value.shape(), &call.tensor(1)?, keep)?;
        let x = value.slice::<bool>()?;
        let out = shrink.fold(x, all, |a, b| if all { a && b } else { a || b });
        call.set(0, Tensor::new(shrink.result, out)?);
        Ok(())
    }))
}

/// The index of the greatest or least element along an axis, of equal ones the first.
fn arg(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (max, to) = (node.op() == "ArgMax", node.dtype_or("output_type", DType::I64)?);
    numbers!(node.dtype("T")?, T => Ok(Kernel::new(move |call| {
        let (value, at) = (call.tensor(0)?, super::array::one_integer(call, 1)?);
        let at = axis(at, value.shape().len())?;
        let (outer, extent, inner) = around(value.shape(), at);
        let x = value.slice::<T>()?;
        if extent == 0 {
            return Err(OpError::invalid(format!(
                "Reduction axis {at} is empty in shape {}",
                text(value.shape())
            )));
        }
        let mut best = Vec::with_capacity(outer * inner);
        for place in 0..outer * inner {
            let first = place / inner * extent * inner + place % inner;
            let mut winner = 0;
            for i in 1..extent {
                let (a, b) = (x[first + winner * inner], x[first + i * inner]);
                if if max { b > a } else { b < a } {
                    winner = i;
                }
            }
            best.push(winner);
        }
        let mut shape = value.shape().to_vec();
        shape.remove(at);
        call.set(0, whole(to, &shape, best.into_iter())?);
        Ok(())
    })))
}

fn add_n(node: &Node<'_>) -> Result<Kernel, OpError> {
    numbers!(node.dtype("T")?, T => Ok(Kernel::new(|call| {
        let mut sum = call.take(0)?;
        for i in 1..call.inputs() {
            let next = call.tensor(i)?;
            if next.shape() != sum.shape() {
                return Err(OpError::invalid(format!(
                    "Inputs to operation must have the same size and shape. Input 0: {} != input {i}: {}",
                    text(sum.shape()),
                    text(next.shape())
                )));
            }
            let (sum, next) = (sum.slice_mut::<T>()?, next.slice::<T>()?);
            sum.iter_mut().zip(next).for_each(|(sum, x)| *sum = sum.add(*x));
        }
        call.set(0, sum);
        Ok(())
    })))
}

fn l2_loss(node: &Node<'_>) -> Result<Kernel, OpError> {
    numbers!(node.dtype("T")?, T => Ok(Kernel::new(|call| {
        let value = call.tensor(0)?;
        let sum: f64 = value.slice::<T>()?.iter().map(|x| x.to_f64() * x.to_f64()).sum();
        call.set(0, Tensor::scalar(T::from_f64(sum / 2.0)));
        Ok(())
    })))
}

/// One product of matrices.
fn product<T: Number>(p: &Matmul, a: &[T], b: &[T], out: &mut [T]) {
    let (ai, at) = if p.trans_a { (1, p.m) } else { (p.k, 1) };
    let (bt, bj) = if p.trans_b { (1, p.k) } else { (p.n, 1) };
    for i in 0..p.m {
        for j in 0..p.n {
            let terms = (0..p.k).map(|t| a[i * ai + t * at].mul(b[t * bt + j * bj]));
            out[i * p.n + j] = T::mean(terms.fold(T::NO_SUM, T::sum), 1);
        }
    }
}

/// Products of as many pairs of matrices as there are pairs of places.
fn products(
    p: &Matmul,
    a: &Tensor,
    b: &Tensor,
    pairs: impl Iterator<Item = (usize, usize)>,
    shape: Vec<usize>,
) -> Result<Tensor, OpError> {
    let (left, right) = (p.m * p.k, p.k * p.n);
    if tensor_elements(a.dtype(), &shape)? == 0 {
        return Tensor::zeros(a.dtype(), shape);
    }
    if a.dtype() == DType::F32 {
        let (x, y, mut out) =
            (a.slice::<f32>()?, b.slice::<f32>()?, vec![0.0; shape.iter().product()]);
        let ctx = context();
        let mut scratch = vec![0.0; matmul_scratch(ctx, p)];
        for ((i, j), out) in pairs.zip(out.chunks_exact_mut(p.m * p.n)) {
            let (x, y) = (&x[i * left..(i + 1) * left], &y[j * right..(j + 1) * right]);
            gemm(ctx, p, x, y, Epilogue::None, out, &mut scratch);
        }
        return Tensor::new(shape, out);
    }
    numbers!(a.dtype(), T => {
        let mut out = vec![T::ZERO; shape.iter().product()];
        let (x, y) = (a.slice::<T>()?, b.slice::<T>()?);
        for ((i, j), out) in pairs.zip(out.chunks_exact_mut(p.m * p.n)) {
            product(p, &x[i * left..(i + 1) * left], &y[j * right..(j + 1) * right], out);
        }
        Tensor::new(shape, out)
    })
}

/// The sizes of the product of the last two extents.
fn sizes(a: &Tensor, b: &Tensor, [trans_a, trans_b]: [bool; 2]) -> Result<Matmul, OpError> {
    let (&[.., ar, ac], &[.., br, bc]) = (&**a.shape(), &**b.shape()) else {
        return Err(OpError::invalid(format!(
            "In[0] and In[1] ndims must be >= 2: {} and {}",
            a.shape().len(),
            b.shape().len()
        )));
    };
    let (m, k) = if trans_a { (ac, ar) } else { (ar, ac) };
    let (inner, n) = if trans_b { (bc, br) } else { (br, bc) };
    if k != inner {
        return Err(OpError::invalid(format!(
            "Matrix size-incompatible: In[0]: {}, In[1]: {}",
            text(a.shape()),
            text(b.shape())
        )));
    }
    Ok(Matmul { m, k, n, trans_a, trans_b })
}

fn matmul(node: &Node<'_>) -> Result<Kernel, OpError> {
    let trans = [node.bool("transpose_a", false)?, node.bool("transpose_b", false)?];
    Ok(Kernel::new(move |call| {
        let (a, b) = (call.tensor(0)?, call.tensor(1)?);
        for (i, x) in [&a, &b].into_iter().enumerate() {
            if x.shape().len() != 2 {
                let shape = text(x.shape());
                return Err(OpError::invalid(format!(
                    "In[{i}] is not a matrix. Instead it has shape {shape}"
                )));
            }
        }
        let p = sizes(&a, &b, trans)?;
        let out = products(&p, &a, &b, std::iter::once((0, 0)), vec![p.m, p.n])?;
        call.set(0, out);
        Ok(())
    }))
}

fn batch_matmul(node: &Node<'_>) -> Result<Kernel, OpError> {
    let trans = [node.bool("adj_x", false)?, node.bool("adj_y", false)?];
    Ok(Kernel::new(move |call| {
        let (a, b) = (call.tensor(0)?, call.tensor(1)?);
        let p = sizes(&a, &b, trans)?;
        let outer = |x: &Tensor| x.shape()[..x.shape().len() - 2].to_vec();
        let (left, right) = (outer(&a), outer(&b));
        let mut shape = broadcast::shape(&left, &right)?;
        let count = shape.iter().product();
        let pairs = broadcast::Walk::new(&left, &shape).zip(broadcast::Walk::new(&right, &shape));
        shape.extend([p.m, p.n]);
        let out = products(&p, &a, &b, pairs.take(count), shape)?;
        call.set(0, out);
        Ok(())
    }))
}

fn cumsum(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (exclusive, reverse) = (node.bool("exclusive", false)?, node.bool("reverse", false)?);
    numbers!(node.dtype("T")?, T => Ok(Kernel::new(move |call| {
        let (mut value, at) = (call.take(0)?, super::array::one_integer(call, 1)?);
        let at = axis(at, value.shape().len())?;
        let (outer, extent, inner) = around(value.shape(), at);
        let x = value.slice_mut::<T>()?;
        for place in 0..outer * inner {
            let mut sum = T::ZERO;
            for i in 0..extent {
                let i = if reverse { extent - 1 - i } else { i };
                let x = &mut x[(place / inner * extent + i) * inner + place % inner];
                let next = sum.add(*x);
                *x = if exclusive { sum } else { next };
                sum = next;
            }
        }
        call.set(0, value);
        Ok(())
    })))
}
