// Sums: over everything, over rows, and over the slabs of several towers.

// `factor` times the sum of all elements, or of their squares. At most 256 blocks of 256 threads, a partial sum each.
extern "C" __global__ void __launch_bounds__(256)
sum(const float *x, float *out, int squares, float factor, int n, float *partials, unsigned int *counter) {
    float total = 0.0f;
    EACH(i, n) total += squares ? x[i] * x[i] : x[i];
    total = block_sum_sync(total);
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
    if (!last_block_sync(counter, gridDim.x)) return;
    total = block_sum_sync(threadIdx.x < gridDim.x ? fresh(&partials[threadIdx.x]) : 0.0f);
    if (threadIdx.x == 0) *out = factor * total;
}

// The sum of each column: the gradient of a bias. Blocks as in `column_sums_sync`.
extern "C" __global__ void __launch_bounds__(256)
column_sums(const float *x, float *out, int rows, int columns, float *partials, unsigned int *counters) {
    column_sums_sync<1>(
        rows, columns, [=](int row, int column, float *v) { v[0] = x[row * columns + column]; },
        [=](int column, float *sums) { out[column] = sums[0]; }, partials, counters);
}

// `relu_grad`, and the sum of each column of what it gives: the gradients of a layer's sum and of its bias.
extern "C" __global__ void __launch_bounds__(256)
relu_bias_grad(const float *dy, const float *y, float *dx, float *dbias, int rows, int columns, float *partials,
               unsigned int *counters) {
    column_sums_sync<1>(
        rows, columns,
        [=](int row, int column, float *v) {
            int i = row * columns + column;
            v[0] = y[i] > 0.0f ? dy[i] : 0.0f;
            dx[i] = v[0];
        },
        [=](int column, float *sums) { dbias[column] = sums[0]; }, partials, counters);
}

struct Slabs {
    const float *slab[8];
};

// `scale` times the sum of up to eight slabs as a fixed binary tree: five are `((0 + 1) + (2 + 3)) + 4`.
// `out` may be one of them.
extern "C" __global__ void tree_sum(Slabs slabs, int count, float scale, float *out, int n) {
    EACH(i, n) {
        float v[8];
        for (int s = 0; s < 8; s++) v[s] = s < count ? slabs.slab[s][i] : 0.0f;
        for (int distance = 1; distance < 8; distance *= 2)
            for (int s = 0; s + distance < 8; s += 2 * distance)
                if (s + distance < count) v[s] += v[s + distance];
        out[i] = scale * v[0];
    }
}
