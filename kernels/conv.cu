// Convolutions as matrix products whose left operand is read from the picture as it is needed (implicit GEMM). For
// machines without cuDNN, for the paddings that cuDNN does not know, and with factors rounded to bf16.

#define TILE 64
#define DEPTH 16

struct Conv {
    Window window;
    int n, in_channels, out_channels;
};

// A position in a picture of the output or of the input, and a position of the kernel with a channel.
struct Position {
    int picture, y, x;
};

struct Tap {
    int y, x, channel;
};

__device__ inline Position position(int i, const int *extent) {
    return {i / extent[1] / extent[0], i / extent[1] % extent[0], i % extent[1]};
}

__device__ inline Tap tap(int i, const Window &w, int channels) {
    int at = i / channels;
    return {at / w.kernel[1], at % w.kernel[1], i % channels};
}

// The input under an output position and a tap.
__device__ inline float input_at(const Conv &c, const float *x, Position o, Tap t) {
    const Window &w = c.window;
    int iy = o.y * w.stride[0] - w.pad[0] + t.y, ix = o.x * w.stride[1] - w.pad[1] + t.x;
    if (iy < 0 || iy >= w.input[0] || ix < 0 || ix >= w.input[1]) return 0.0f;
    return x[((o.picture * w.input[0] + iy) * w.input[1] + ix) * c.in_channels + t.channel];
}

// The gradient of the output whose window has the input position under a tap.
__device__ inline float output_at(const Conv &c, const float *dy, Position i, Tap t) {
    const Window &w = c.window;
    int y = i.y + w.pad[0] - t.y, x = i.x + w.pad[1] - t.x;
    if (y < 0 || x < 0 || y % w.stride[0] || x % w.stride[1]) return 0.0f;
    y /= w.stride[0];
    x /= w.stride[1];
    if (y >= w.output[0] || x >= w.output[1]) return 0.0f;
    return dy[((i.picture * w.output[0] + y) * w.output[1] + x) * c.out_channels + t.channel];
}

// Where, in the block's 64 x 64 tile, sum `j` of the `i`-th four of a thread lies. With factors in bf16 it is the tensor cores'
// way: a warp has 16 x 32 sums, in four pieces of 8 columns.
template <bool BF16>
__device__ inline int row_in_tile(int i, int j) {
    int t = threadIdx.x;
    return BF16 ? t / 32 % 4 * 16 + t % 32 / 4 + j / 2 * 8 : t / 16 * 4 + i;
}

template <bool BF16>
__device__ inline int column_in_tile(int i, int j) {
    int t = threadIdx.x;
    return BF16 ? t / 128 * 32 + i * 8 + t % 4 * 2 + j % 2 : t % 16 * 4 + j;
}

// What threads share of the two factors, `DEPTH` of the sums' terms at a time.
template <bool BF16>
struct Tiles;

// Rows of terms: those of one thread lie side by side. Four more floats keep a row's writes in different banks.
template <>
struct Tiles<false> {
    float left[DEPTH][TILE + 4], right[DEPTH][TILE + 4];

    __device__ void set_left(int row, int depth, float x) { left[depth][row] = x; }
    __device__ void set_right(int column, int depth, float x) { right[depth][column] = x; }
    __device__ void add_sync(float (&sums)[4][4]) const {
        int t = threadIdx.x;
        for (int k = 0; k < DEPTH; k++) {
            float x[4], y[4];
            for (int i = 0; i < 4; i++) {
                x[i] = left[k][t / 16 * 4 + i];
                y[i] = right[k][t % 16 * 4 + i];
            }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) sums[i][j] += x[i] * y[j];
        }
    }
};

// Pairs of neighbouring terms in one number, as tensor cores take them. Four more numbers keep the reads of a warp in different banks.
template <>
struct Tiles<true> {
    unsigned int left[TILE][DEPTH / 2 + 4], right[TILE][DEPTH / 2 + 4];

