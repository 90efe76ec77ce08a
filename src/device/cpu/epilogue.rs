//! [`Epilogue`]: what happens to a finished sum before it is stored.

use super::simd::multiversion;

/// Applied to the rows of a product or convolution while they are still in registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Epilogue<'a> {
    /// The sum itself.
    None,
    /// Adds one value per output channel.
    Bias(&'a [f32]),
    /// Adds one value per output channel, then cuts at zero. NaN passes.
    BiasRelu(&'a [f32]),
}

impl Epilogue<'_> {
    /// The same for the columns from `first` on.
    pub(crate) fn from(self, first: usize) -> Self {
        match self {
            Self::None => Self::None,
            Self::Bias(b) => Self::Bias(&b[first..]),
            Self::BiasRelu(b) => Self::BiasRelu(&b[first..]),
        }
    }

    /// Whether there is a value for each of `columns`.
    pub(crate) fn fits(self, columns: usize) -> bool {
        match self {
            Self::None => true,
            Self::Bias(b) | Self::BiasRelu(b) => b.len() == columns,
        }
    }

    /// The finished value of column `j`.
    #[inline(always)]
    pub(crate) fn apply(self, sum: f32, j: usize) -> f32 {
        match self {
            Self::None => sum,
            Self::Bias(b) => sum + b[j],
            Self::BiasRelu(b) => {
                let v = sum + b[j];
                if v < 0.0 { 0.0 } else { v }
            }
        }
    }
}

/// Floats of a row of sums.
const ROW: usize = 32;

multiversion! {
    /// Only the two functions below call this.
    fn rows(e: Epilogue<'_>, columns: usize, sums: &[f32], out_row: usize, out: *mut f32) {
        for (i, sums) in sums.chunks_exact(ROW).enumerate() {
            // SAFETY: the callers have it that these rows of `columns` floats are theirs.
            let out = unsafe { std::slice::from_raw_parts_mut(out.add(i * out_row), columns) };
            if columns == ROW {
                for (j, (out, sum)) in out.as_chunks_mut::<ROW>().0[0].iter_mut().zip(sums).enumerate() {
                    *out = e.apply(*sum, j);
                }
            } else {
                for (j, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
                    *out = e.apply(*sum, j);
                }
            }
        }
    }
}

/// Finishes rows of 32 sums, of which `columns` count, into rows `out_row` apart.
pub(super) fn finish(
    isa: super::Isa,
    e: Epilogue<'_>,
    columns: usize,
    sums: &[f32],
    out_row: usize,
    out: &mut [f32],
) {
    let count = sums.len() / ROW;
    assert!(count == 0 || (count - 1) * out_row + columns <= out.len(), "rows leave the output");
    // SAFETY: all rows lie in `out`, as `columns` floats each, no more than `out_row`.
    unsafe { finish_raw(isa, e, columns, sums, out_row, out.as_mut_ptr()) };
}

/// The same into memory that other threads may use between the rows.
///
/// # Safety
/// `columns` floats at each multiple of `out_row` from `out` on, for each row of `sums`, are this call's alone.
pub(super) unsafe fn finish_raw(
    isa: super::Isa,
    e: Epilogue<'_>,
    columns: usize,
    sums: &[f32],
    out_row: usize,
    out: *mut f32,
) {
    assert!(columns <= ROW && columns <= out_row, "rows of at most {ROW} sums");
    if let Epilogue::Bias(bias) | Epilogue::BiasRelu(bias) = e {
        assert!(bias.len() >= columns, "one bias per column");
    }
    rows(isa, e, columns, sums, out_row, out);
}
