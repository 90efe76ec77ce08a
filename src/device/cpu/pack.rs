//! Packing the right operand of a product into panels.

use super::simd::{MAX_LANES, multiversion};

multiversion! {
    /// Packs rows `0..rows` and columns `0..columns` of a row-major matrix with row distance `stride` into a panel:
    /// `panel` floats per row, zeros after the last column.
    pub(crate) fn pack_rows(panel: usize, from: &[f32], stride: usize, columns: usize, to: &mut [f32]) {
        if columns == panel && panel == 32 {
            fixed::<32>(from, stride, to);
        } else if columns == panel && panel == 16 {
            fixed::<16>(from, stride, to);
        } else {
            for (k, out) in to.chunks_exact_mut(panel).enumerate() {
                let (filled, rest) = out.split_at_mut(columns);
                filled.copy_from_slice(&from[k * stride..][..columns]);
                rest.fill(0.0);
            }
        }
    }
}

#[inline(always)]
fn fixed<const N: usize>(from: &[f32], stride: usize, to: &mut [f32]) {
    for (k, out) in to.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        out.copy_from_slice(&from[k * stride..][..N]);
    }
}

multiversion! {
    /// Packs the transpose: row `k` of the panel is column `k` of rows `0..columns` of `from`.
    pub(crate) fn pack_columns<V>(panel: usize, from: &[f32], stride: usize, columns: usize, to: &mut [f32]) {
        let rows = to.len() / panel;
        let [blocks, wide] = [rows, columns].map(|n| n / V::LANES * V::LANES);
        for k in (0..blocks).step_by(V::LANES) {
            for j in (0..wide).step_by(V::LANES) {
                // SAFETY: this copy is compiled for `V`; slices check the bounds.
                unsafe {
                    let mut block = [V::zero(); MAX_LANES];
                    for (i, row) in block[..V::LANES].iter_mut().enumerate() {
                        *row = V::load(from[(j + i) * stride + k..][..V::LANES].as_ptr());
                    }
                    // Each turn takes the highest bit of a row's number for the lowest of the column's, and so on.
                    for _ in 0..V::LANES.ilog2() {
                        let old = block;
                        for i in 0..V::LANES / 2 {
                            [block[2 * i], block[2 * i + 1]] =
                                V::interleave(old[i], old[i + V::LANES / 2]);
                        }
                    }
                    for (i, column) in block[..V::LANES].iter().enumerate() {
                        let to = &mut to[(k + i) * panel + j..][..V::LANES];
                        V::store(*column, to.as_mut_ptr());
                    }
                }
            }
        }
        for (k, out) in to.chunks_exact_mut(panel).enumerate() {
            let first = if k < blocks { wide } else { 0 };
            for (j, o) in out.iter_mut().enumerate().skip(first) {
                *o = if j < columns { from[j * stride + k] } else { 0.0 };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::*;

    #[test]
    fn both_ways_give_the_same_panel() {
        for isa in Isa::available() {
            for (rows, columns) in [(1, 1), (8, 8), (19, 13), (16, 16), (23, 32), (40, 31)] {
                let panel = 32;
                let matrix: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
                let transposed: Vec<f32> =
                    (0..rows * columns).map(|i| matrix[i % rows * columns + i / rows]).collect();
                let (mut a, mut b) = (vec![-1.0; rows * panel], vec![-2.0; rows * panel]);
                pack_rows(isa, panel, &matrix, columns, columns, &mut a);
                pack_columns(isa, panel, &transposed, rows, columns, &mut b);
                assert_eq!(a, b, "{rows} x {columns}");
                assert_eq!(a[(rows - 1) * panel + columns - 1], (rows * columns - 1) as f32);
            }
        }
    }
}