    __device__ void set_left(int row, int depth, float x) { ((unsigned short *)left[row])[depth] = to_bf16(x); }
    __device__ void set_right(int column, int depth, float x) { ((unsigned short *)right[column])[depth] = to_bf16(x); }
    __device__ void add_sync(float (&sums)[4][4]) const {
        int t = threadIdx.x, lane = t % 32, row = t / 32 % 4 * 16 + lane / 4, pair = lane % 4;
        unsigned int a[4] = {left[row][pair], left[row + 8][pair], left[row][pair + 4], left[row + 8][pair + 4]};
        for (int i = 0; i < 4; i++) {
            const unsigned int *column = right[t / 128 * 32 + i * 8 + lane / 4];
            unsigned int b[2] = {column[pair], column[pair + 4]};
            tensor_product_sync(a, b, sums[i]);
        }
    }
};

// The 4 x 4 sums of this thread in the block's tile of `a[m][k] b[k][n]`, over `k` in `[first, end)`, in order.
//
// `a(row, depth)` combines what `row_of(i)` and `depth_of(k)` found; each is asked for once. `A_ALONG_K` and `B_ALONG_K` say
// which neighbours lie side by side in memory. 256 threads.
template <bool BF16, bool A_ALONG_K, bool B_ALONG_K, class RowOf, class DepthOf, class A, class B>
__device__ void product_sync(int m, int n, int first, int end, RowOf row_of, DepthOf depth_of, A a, B b, float (&sums)[4][4]) {
    __shared__ Tiles<BF16> tiles;
    int t = threadIdx.x, row0 = blockIdx.x * TILE, column0 = blockIdx.y * TILE;
    decltype(row_of(0)) rows[4];
    for (int i = 0; i < 4; i++) {
        int row = row0 + (A_ALONG_K ? t / DEPTH + i * DEPTH : t % TILE);
        rows[i] = row_of(at_most(row, m - 1));
        if (!A_ALONG_K) break;
    }
    for (int k0 = first; k0 < end; k0 += DEPTH) {
        for (int i = 0; i < 4; i++) {
            int row = A_ALONG_K ? t / DEPTH + i * DEPTH : t % TILE;
            int depth = A_ALONG_K ? t % DEPTH : t / TILE + i * (DEPTH / 4);
            bool inside = row0 + row < m && k0 + depth < end;
            tiles.set_left(row, depth, inside ? a(rows[A_ALONG_K ? i : 0], depth_of(k0 + depth)) : 0.0f);
            int column = B_ALONG_K ? t / DEPTH + i * DEPTH : t % TILE;
            depth = B_ALONG_K ? t % DEPTH : t / TILE + i * (DEPTH / 4);
            inside = column0 + column < n && k0 + depth < end;
            tiles.set_right(column, depth, inside ? b(k0 + depth, column0 + column) : 0.0f);
        }
        __syncthreads();
        tiles.add_sync(sums);
        __syncthreads();
    }
}

// Calls `store(row, column, sum)` for the sums of this thread that lie in the result.
template <bool BF16, class Store>
__device__ void each_sum(int m, int n, float (&sums)[4][4], Store store) {
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int row = blockIdx.x * TILE + row_in_tile<BF16>(i, j), column = blockIdx.y * TILE + column_in_tile<BF16>(i, j);
            if (row < m && column < n) store(row, column, sums[i][j]);
        }
}

// `y = x * filter`, with a bias (null for none), cut at zero where asked.
template <bool BF16>
__device__ void conv_sync(const float *x, const float *filter, const float *bias, float *y, Conv c, int relu) {
    const Window &w = c.window;
    int m = c.n * w.output[0] * w.output[1], n = c.out_channels, k = w.kernel[0] * w.kernel[1] * c.in_channels;
    float sums[4][4] = {};
    product_sync<BF16, true, false>(
        m, n, 0, k, [&](int i) { return position(i, w.output); }, [&](int i) { return tap(i, w, c.in_channels); },
        [&](Position o, Tap t) { return input_at(c, x, o, t); },
        [&](int depth, int column) { return filter[depth * n + column]; }, sums);
    each_sum<BF16>(m, n, sums, [&](int row, int column, float sum) {
        if (bias) sum += bias[column];
        y[row * n + column] = relu ? cut(sum) : sum;
    });
}

