// The built-in variables of a CUDA thread; shared by kernels and the stub driver, so without any other header.
#pragma once
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct FakecudaThread {
  uint3 thread, block, block_dim, grid_dim;
  void* dynamic_shared;
};
