// Softmax cross-entropy with one right class per row, a warp to each row.

// Any of the results may be absent (null), but the mean needs the losses:
//   losses[b] = log(sum exp(logits[b])) - logits[b][labels[b]], relative to the row's maximum
//   dlogits[b] = upstream * (softmax(logits[b]) - onehot(labels[b])), upstream[b] where given, else `constant`
//   mean = the mean of the losses
// A label that is no class gives NaN. Blocks of 256 threads, eight rows each.
extern "C" __global__ void __launch_bounds__(256)
cross_entropy(const float *logits, const float *labels, const float *upstream, float constant, float *losses,
              float *dlogits, float *mean, int rows, int classes, unsigned int *counter) {
    int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    // Whole warps: all lanes of one have the same row.
    if (row < rows) {
        const float *x = logits + row * classes;
        float max = -bits(0x7f800000u), sum = 0.0f, label = labels[row];
        for (int c = lane; c < classes; c += 32) max = x[c] > max ? x[c] : max;
        max = warp_max_sync(max);
        for (int c = lane; c < classes; c += 32) sum += expf(x[c] - max);
        float log_sum = logf(warp_sum_sync(sum));
        bool right = label >= 0.0f && label < classes;
        float nan = bits(0x7fc00000u);
        if (losses && lane == 0) losses[row] = right ? log_sum - (x[(int)label] - max) : nan;
        if (dlogits) {
            float up = upstream ? upstream[row] : constant;
            for (int c = lane; c < classes; c += 32) {
                float p = expf(x[c] - max - log_sum);
                dlogits[row * classes + c] = right ? up * (c == (int)label ? p - 1.0f : p) : nan;
            }
        }
    }
    if (!mean || !last_block_sync(counter, gridDim.x)) return;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) sum += fresh(&losses[i]);
    sum = block_sum_sync(sum);
    if (threadIdx.x == 0) *mean = sum / rows;
}