template <bool BF16>
__device__ void conv_input_grad_sync(const float *dy, const float *filter, float *dx, Conv c) {
    const Window &w = c.window;
    int m = c.n * w.input[0] * w.input[1], n = c.in_channels, k = w.kernel[0] * w.kernel[1] * c.out_channels;
    float sums[4][4] = {};
    product_sync<BF16, true, true>(
        m, n, 0, k, [&](int i) { return position(i, w.input); }, [&](int i) { return tap(i, w, c.out_channels); },
        [&](Position i, Tap t) { return output_at(c, dy, i, t); },
        [&](int depth, int column) {
            int at = depth / c.out_channels, out = depth % c.out_channels;
            return filter[(at * n + column) * c.out_channels + out];
        },
        sums);
    each_sum<BF16>(m, n, sums, [&](int row, int column, float sum) { dx[row * n + column] = sum; });
}

// The positions of all pictures are cut into `gridDim.z` chunks of `per`, whose sums are added in order by the last
// block of a tile. `partials` holds `gridDim.z` results, `counters` one number per tile.
template <bool BF16>
__device__ void conv_filter_grad_sync(const float *x, const float *dy, float *dw, Conv c, int per, float *partials, unsigned int *counters) {
    const Window &w = c.window;
    int m = w.kernel[0] * w.kernel[1] * c.in_channels, n = c.out_channels, k = c.n * w.output[0] * w.output[1];
    int first = blockIdx.z * per, chunks = gridDim.z;
    float sums[4][4] = {};
    product_sync<BF16, false, false>(
        m, n, first, at_most(first + per, k), [&](int i) { return tap(i, w, c.in_channels); },
        [&](int i) { return position(i, w.output); }, [&](Tap t, Position o) { return input_at(c, x, o, t); },
        [&](int depth, int column) { return dy[depth * n + column]; }, sums);
    each_sum<BF16>(m, n, sums, [&](int row, int column, float sum) { partials[(blockIdx.z * m + row) * n + column] = sum; });
    if (!last_block_sync(&counters[blockIdx.y * gridDim.x + blockIdx.x], chunks)) return;
    each_sum<BF16>(m, n, sums, [&](int row, int column, float) {
        float sum = 0.0f;
        for (int chunk = 0; chunk < chunks; chunk++) sum += fresh(&partials[(chunk * m + row) * n + column]);
        dw[row * n + column] = sum;
    });
}

extern "C" __global__ void __launch_bounds__(256)
conv(const float *x, const float *filter, const float *bias, float *y, Conv c, int relu) {
    conv_sync<false>(x, filter, bias, y, c, relu);
}

extern "C" __global__ void __launch_bounds__(256)
conv_bf16(const float *x, const float *filter, const float *bias, float *y, Conv c, int relu) {
    conv_sync<true>(x, filter, bias, y, c, relu);
}

extern "C" __global__ void __launch_bounds__(256)
conv_input_grad(const float *dy, const float *filter, float *dx, Conv c) {
    conv_input_grad_sync<false>(dy, filter, dx, c);
}

extern "C" __global__ void __launch_bounds__(256)
conv_input_grad_bf16(const float *dy, const float *filter, float *dx, Conv c) {
    conv_input_grad_sync<true>(dy, filter, dx, c);
}

extern "C" __global__ void __launch_bounds__(256)
conv_filter_grad(const float *x, const float *dy, float *dw, Conv c, int per, float *partials, unsigned int *counters) {
    conv_filter_grad_sync<false>(x, dy, dw, c, per, partials, counters);
}

extern "C" __global__ void __launch_bounds__(256)
conv_filter_grad_bf16(const float *x, const float *dy, float *dw, Conv c, int per, float *partials, unsigned int *counters) {
    conv_filter_grad_sync<true>(x, dy, dw, c, per, partials, counters);
}
