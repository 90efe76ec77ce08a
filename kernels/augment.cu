// The tutorial's distortion of pictures: crop, flip, contrast and standardisation as one affine pass per channel. Brightness
// cancels. The bits are those of `data::distort`: sums are whole numbers, and no rounding is left out.

#define SIDE 32
#define CROP 24
#define AREA (CROP * CROP)

// A block of 256 threads per picture. `pictures` are 3 planes of 32 x 32 bytes each; `draws` are five floats per picture of
// the batch: its number, the crop's first row and column, whether left and right are swapped, the contrast.
extern "C" __global__ void __launch_bounds__(256) augment(const unsigned char *pictures, const float *draws, float *out, int count) {
    __shared__ unsigned int sums[3], squares[3];
    __shared__ float scale, centre[3], offset[3];
    const float *draw = draws + 5 * blockIdx.x;
    int number = at_most(at_least((int)draw[0], 0), count - 1);
    int top = at_most(at_least((int)draw[1], 0), SIDE - CROP), left = at_most(at_least((int)draw[2], 0), SIDE - CROP);
    bool flip = draw[3] != 0.0f;
    const unsigned char *picture = pictures + (size_t)number * 3 * SIDE * SIDE;
    if (threadIdx.x < 3) sums[threadIdx.x] = squares[threadIdx.x] = 0u;
    __syncthreads();
    for (int c = 0; c < 3; c++) {
        unsigned int sum = 0u, square = 0u;
        for (int i = threadIdx.x; i < AREA; i += blockDim.x) {
            unsigned int x = picture[(c * SIDE + top + i / CROP) * SIDE + left + i % CROP];
            sum += x;
            square += x * x;
        }
        // Whole numbers: their order does not matter.
        atomicAdd(&sums[c], sum);
        atomicAdd(&squares[c], square);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double contrast = draw[4], means[3], n = AREA, mean = 0.0, variance = 0.0;
        for (int c = 0; c < 3; c++) {
            means[c] = __ddiv_rn((double)sums[c], n);
            mean = __dadd_rn(mean, means[c]);
        }
        mean = __ddiv_rn(mean, 3.0);
        for (int c = 0; c < 3; c++) {
            unsigned long long sum = sums[c], square = squares[c];
            double own = __ddiv_rn((double)(AREA * square - sum * sum), (double)(AREA * AREA));
            double apart = __dadd_rn(means[c], -mean);
            variance = __dadd_rn(variance, __dadd_rn(__dmul_rn(__dmul_rn(contrast, contrast), own), __dmul_rn(apart, apart)));
        }
        double deviation = __dsqrt_rn(__ddiv_rn(variance, 3.0)), least = __ddiv_rn(1.0, __dsqrt_rn(3.0 * AREA));
        if (deviation < least) deviation = least;
        scale = (float)__ddiv_rn(contrast, deviation);
        for (int c = 0; c < 3; c++) {
            double middle = round(means[c]);
            double moved = __dadd_rn(__dadd_rn(__dmul_rn(contrast, __dadd_rn(middle, -means[c])), means[c]), -mean);
            centre[c] = (float)middle;
            offset[c] = (float)__ddiv_rn(moved, deviation);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * AREA; i += blockDim.x) {
        int c = i % 3, y = i / 3 / CROP, x = i / 3 % CROP;
        float value = picture[(c * SIDE + top + y) * SIDE + left + (flip ? CROP - 1 - x : x)];
        out[(size_t)blockIdx.x * 3 * AREA + i] = __fadd_rn(__fmul_rn(scale, __fsub_rn(value, centre[c])), offset[c]);
    }
}
