//! Softmax cross-entropy with one right class per row.

use super::Ctx;

/// Maximum of a row and the logarithm of its sum of exponentials above that.
fn log_sum(row: &[f32]) -> (f32, f32) {
    let max = row.iter().fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m });
    (max, row.iter().map(|v| (v - max).exp()).sum::<f32>().ln())
}

/// The class a label names, if there is one.
fn class(label: f32, classes: usize) -> Option<usize> {
    (label >= 0.0 && label < classes as f32).then_some(label as usize)
}

fn check(classes: usize, logits: &[f32], labels: &[f32]) {
    assert!(classes > 0 && logits.len() == labels.len() * classes, "{classes} logits per label");
}

/// `losses[b] = log(sum exp(logits[b])) - logits[b][labels[b]]`, computed relative to the row's maximum.
///
/// Labels are whole numbers below `classes`; any other gives NaN, as TensorFlow does on a GPU.
pub fn cross_entropy(ctx: Ctx, classes: usize, logits: &[f32], labels: &[f32], losses: &mut [f32]) {
    check(classes, logits, labels);
    assert_eq!(labels.len(), losses.len(), "one loss per label");
    let rows = ctx.grain(logits.len(), classes) / classes;
    let parts = labels.len().div_ceil(rows);
    ctx.each(
        parts,
        [(logits, rows * classes), (labels, rows)],
        [(losses, rows)],
        |_, [x, l], [out]| {
            for ((row, label), loss) in x.chunks_exact(classes).zip(l).zip(out) {
                let (max, log) = log_sum(row);
                *loss = class(*label, classes).map_or(f32::NAN, |c| log - (row[c] - max));
            }
        },
    );
}

/// `dlogits[b] = upstream[b] * (softmax(logits[b]) - onehot(labels[b]))`; NaN for a label that is no class.
pub fn cross_entropy_grad(
    ctx: Ctx,
    classes: usize,
    upstream: &[f32],
    logits: &[f32],
    labels: &[f32],
    dlogits: &mut [f32],
) {
    check(classes, logits, labels);
    assert_eq!(
        (upstream.len(), dlogits.len()),
        (labels.len(), logits.len()),
        "one gradient per label and logit"
    );
    let rows = ctx.grain(logits.len(), classes) / classes;
    let parts = labels.len().div_ceil(rows);
    let ins = [(logits, rows * classes), (labels, rows), (upstream, rows)];
    ctx.each(parts, ins, [(dlogits, rows * classes)], |_, [x, labels, up], [out]| {
        let rows = x.chunks_exact(classes).zip(out.chunks_exact_mut(classes));
        for ((row, out), (label, up)) in rows.zip(labels.iter().zip(up)) {
            let Some(right) = class(*label, classes) else {
                out.fill(f32::NAN);
                continue;
            };
            let (max, log) = log_sum(row);
            for (c, (d, v)) in out.iter_mut().zip(row).enumerate() {
                let p = (v - max - log).exp();
                *d = up * if c == right { p - 1.0 } else { p };
            }
        }
    });
}
