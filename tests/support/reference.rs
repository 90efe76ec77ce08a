//! The operations as naive loops in `f64`: their definition, against which every device is checked.

use tftrain::graph::Window;

/// A convolution of `[n, h, w, ins]` pictures; for a depthwise one, `outs` is the number of filters per channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conv {
    pub(crate) n: usize,
    pub(crate) ins: usize,
    pub(crate) outs: usize,
    pub(crate) window: Window,
}

/// One tap of a window: picture, output position, input position and kernel position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tap {
    pub(crate) output: usize,
    pub(crate) input: usize,
    pub(crate) kernel: usize,
}

/// All taps that fall on the input, windows in row-major order, taps of a window in row-major order.
pub(crate) fn taps(w: &Window, n: usize) -> Vec<Tap> {
    let mut all = Vec::new();
    for picture in 0..n {
        for oy in 0..w.output[0] {
            for ox in 0..w.output[1] {
                for ky in 0..w.kernel[0] {
                    for kx in 0..w.kernel[1] {
                        let y = (oy * w.stride[0] + ky) as isize - w.pad[0] as isize;
                        let x = (ox * w.stride[1] + kx) as isize - w.pad[1] as isize;
                        let inside = |v: isize, len: usize| v >= 0 && v < len as isize;
                        if inside(y, w.input[0]) && inside(x, w.input[1]) {
                            all.push(Tap {
                                output: (picture * w.output[0] + oy) * w.output[1] + ox,
                                input: (picture * w.input[0] + y as usize) * w.input[1]
                                    + x as usize,
                                kernel: ky * w.kernel[1] + kx,
                            });
                        }
                    }
                }
            }
        }
    }
    all
}

/// Calls `f(input, filter, output)` with the indices of every product of a convolution.
fn products(c: &Conv, depthwise: bool, mut f: impl FnMut(usize, usize, usize)) {
    for t in taps(&c.window, c.n) {
        for i in 0..c.ins {
            for o in 0..c.outs {
                let output = if depthwise {
                    (t.output * c.ins + i) * c.outs + o
                } else {
                    t.output * c.outs + o
                };
                f(t.input * c.ins + i, (t.kernel * c.ins + i) * c.outs + o, output);
            }
        }
    }
}

fn inputs(c: &Conv) -> usize {
    c.n * c.window.input[0] * c.window.input[1] * c.ins
}

fn filters(c: &Conv) -> usize {
    c.window.kernel[0] * c.window.kernel[1] * c.ins * c.outs
}

fn outputs(c: &Conv, depthwise: bool) -> usize {
    c.n * c.window.output[0] * c.window.output[1] * c.outs * if depthwise { c.ins } else { 1 }
}

pub(crate) fn conv(c: &Conv, depthwise: bool, x: &[f64], w: &[f64]) -> Vec<f64> {
    let mut y = vec![0.0; outputs(c, depthwise)];
    products(c, depthwise, |i, f, o| y[o] += x[i] * w[f]);
    y
}

pub(crate) fn conv_input_grad(c: &Conv, depthwise: bool, dy: &[f64], w: &[f64]) -> Vec<f64> {
    let mut dx = vec![0.0; inputs(c)];
    products(c, depthwise, |i, f, o| dx[i] += dy[o] * w[f]);
    dx
}

pub(crate) fn conv_filter_grad(c: &Conv, depthwise: bool, x: &[f64], dy: &[f64]) -> Vec<f64> {
    let mut dw = vec![0.0; filters(c)];
    products(c, depthwise, |i, f, o| dw[f] += x[i] * dy[o]);
    dw
}

/// `a[m][k] * b[k][n]`, either stored transposed.
pub(crate) fn matmul(
    [m, k, n]: [usize; 3],
    trans_a: bool,
    trans_b: bool,
    a: &[f64],
    b: &[f64],
) -> Vec<f64> {
    let mut out = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            for l in 0..k {
                let left = if trans_a { a[l * m + i] } else { a[i * k + l] };
                let right = if trans_b { b[j * k + l] } else { b[l * n + j] };
                out[i * n + j] += left * right;
            }
        }
    }
    out
}

