"""The register of cases, and the kernels that they run."""
from cuda import *

CASES = {}


class Case:
    def __init__(self, run, environment, dies, check, peer):
        self.run, self.environment, self.dies, self.check, self.peer = run, environment, dies, check, peer


def case(dies=None, check=None, peer=False, **environment):
    """A case with these variables. It must crash and say `dies`; or `check(done, folder)` looks at what it left. A peer is started by others."""
    def add(function):
        CASES[function.__name__] = Case(function, environment, dies, check, peer)
        return function
    return add


def module(*options):
    return load(compile_kernels(KERNELS, "--gpu-architecture=sm_90", *options))


KERNELS = r"""
extern "C" __global__ void fill(float* out, float value, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = value;
}
extern "C" __global__ void add_one(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1.0f;
}
// Shared memory of both kinds, shuffles, an atomic.
extern "C" __global__ void __launch_bounds__(256) total(const float* __restrict__ x, float* out, int n) {
  extern __shared__ float part[];
  __shared__ float unused[32];
  float s = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
  for (int o = 16; o; o >>= 1) s += __shfl_down_sync(0xffffffffu, s, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < blockDim.x / 32; w++) s += part[w];
    atomicAdd(out, s);
  }
}
// lane, ballot of odd lanes, count over the block, rotated lane, value of a lane that is not there, quarters
extern "C" __global__ void warps(int* out) {
  int t = threadIdx.x + blockDim.x * threadIdx.y, lane = t % 32;
  int* o = out + 6 * t;
  o[0] = lane;
  o[1] = __ballot_sync(~0u, lane & 1);
  o[2] = __syncthreads_count(t % 3 == 0);
  o[3] = __shfl_sync(~0u, lane, lane + 1);
  o[4] = __shfl_xor_sync(~0u, lane, 16);
  o[5] = __shfl_down_sync(~0u, lane, 4, 8);
  if (lane < 8) {
    __syncwarp(0xff);
    o[3] += 100 * __all_sync(0xff, 1);
  }
}
extern "C" __global__ void uninitialised(float* out) {
  __shared__ float s[64];
  if (threadIdx.x > 1000) s[0] = 1.0f;
  out[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void divergent(float* out) {
  if (threadIdx.x % 2) __syncthreads();
  else __shfl_sync(~0u, 1, 0);
}
extern "C" __global__ void past_the_end(float* out, int n) {
  if (threadIdx.x == 0) out[n] = 1.0f;
}
extern "C" __global__ void dynamic_past_the_end(float* out) {
  extern __shared__ float s[];
  s[threadIdx.x] = 1.0f;
}
extern "C" __global__ void vectors(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }
extern "C" __global__ void last_block_wins(float* out) { out[0] = float(blockIdx.x * blockDim.x + threadIdx.x); }
template <class T> __global__ void never(T* x) {}
#ifdef LATER
extern "C" __global__ void later(int* out) { *out = LATER; }
#endif
"""
