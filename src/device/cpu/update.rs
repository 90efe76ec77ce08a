//! Steps of the optimizer.

use super::Ctx;
use super::simd::multiversion;

/// A step of gradient descent, with what may go with it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rule {
    /// Learning rate.
    pub rate: f32,
    /// What of the last step's direction is kept; used where slots are given.
    pub momentum: f32,
    /// Whether to look ahead along the new direction (Nesterov).
    pub nesterov: bool,
    /// Bound on the magnitude of each element of the gradient.
    pub clip: Option<f32>,
    /// Decay of the moving average; used where averages are given.
    pub average_decay: Option<f32>,
}

#[inline(always)]
fn clipped(g: f32, bound: f32) -> f32 {
    if g > bound {
        bound
    } else if g < -bound {
        -bound
    } else {
        g
    }
}

multiversion! {
    fn descend(rate: f32, bound: f32, params: &mut [f32], grads: &[f32]) {
        for (p, g) in params.iter_mut().zip(grads) {
            *p -= rate * clipped(*g, bound);
        }
    }
}

multiversion! {
    fn descend_with_momentum(rule: &Rule, bound: f32, params: &mut [f32], grads: &[f32], slots: &mut [f32]) {
        let Rule { rate, momentum, nesterov, .. } = *rule;
        if nesterov {
            for ((p, g), v) in params.iter_mut().zip(grads).zip(slots) {
                let g = clipped(*g, bound);
                *v = momentum * *v + g;
                *p -= rate * (g + momentum * *v);
            }
        } else {
            for ((p, g), v) in params.iter_mut().zip(grads).zip(slots) {
                *v = momentum * *v + clipped(*g, bound);
                *p -= rate * *v;
            }
        }
    }
}

multiversion! {
    fn average(decay: f32, params: &[f32], averages: &mut [f32]) {
        for (a, p) in averages.iter_mut().zip(params) {
            *a -= (1.0 - decay) * (*a - p);
        }
    }
}

/// `params -= rate * grads`.
pub fn sgd(ctx: Ctx, rate: f32, grads: &[f32], params: &mut [f32]) {
    apply(ctx, &Rule { rate, ..Rule::default() }, params, grads, None, None);
}

/// One pass over all state: clips the gradient `g`, then, in this order,
/// `slot = momentum * slot + g`, `param -= rate * slot` (Nesterov: `rate * (g + momentum * slot)`;
/// without slots: `rate * g`) and `average -= (1 - decay) * (average - param)`.
pub fn apply(
    ctx: Ctx,
    rule: &Rule,
    params: &mut [f32],
    grads: &[f32],
    slots: Option<&mut [f32]>,
    averages: Option<&mut [f32]>,
) {
    /// Small enough that what one loop leaves in the first-level cache meets the next.
    const BLOCK: usize = 1024;
    let len = params.len();
    assert_eq!(grads.len(), len, "one gradient per parameter");
    assert!(slots.as_ref().is_none_or(|s| s.len() == len), "one slot per parameter");
    assert!(averages.as_ref().is_none_or(|a| a.len() == len), "one average per parameter");
    let bound = rule.clip.unwrap_or(f32::INFINITY);
    let momentum = slots.is_some();
    let unit = ctx.grain(len, 1);
    let outs =
        [(params, unit), (slots.unwrap_or_default(), unit), (averages.unwrap_or_default(), unit)];
    ctx.each(len.div_ceil(unit), [(grads, unit)], outs, |_, [grads], [params, slots, averages]| {
        let (mut slots, mut averages) = (slots.chunks_mut(BLOCK), averages.chunks_mut(BLOCK));
        for (params, grads) in params.chunks_mut(BLOCK).zip(grads.chunks(BLOCK)) {
            match slots.next() {
                Some(slots) if momentum => {
                    descend_with_momentum(ctx.isa, rule, bound, params, grads, slots);
                }
                _ => descend(ctx.isa, rule.rate, bound, params, grads),
            }
            if let (Some(decay), Some(averages)) = (rule.average_decay, averages.next()) {
                average(ctx.isa, decay, params, averages);
            }
        }
    });
}
