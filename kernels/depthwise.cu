// Depthwise convolutions: channel `c` of the input gives output channels `c * multiplier + m`, by filters of its own.

// `n` values of `y`.
extern "C" __global__ void depthwise(const float *x, const float *filter, float *y, Window w, int channels,
                                     int multiplier, int n) {
    int outs = channels * multiplier;
    EACH(i, n) {
        int out = i % outs, at = i / outs;
        int ox = at % w.output[1], oy = at / w.output[1] % w.output[0], picture = at / w.output[1] / w.output[0];
        Range rows = inputs_of(w, 0, oy), columns = inputs_of(w, 1, ox);
        int top = oy * w.stride[0] - w.pad[0], left = ox * w.stride[1] - w.pad[1];
        float sum = 0.0f;
        for (int iy = rows.first; iy < rows.end; iy++)
            for (int ix = columns.first; ix < columns.end; ix++) {
                int from = ((picture * w.input[0] + iy) * w.input[1] + ix) * channels + out / multiplier;
                sum += x[from] * filter[((iy - top) * w.kernel[1] + ix - left) * outs + out];
            }
        y[i] = sum;
    }
}

// `n` values of `dx`.
extern "C" __global__ void depthwise_input_grad(const float *dy, const float *filter, float *dx, Window w,
                                                int channels, int multiplier, int n) {
    int outs = channels * multiplier;
    EACH(i, n) {
        int channel = i % channels, at = i / channels;
        int ix = at % w.input[1], iy = at / w.input[1] % w.input[0], picture = at / w.input[1] / w.input[0];
        Range rows = outputs_of(w, 0, iy), columns = outputs_of(w, 1, ix);
        float sum = 0.0f;
        for (int oy = rows.first; oy < rows.end; oy++)
            for (int ox = columns.first; ox < columns.end; ox++) {
                int ky = iy + w.pad[0] - oy * w.stride[0], kx = ix + w.pad[1] - ox * w.stride[1];
                const float *d = dy + ((picture * w.output[0] + oy) * w.output[1] + ox) * outs;
                const float *f = filter + (ky * w.kernel[1] + kx) * outs;
                for (int out = channel * multiplier; out < (channel + 1) * multiplier; out++) sum += d[out] * f[out];
            }
        dx[i] = sum;
    }
}

// Blocks as in `column_sums_sync`, with `blockIdx.z` the position in the kernel; rows are those of `dy`.
extern "C" __global__ void __launch_bounds__(256)
depthwise_filter_grad(const float *x, const float *dy, float *dw, Window w, int channels, int multiplier, int rows,
                      float *partials, unsigned int *counters) {
    int outs = channels * multiplier, tap = blockIdx.z;
    int ky = tap / w.kernel[1], kx = tap % w.kernel[1];
    column_sums_sync<1>(
        rows, outs,
        [=](int at, int out, float *v) {
            int ox = at % w.output[1], oy = at / w.output[1] % w.output[0], picture = at / w.output[1] / w.output[0];
            int iy = oy * w.stride[0] - w.pad[0] + ky, ix = ox * w.stride[1] - w.pad[1] + kx;
            bool inside = iy >= 0 && iy < w.input[0] && ix >= 0 && ix < w.input[1];
            int from = ((picture * w.input[0] + iy) * w.input[1] + ix) * channels + out / multiplier;
            v[0] = inside ? x[from] * dy[at * outs + out] : 0.0f;
        },
        [=](int out, float *sums) { dw[tap * outs + out] = sums[0]; }, partials + tap * gridDim.y * outs,
        counters + tap * gridDim.x);
}
