//! [`Window`]: how a kernel slides over a picture, with TensorFlow's padding rules.

/// How the borders are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Padding {
    /// Output extent = ceil(input / stride); the odd zero goes below and right.
    Same,
    /// Only windows that lie inside the input.
    Valid,
}

/// A kernel's positions over an NHWC tensor. Pairs are `[height, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Extents of the kernel.
    pub kernel: [usize; 2],
    /// Distance between neighbouring windows.
    pub stride: [usize; 2],
    /// Zeros above and left of the input.
    pub pad: [usize; 2],
    /// Extents of the input.
    pub input: [usize; 2],
    /// Extents of the output.
    pub output: [usize; 2],
}

impl Window {
    /// `None` when no window fits, or an extent is zero.
    pub fn new(
        input: [usize; 2],
        kernel: [usize; 2],
        stride: [usize; 2],
        padding: Padding,
    ) -> Option<Self> {
        let (mut pad, mut output) = ([0; 2], [0; 2]);
        for d in 0..2 {
            if input[d] == 0 || kernel[d] == 0 || stride[d] == 0 {
                return None;
            }
            match padding {
                Padding::Same => {
                    output[d] = input[d].div_ceil(stride[d]);
                    let covered = (output[d] - 1) * stride[d] + kernel[d];
                    pad[d] = covered.saturating_sub(input[d]) / 2;
                }
                Padding::Valid => {
                    output[d] = (input[d] + stride[d]).checked_sub(kernel[d])? / stride[d]
                }
            }
            if output[d] == 0 {
                return None;
            }
        }
        Some(Self { kernel, stride, pad, input, output })
    }

    /// The kernel taps of dimension `d` that fall on the input for output position `o`,
    /// and the input position of the first one.
    pub fn taps(&self, d: usize, o: usize) -> (std::ops::Range<usize>, usize) {
        let start = o * self.stride[d];
        let first = self.pad[d].saturating_sub(start);
        let end = (self.input[d] + self.pad[d]).saturating_sub(start).min(self.kernel[d]);
        (first..end.max(first), (start + first).saturating_sub(self.pad[d]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pads_as_tensorflow_does() {
        let pool = Window::new([24, 24], [3, 3], [2, 2], Padding::Same).unwrap();
        assert_eq!((pool.output, pool.pad), ([12, 12], [0, 0]));
        let conv = Window::new([24, 24], [5, 5], [1, 1], Padding::Same).unwrap();
        assert_eq!((conv.output, conv.pad), ([24, 24], [2, 2]));
        let valid = Window::new([11, 7], [5, 3], [3, 2], Padding::Valid).unwrap();
        assert_eq!(valid.output, [3, 3]);
        assert_eq!(Window::new([2, 2], [3, 3], [1, 1], Padding::Valid), None);
    }

    #[test]
    fn taps_stay_inside() {
        let w = Window::new([5, 5], [5, 5], [2, 2], Padding::Same).unwrap();
        assert_eq!(w.taps(0, 0), (2..5, 0));
        assert_eq!(w.taps(0, 2), (0..3, 2));
    }
}