pub(crate) fn bias_add(x: &[f64], bias: &[f64]) -> Vec<f64> {
    x.iter().enumerate().map(|(i, v)| v + bias[i % bias.len()]).collect()
}

pub(crate) fn relu(x: &[f64]) -> Vec<f64> {
    x.iter().map(|v| v.max(0.0)).collect()
}

pub(crate) fn max_pool(w: &Window, n: usize, c: usize, x: &[f64]) -> Vec<f64> {
    let mut y = vec![f64::NEG_INFINITY; n * w.output[0] * w.output[1] * c];
    for t in taps(w, n) {
        for i in 0..c {
            y[t.output * c + i] = y[t.output * c + i].max(x[t.input * c + i]);
        }
    }
    y
}

/// Each gradient goes to the first maximum of its window.
pub(crate) fn max_pool_grad(w: &Window, n: usize, c: usize, x: &[f64], dy: &[f64]) -> Vec<f64> {
    let y = max_pool(w, n, c, x);
    let (mut dx, mut taken) = (vec![0.0; x.len()], vec![false; dy.len()]);
    for t in taps(w, n) {
        for i in 0..c {
            let (from, to) = (t.output * c + i, t.input * c + i);
            if !taken[from] && x[to] == y[from] {
                taken[from] = true;
                dx[to] += dy[from];
            }
        }
    }
    dx
}

/// Taps inside the picture per window.
fn counts(w: &Window, n: usize) -> Vec<f64> {
    let mut counts = vec![0.0; n * w.output[0] * w.output[1]];
    taps(w, n).iter().for_each(|t| counts[t.output] += 1.0);
    counts
}

pub(crate) fn avg_pool(w: &Window, n: usize, c: usize, x: &[f64]) -> Vec<f64> {
    let counts = counts(w, n);
    let mut y = vec![0.0; counts.len() * c];
    for t in taps(w, n) {
        (0..c).for_each(|i| y[t.output * c + i] += x[t.input * c + i] / counts[t.output]);
    }
    y
}

pub(crate) fn avg_pool_grad(w: &Window, n: usize, c: usize, dy: &[f64]) -> Vec<f64> {
    let counts = counts(w, n);
    let mut dx = vec![0.0; n * w.input[0] * w.input[1] * c];
    for t in taps(w, n) {
        (0..c).for_each(|i| dx[t.input * c + i] += dy[t.output * c + i] / counts[t.output]);
    }
    dx
}

/// Parameters of a local response normalisation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lrn {
    pub(crate) radius: usize,
    pub(crate) bias: f64,
    pub(crate) alpha: f64,
    pub(crate) beta: f64,
}

impl Lrn {
    fn window(&self, channels: usize, c: usize) -> std::ops::Range<usize> {
        c.saturating_sub(self.radius)..(c + self.radius + 1).min(channels)
    }

    fn base(&self, row: &[f64], c: usize) -> f64 {
        self.bias + self.alpha * self.window(row.len(), c).map(|j| row[j] * row[j]).sum::<f64>()
    }
}

pub(crate) fn lrn(p: &Lrn, channels: usize, x: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| {
        (0..channels).map(|c| row[c] / p.base(row, c).powf(p.beta)).collect::<Vec<_>>()
    };
    x.chunks(channels).flat_map(row).collect()
}

pub(crate) fn lrn_grad(p: &Lrn, channels: usize, x: &[f64], dy: &[f64]) -> Vec<f64> {
    let mut dx = vec![0.0; x.len()];
    for ((x, dy), dx) in x.chunks(channels).zip(dy.chunks(channels)).zip(dx.chunks_mut(channels)) {
        for c in 0..channels {
            let base = p.base(x, c);
            dx[c] += dy[c] * base.powf(-p.beta);
            for j in p.window(channels, c) {
                dx[j] -= 2.0 * p.alpha * p.beta * x[j] * x[c] * dy[c] * base.powf(-p.beta - 1.0);
            }
        }
    }
    dx
}

