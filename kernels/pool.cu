// Maximum and average pooling of `n` values in pictures of `c` channels. Gradients gather: each input adds up what the
// windows over it give, in row-major order.

// Padding never wins, NaN always.
extern "C" __global__ void max_pool(const float *x, float *y, Window w, int c, int n) {
    EACH(i, n) {
        int channel = i % c, at = i / c;
        int ox = at % w.output[1], oy = at / w.output[1] % w.output[0], picture = at / w.output[1] / w.output[0];
        Range rows = inputs_of(w, 0, oy), columns = inputs_of(w, 1, ox);
        float best = -bits(0x7f800000u);
        for (int iy = rows.first; iy < rows.end; iy++)
            for (int ix = columns.first; ix < columns.end; ix++) {
                float v = x[((picture * w.input[0] + iy) * w.input[1] + ix) * c + channel];
                // A NaN that is there already stays.
                if (!(v <= best) && best == best) best = v;
            }
        y[i] = best;
    }
}

// The gradient goes to the first maximum of its window. With `relu` it stops where `x`, the output of a relu, is zero.
extern "C" __global__ void max_pool_grad(const float *x, const float *y, const float *dy, float *dx, Window w, int c,
                                         int relu, int n) {
    EACH(i, n) {
        float own = x[i], sum = 0.0f;
        if (!relu || own > 0.0f) {
            int channel = i % c, at = i / c;
            int ix = at % w.input[1], iy = at / w.input[1] % w.input[0], picture = at / w.input[1] / w.input[0];
            Range rows = outputs_of(w, 0, iy), columns = outputs_of(w, 1, ix);
            for (int oy = rows.first; oy < rows.end; oy++)
                for (int ox = columns.first; ox < columns.end; ox++) {
                    int o = ((picture * w.output[0] + oy) * w.output[1] + ox) * c + channel;
                    if (own != y[o]) continue;
                    // Whether an earlier position of the window holds the maximum too.
                    Range above = inputs_of(w, 0, oy), beside = inputs_of(w, 1, ox);
                    bool first = true;
                    for (int ty = above.first; ty <= iy && first; ty++) {
                        int end = ty < iy ? beside.end : ix;
                        for (int tx = beside.first; tx < end && first; tx++)
                            first = x[((picture * w.input[0] + ty) * w.input[1] + tx) * c + channel] != own;
                    }
                    if (first) sum += dy[o];
                }
        }
        dx[i] = sum;
    }
}

// The mean of the positions that lie inside the picture.
extern "C" __global__ void avg_pool(const float *x, float *y, Window w, int c, int n) {
    EACH(i, n) {
        int channel = i % c, at = i / c;
        int ox = at % w.output[1], oy = at / w.output[1] % w.output[0], picture = at / w.output[1] / w.output[0];
        Range rows = inputs_of(w, 0, oy), columns = inputs_of(w, 1, ox);
        float sum = 0.0f;
        for (int iy = rows.first; iy < rows.end; iy++)
            for (int ix = columns.first; ix < columns.end; ix++)
                sum += x[((picture * w.input[0] + iy) * w.input[1] + ix) * c + channel];
        y[i] = sum / ((rows.end - rows.first) * (columns.end - columns.first));
    }
}

extern "C" __global__ void avg_pool_grad(const float *dy, float *dx, Window w, int c, int n) {
    EACH(i, n) {
        int channel = i % c, at = i / c;
        int ix = at % w.input[1], iy = at / w.input[1] % w.input[0], picture = at / w.input[1] / w.input[0];
        Range rows = outputs_of(w, 0, iy), columns = outputs_of(w, 1, ix);
        float sum = 0.0f;
        for (int oy = rows.first; oy < rows.end; oy++)
            for (int ox = columns.first; ox < columns.end; ox++) {
                Range above = inputs_of(w, 0, oy), beside = inputs_of(w, 1, ox);
                int count = (above.end - above.first) * (beside.end - beside.first);
                sum += dy[((picture * w.output[0] + oy) * w.output[1] + ox) * c + channel] / count;
            }
        dx[i] = sum;
    }
}
