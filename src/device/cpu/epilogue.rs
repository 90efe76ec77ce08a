//! [`Epilogue`]: what happens to a finished sum before it is stored.

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
