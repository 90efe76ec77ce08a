// What the kernels share. Pasted in front of them, as NVRTC finds no headers: nothing here or there needs any.
//
// Tensors are f32, pictures NHWC, filters HWIO. A kernel that adds up does so in an order that is fixed by the shape
// alone, so that results have the same bits on every run and every card. Functions that hold barriers, which every
// thread of a block must reach, say so by `_sync`.

// Each `i` below `n`, shared out over all threads of the grid.
#define EACH(i, n) \
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += gridDim.x * blockDim.x)

// How a kernel slides over a picture; see `graph::Window`. Pairs are height, width.
struct Window {
    int kernel[2], stride[2], pad[2], input[2], output[2];
};

// A range of taps or windows.
struct Range {
    int first, end;
};

__device__ inline int at_least(int a, int b) { return a > b ? a : b; }
__device__ inline int at_most(int a, int b) { return a < b ? a : b; }

// Input positions of dimension `d` under output position `o`.
__device__ inline Range inputs_of(const Window &w, int d, int o) {
    int start = o * w.stride[d] - w.pad[d];
    return {at_least(start, 0), at_most(start + w.kernel[d], w.input[d])};
}

// Output positions of dimension `d` whose windows hold input position `i`.
__device__ inline Range outputs_of(const Window &w, int d, int i) {
    int start = i + w.pad[d];
    int before = start - w.kernel[d];
    return {before < 0 ? 0 : before / w.stride[d] + 1, at_most(start / w.stride[d] + 1, w.output[d])};
}

// The float of these bits.
__device__ inline float bits(unsigned int u) {
    union {
        unsigned int u;
        float f;
    } both = {u};
    return both.f;
}

// The nearest bf16, as its bits; of two equally near ones the even one.
__device__ inline unsigned short to_bf16(float x) {
    union {
        float f;
        unsigned int u;
    } both = {x};
    unsigned int u = both.u;
    if ((u & 0x7fffffffu) > 0x7f800000u) return (unsigned short)(u >> 16 | 0x40u);
    return (unsigned short)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

// `x < 0 ? 0 : x`; NaN passes.
__device__ inline float cut(float x) { return x < 0.0f ? 0.0f : x; }

// A value that another block wrote.
__device__ inline float fresh(const float *x) { return *(const volatile float *)x; }

// The sum of one value per lane of a full warp, in every lane: the same tree in each.
__device__ inline float warp_sum_sync(float value) {
    for (int distance = 16; distance > 0; distance /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

__device__ inline float warp_max_sync(float value) {
    for (int distance = 16; distance > 0; distance /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, value, distance);
        value = other > value ? other : value;
    }
    return value;
}

// The sum of one value per thread of a block of 256 in one dimension, in the first warp.
__device__ inline float block_sum_sync(float value) {
    __shared__ float sums[8];
    value = warp_sum_sync(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    return threadIdx.x < 32 ? warp_sum_sync(threadIdx.x < 8 ? sums[threadIdx.x] : 0.0f) : 0.0f;
}

// Whether this is the last of `blocks` blocks to get here; it sees what the others have written before (by `fresh`).
// The counter is 0 before the first and after the last.
__device__ inline bool last_block_sync(unsigned int *counter, unsigned int blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        last = atomicAdd(counter, 1u) == blocks - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// The sum of eight rows of 32 values each, in the first row.
__device__ inline float rows_sum_sync(float value) {
    __shared__ float sums[8][32];
    __syncthreads();
    sums[threadIdx.y][threadIdx.x] = value;
    __syncthreads();
    for (int half = 4; half > 0; half /= 2) {
        if (threadIdx.y < half) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
        __syncthreads();
    }
    return sums[0][threadIdx.x];
}

// `N` sums over the rows of a table: `value(row, column, v)` gives the terms, `store(column, sums)` takes the sums.
//
// Blocks of 32 x 8 threads; the grid is (columns / 32, chunks of rows). `partials` holds `N * chunks * columns` floats,
// `counters` one number per 32 columns.
template <int N, class Value, class Store>
__device__ void column_sums_sync(int rows, int columns, Value value, Store store, float *partials, unsigned int *counters) {
    int column = blockIdx.x * 32 + threadIdx.x, chunks = gridDim.y;
    bool inside = column < columns;
    int per = (rows + chunks - 1) / chunks;
    int end = at_most((blockIdx.y + 1) * per, rows);
    float sums[N] = {};
    for (int row = blockIdx.y * per + threadIdx.y; inside && row < end; row += 8) {
        float terms[N];
        value(row, column, terms);
        for (int i = 0; i < N; i++) sums[i] += terms[i];
    }
    for (int i = 0; i < N; i++) {
        float sum = rows_sum_sync(sums[i]);
        if (threadIdx.y == 0 && inside) partials[(i * chunks + blockIdx.y) * columns + column] = sum;
    }
    if (!last_block_sync(counters + blockIdx.x, chunks)) return;
    for (int i = 0; i < N; i++) {
        sums[i] = 0.0f;
        for (int chunk = threadIdx.y; inside && chunk < chunks; chunk += 8)
            sums[i] += fresh(&partials[(i * chunks + chunk) * columns + column]);
        sums[i] = rows_sum_sync(sums[i]);
    }
    if (threadIdx.y == 0 && inside) store(column, sums);
}

// Adds to the 16 x 8 sums of a full warp the product of 16 x 16 and 16 x 8 factors in bf16, sums in f32.
//
// With `g = lane / 4` and `t = lane % 4`, a lane has the left factor's pairs of terms `t` and `t + 4` in rows `g` and `g + 8`
// (`a`: by row, then by pair), the right one's in column `g` (`b`), and sums in rows `g` and `g + 8`, columns `2 t` and `2 t + 1`.
__device__ inline void tensor_product_sync(const unsigned int (&a)[4], const unsigned int (&b)[2], float (&sums)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int pair = 0; pair < 8; pair++) {
        unsigned int x[2], y[2];
        for (int i = 0; i < 2; i++) {
            x[i] = __shfl_sync(0xffffffffu, a[pair / 4 * 2 + i], g * 4 + pair % 4);
            y[i] = __shfl_sync(0xffffffffu, b[pair / 4], (2 * t + i) * 4 + pair % 4);
        }
        // The lower half of a pair is its first term.
        for (int i = 0; i < 4; i++) {
            sums[i] += bits(x[i / 2] << 16) * bits(y[i % 2] << 16);
            sums[i] += bits(x[i / 2] & 0xffff0000u) * bits(y[i % 2] & 0xffff0000u);
        }
    }
#endif
}
