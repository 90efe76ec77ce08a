//! [`Weight`]: whether a node is small enough to run where the network is served.

use super::Value;

/// No node that touches more elements runs there: such are done within some microseconds, products of two that small within
/// a fraction of a millisecond.
pub(super) const SMALL: usize = 1024;

/// How many elements a node touches, as far as its inputs tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weight {
    /// About as many as its inputs have, or the product of two of them.
    Inputs,
    /// That, times the whole numbers in this input: a shape, multiples, a number of rows.
    Times(usize),
    /// Nobody knows: files, numbers that say where rows go.
    Unknown,
}

impl Weight {
    /// Of an operation. One that is missing here must not make much of little.
    pub(super) fn of(op: &str) -> Self {
        match op {
            "Fill"
            | "RandomUniform"
            | "RandomStandardNormal"
            | "TruncatedNormal"
            | "RandomUniformInt"
            | "StridedSliceGrad"
            | "AvgPoolGrad"
            | "Conv2DBackpropInput" => Self::Times(0),
            "BroadcastTo" | "Tile" | "OneHot" | "Conv2DBackpropFilter" => Self::Times(1),
            "UnsortedSegmentSum" => Self::Times(2),
            "Range"
            | "LinSpace"
            | "Pad"
            | "PadV2"
            | "DynamicStitch"
            | "ParallelDynamicStitch"
            | "SaveV2"
            | "RestoreV2"
            | "MergeV2Checkpoints" => Self::Unknown,
            _ => Self::Inputs,
        }
    }

    /// The number of elements; `None` where it may be any.
    pub(super) fn elements<'a>(
        self,
        inputs: impl Iterator<Item = Option<&'a Value>>,
    ) -> Option<usize> {
        if self == Self::Unknown {
            return None;
        }
        let (mut sum, mut times) = (0usize, 1usize);
        for (i, value) in inputs.enumerate() {
            let Some(value) = value else { continue };
            match (self, value) {
                (Self::Times(of), Value::Tensor(tensor)) if of == i => {
                    let numbers = tensor.integers().ok().filter(|n| n.len() <= SMALL)?;
                    times = numbers
                        .iter()
                        .fold(times, |n, &by| n.saturating_mul(by.unsigned_abs() as usize));
                }
                _ => sum = sum.saturating_add(value.elements()?),
            }
        }
        Some(sum.max(1).saturating_mul(times))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Tensor;

    #[test]
    fn what_a_shape_asks_for_counts() {
        let of = |op: &str, inputs: Vec<Tensor>| {
            let inputs: Vec<Value> = inputs.into_iter().map(Value::Tensor).collect();
            Weight::of(op).elements(inputs.iter().map(Some))
        };
        let shape = || Tensor::vector(vec![1000i32, 1000]).unwrap();
        let ten = || Tensor::zeros(crate::session::DType::F32, [10]).unwrap();
        assert_eq!(of("Add", vec![ten(), ten()]), Some(20));
        assert_eq!(of("Fill", vec![shape(), Tensor::scalar(1f32)]), Some(1_000_000));
        assert_eq!(of("Tile", vec![ten(), Tensor::vector(vec![7i64]).unwrap()]), Some(70));
        assert_eq!(of("OneHot", vec![ten(), Tensor::scalar(-1i32)]), Some(10));
        assert_eq!(of("DynamicStitch", vec![ten(), ten()]), None);
        assert_eq!(of("NoOp", Vec::new()), Some(1));
    }
}
