//! [`UpdateRule`]: what one step does to a parameter.

/// Stochastic gradient descent, plain or with momentum, as TensorFlow's `MomentumOptimizer`.
///
/// With `v` the velocity and `g` the averaged gradient, clipped first where asked:
/// `v = momentum v + g`; `p = p - rate v`, or with Nesterov `p = p - rate (g + momentum v)`.
/// Without momentum: `p = p - rate g`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UpdateRule {
    /// Share of the velocity that is kept; `None` for plain descent, which needs no slots.
    pub momentum: Option<f32>,
    /// Look ahead along the velocity.
    pub nesterov: bool,
    /// Each element of the gradient is cut to plus or minus this.
    pub clip: Option<f32>,
}

/// How much of its distance to the batches' value a statistic covers in a step: TensorFlow's and PyTorch's 0.1, a decay of 0.9.
pub const STATISTIC_SHARE: f32 = 0.1;

/// The decay of the moving averages at `global_step`, the step number after the update:
/// `min(decay, (1 + n) / (10 + n))`, TensorFlow's `ExponentialMovingAverage` with `num_updates`.
pub fn average_decay(decay: f32, global_step: u64) -> f32 {
    let n = global_step as f64;
    f64::from(decay).min((1.0 + n) / (10.0 + n)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_ramp_up() {
        for (n, expected) in
            [(0, 0.1), (1, 0.181_818), (2, 0.25), (100, 0.918_182), (1000, 0.991_089)]
        {
            assert!((average_decay(0.9999, n) - expected).abs() < 1e-6);
        }
        // The last few steps before the end of the ramp round to its end.
        assert!(average_decay(0.9999, 89_000) < 0.9999);
        assert_eq!(average_decay(0.9999, 89_990), 0.9999);
    }
}