pub(crate) fn column_sums(columns: usize, x: &[f64]) -> Vec<f64> {
    let mut sums = vec![0.0; columns];
    x.iter().enumerate().for_each(|(i, v)| sums[i % columns] += v);
    sums
}

/// Mean and biased variance per column.
pub(crate) fn moments(columns: usize, x: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let rows = (x.len() / columns) as f64;
    let mean: Vec<f64> = column_sums(columns, x).iter().map(|s| s / rows).collect();
    let squares: Vec<f64> =
        x.iter().enumerate().map(|(i, v)| (v - mean[i % columns]).powi(2)).collect();
    let variance = column_sums(columns, &squares).iter().map(|s| s / rows).collect();
    (mean, variance)
}

pub(crate) fn batch_norm(epsilon: f64, scale: &[f64], offset: &[f64], x: &[f64]) -> Vec<f64> {
    let columns = scale.len();
    let (mean, variance) = moments(columns, x);
    let value = |(i, v): (usize, &f64)| {
        let c = i % columns;
        (v - mean[c]) / (variance[c] + epsilon).sqrt() * scale[c] + offset[c]
    };
    x.iter().enumerate().map(value).collect()
}

/// Gradients by input, scale and offset.
pub(crate) fn batch_norm_grad(epsilon: f64, scale: &[f64], x: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let (columns, ones) = (scale.len(), vec![1.0; scale.len()]);
    let rows = (x.len() / columns) as f64;
    let normal = batch_norm(epsilon, &ones, &vec![0.0; columns], x);
    let (_, variance) = moments(columns, x);
    let doffset = column_sums(columns, dy);
    let products: Vec<f64> = dy.iter().zip(&normal).map(|(d, v)| d * v).collect();
    let dscale = column_sums(columns, &products);
    let value = |(i, d): (usize, &f64)| {
        let c = i % columns;
        scale[c] / (variance[c] + epsilon).sqrt()
            * (d - (doffset[c] + normal[i] * dscale[c]) / rows)
    };
    let dx = dy.iter().enumerate().map(value).collect();
    [dx, dscale, doffset]
}

/// Softmax of each row.
pub(crate) fn softmax(classes: usize, logits: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
        row.iter().map(|v| (v - max).exp() / sum).collect::<Vec<_>>()
    };
    logits.chunks(classes).flat_map(row).collect()
}

pub(crate) fn cross_entropy(classes: usize, logits: &[f64], labels: &[usize]) -> Vec<f64> {
    let log_softmax = |row: &[f64], label: usize| {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter().map(|v| (v - max).exp()).sum::<f64>().ln() + max - row[label]
    };
    logits.chunks(classes).zip(labels).map(|(row, label)| log_softmax(row, *label)).collect()
}

pub(crate) fn cross_entropy_grad(
    classes: usize,
    upstream: &[f64],
    logits: &[f64],
    labels: &[usize],
) -> Vec<f64> {
    let mut d = softmax(classes, logits);
    for ((row, up), label) in d.chunks_mut(classes).zip(upstream).zip(labels) {
        row[*label] -= 1.0;
        row.iter_mut().for_each(|v| *v *= up);
    }
    d
}

/// One step of the optimizer on parameters, slots and averages.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) params: Vec<f64>,
    pub(crate) slots: Vec<f64>,
    pub(crate) averages: Vec<f64>,
}

impl State {
    pub(crate) fn step(
        &mut self,
        rate: f64,
        momentum: f64,
        nesterov: bool,
        clip: Option<f64>,
        decay: f64,
        grads: &[f64],
    ) {
        for (i, g) in grads.iter().enumerate() {
            let g = clip.map_or(*g, |c| g.clamp(-c, c));
            self.slots[i] = momentum * self.slots[i] + g;
            let direction = if nesterov { g + momentum * self.slots[i] } else { self.slots[i] };
            self.params[i] -= rate * direction;
            self.averages[i] -= (1.0 - decay) * (self.averages[i] - self.params[i]);
        }
    }
}
