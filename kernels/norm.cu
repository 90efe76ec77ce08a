// Local response normalisation and batch normalisation of rows of `c` channels.

// Floats of a block's buffers, and the most channels of a row that it treats at a time. A row needs four times the
// radius more than its channels; `CudaDevice` refuses a radius beyond 128.
#define LRN_BUFFER 2048
#define LRN_CHANNELS 512

struct Lrn {
    int radius;
    float bias, alpha, beta;
};

// `s ^ -beta`.
__device__ inline float inverse_power(float s, float beta) {
    if (beta == 0.75f) {
        float root = rsqrtf(s);
        return root * sqrtf(root);
    }
    return beta == 0.5f ? rsqrtf(s) : powf(s, -beta);
}

// The rows and channels that a block treats. Blocks of 256 threads; the grid is (rows / `per_block`, channels / 512).
struct LrnTile {
    int start, width, halo, pitch, row, rows;

    __device__ LrnTile(int total_rows, int per_block, int c, int reach) {
        start = blockIdx.y * LRN_CHANNELS;
        width = at_most(c - start, LRN_CHANNELS);
        halo = reach;
        pitch = width + 2 * reach;
        row = blockIdx.x * per_block;
        rows = at_most(per_block, total_rows - row);
    }

    // The position in the tensor of the buffer's float `i`; -1 where there is no such channel.
    __device__ int find(int i, int c) const {
        int channel = start - halo + i % pitch;
        return channel < 0 || channel >= c ? -1 : (row + i / pitch) * c + channel;
    }
};

__device__ inline float lrn_base(const Lrn &p, const float *x, int at) {
    float squares = 0.0f;
    for (int d = -p.radius; d <= p.radius; d++) squares += x[at + d] * x[at + d];
    return p.bias + p.alpha * squares;
}

extern "C" __global__ void __launch_bounds__(256) lrn(const float *x, float *y, Lrn p, int rows, int per_block, int c) {
    __shared__ float values[LRN_BUFFER];
    LrnTile tile(rows, per_block, c, p.radius);
    for (int i = threadIdx.x; i < tile.rows * tile.pitch; i += blockDim.x) {
        int from = tile.find(i, c);
        values[i] = from < 0 ? 0.0f : x[from];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tile.rows * tile.width; i += blockDim.x) {
        int at = i / tile.width * tile.pitch + i % tile.width + tile.halo;
        y[tile.find(at, c)] = values[at] * inverse_power(lrn_base(p, values, at), p.beta);
    }
}

// With `s` the base of the power:
// `dx[i] = dy[i] s[i]^-beta - 2 alpha beta x[i] * sum over the window of dy[j] x[j] s[j]^(-beta - 1)`.
// With `relu` the gradient stops where `x`, the output of a relu, is zero.
extern "C" __global__ void __launch_bounds__(256)
lrn_grad(const float *x, const float *dy, float *dx, Lrn p, int relu, int rows, int per_block, int c) {
    __shared__ float values[LRN_BUFFER], terms[LRN_BUFFER], direct[LRN_BUFFER];
    LrnTile tile(rows, per_block, c, 2 * p.radius);
    for (int i = threadIdx.x; i < tile.rows * tile.pitch; i += blockDim.x) {
        int from = tile.find(i, c);
        values[i] = from < 0 ? 0.0f : x[from];
    }
    __syncthreads();
    int reached = tile.width + 2 * p.radius;
    for (int i = threadIdx.x; i < tile.rows * reached; i += blockDim.x) {
        int at = i / reached * tile.pitch + i % reached + p.radius, from = tile.find(at, c);
        terms[at] = 0.0f;
        if (from < 0) continue;
        float base = lrn_base(p, values, at), ratio = dy[from] * inverse_power(base, p.beta);
        direct[at] = ratio;
        terms[at] = ratio * values[at] / base;
    }
    __syncthreads();
    float factor = 2.0f * p.alpha * p.beta;
    for (int i = threadIdx.x; i < tile.rows * tile.width; i += blockDim.x) {
        int at = i / tile.width * tile.pitch + i % tile.width + tile.halo;
        float sum = 0.0f;
        for (int d = -p.radius; d <= p.radius; d++) sum += terms[at + d];
        bool stopped = relu && !(values[at] > 0.0f);
        dx[tile.find(at, c)] = stopped ? 0.0f : direct[at] - factor * values[at] * sum;
    }
}

// Mean of each channel, then the variance of each. The sums are of distances from the first row, which loses no digits where a mean
// is far from zero. What moving statistics are too large by goes where there is room for it; `unbias` makes the variance that of the
// population. Blocks as in `column_sums_sync`.
extern "C" __global__ void __launch_bounds__(256)
batch_norm_moments(const float *x, float *moments, const float *own_mean, const float *own_variance, float *mean_excess,
                   float *variance_excess, float unbias, int rows, int c, float *partials, unsigned int *counters) {
    column_sums_sync<2>(
        rows, c,
        [=](int row, int channel, float *v) {
            float distance = x[row * c + channel] - x[channel];
            v[0] = distance;
            v[1] = distance * distance;
        },
        [=](int channel, float *sums) {
            float shift = sums[0] / rows, variance = sums[1] / rows - shift * shift;
            float mean = x[channel] + shift;
            variance = variance < 0.0f ? 0.0f : variance;
            moments[channel] = mean;
            moments[c + channel] = variance;
            if (mean_excess) mean_excess[channel] = own_mean[channel] - mean;
            if (variance_excess) variance_excess[channel] = own_variance[channel] - unbias * variance;
        },
        partials, counters);
}

extern "C" __global__ void batch_norm(const float *x, const float *moments, const float *scale, const float *offset, float *y,
                                      float epsilon, int c, int n) {
    EACH(i, n) {
        int channel = i % c;
        float factor = scale[channel] / sqrtf(moments[c + channel] + epsilon);
        y[i] = (x[i] - moments[channel]) * factor + offset[channel];
    }
}

// The gradients by scale and offset, one after the other, and each once more where there is room for it.
extern "C" __global__ void __launch_bounds__(256)
batch_norm_sums(const float *x, const float *moments, const float *dy, float *gradients, float *dscale, float *doffset,
                float epsilon, int rows, int c, float *partials, unsigned int *counters) {
    column_sums_sync<2>(
        rows, c,
        [=](int row, int channel, float *v) {
            float g = dy[row * c + channel];
            v[0] = g * (x[row * c + channel] - moments[channel]);
            v[1] = g;
        },
        [=](int channel, float *sums) {
            float by_scale = sums[0] / sqrtf(moments[c + channel] + epsilon);
            gradients[channel] = by_scale;
            gradients[c + channel] = sums[1];
            if (dscale) dscale[channel] = by_scale;
            if (doffset) doffset[channel] = sums[1];
        },
        partials, counters);
}

// The gradient by the input, from those by scale and offset.
extern "C" __global__ void batch_norm_input_grad(const float *x, const float *moments, const float *scale, const float *dy,
                                                 const float *gradients, float *dx, float epsilon, int rows, int c, int n) {
    float weight = 1.0f / rows;
    EACH(i, n) {
        int channel = i % c;
        float inverse = 1.0f / sqrtf(moments[c + channel] + epsilon);
        float share = gradients[c + channel] * weight;
        float slope = gradients[channel] * inverse * weight;
        dx[i] = scale[channel] * inverse * (dy[i] - share - (x[i] - moments[channel]) * slope);
    }
}
