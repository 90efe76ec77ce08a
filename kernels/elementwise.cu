// Kernels that treat each element alone.

extern "C" __global__ void fill(float *out, float value, int n) {
    EACH(i, n) out[i] = value;
}

// `out = *value`, repeated.
extern "C" __global__ void broadcast(const float *value, float *out, int n) {
    float v = *value;
    EACH(i, n) out[i] = v;
}

extern "C" __global__ void scale(const float *x, float *out, float factor, int n) {
    EACH(i, n) out[i] = factor * x[i];
}

// `out = *factor * x`.
extern "C" __global__ void scale_by(const float *x, const float *factor, float *out, int n) {
    float f = *factor;
    EACH(i, n) out[i] = f * x[i];
}

extern "C" __global__ void add(const float *a, const float *b, float *out, int n) {
    EACH(i, n) out[i] = a[i] + b[i];
}

extern "C" __global__ void sub(const float *a, const float *b, float *out, int n) {
    EACH(i, n) out[i] = a[i] - b[i];
}

extern "C" __global__ void mul(const float *a, const float *b, float *out, int n) {
    EACH(i, n) out[i] = a[i] * b[i];
}

extern "C" __global__ void square(const float *x, float *out, int n) {
    EACH(i, n) out[i] = x[i] * x[i];
}

// `out = a + factor * x`.
extern "C" __global__ void add_scaled(const float *a, const float *x, float *out, float factor, int n) {
    EACH(i, n) out[i] = a[i] + factor * x[i];
}

extern "C" __global__ void relu(const float *x, float *out, int n) {
    EACH(i, n) out[i] = cut(x[i]);
}

// `dx = dy` where the output `y` is positive, else 0.
extern "C" __global__ void relu_grad(const float *dy, const float *y, float *dx, int n) {
    EACH(i, n) dx[i] = y[i] > 0.0f ? dy[i] : 0.0f;
}

// `out = x + bias` for rows of `channels`, cut at zero where asked.
extern "C" __global__ void bias_add(const float *x, const float *bias, float *out, int channels, int relu, int n) {
    EACH(i, n) {
        float v = x[i] + bias[i % channels];
        out[i] = relu ? cut(v) : v;
    }
}

// Rows of `left` floats of `a` and `right` of `b`, side by side; `n` floats in all.
extern "C" __global__ void concat(const float *a, const float *b, float *out, int left, int right, int n) {
    EACH(i, n) {
        int row = i / (left + right), column = i % (left + right);
        out[i] = column < left ? a[row * left + column] : b[row * right + column - left];
    }
}

// Columns `start .. start + len` of rows of `width` floats; `n` floats in all.
extern "C" __global__ void slice(const float *x, float *out, int start, int len, int width, int n) {
    EACH(i, n) out[i] = x[i / len * width + start + i % len];
}

// `out[columns][rows]` of `x[rows][columns]`, in tiles of 32 by blocks of 32 x 8 threads.
extern "C" __global__ void __launch_bounds__(256) transpose(const float *x, float *out, int rows, int columns) {
    // One more, so that a column lies in 32 banks.
    __shared__ float tile[32][33];
    int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32;
    for (int i = threadIdx.y; i < 32; i += 8)
        if (row + i < rows && column < columns) tile[i][threadIdx.x] = x[(row + i) * columns + column];
    __syncthreads();
    row = blockIdx.y * 32 + threadIdx.x;
    column = blockIdx.x * 32;
    for (int i = threadIdx.y; i < 32; i += 8)
        if (row < rows && column + i < columns) out[(column + i) * rows + row] = tile[threadIdx.x][i];
}
