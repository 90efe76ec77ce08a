// Runs the blocks of a kernel on the calling OS thread.
#pragma once
#include <cstddef>

namespace fake {

// What a compiled module says about a kernel: the layout is that of the table which nvrtc.cpp writes behind the source.
struct Kernel {
  const char* name;
  void (*call)(void** arguments);  // one CUDA thread
  unsigned arguments;
  const unsigned* sizes;
  const unsigned* pointee_alignments;  // 0 where the argument is no pointer
  unsigned max_threads;                // of __launch_bounds__, or 0
};

struct Launch {
  const Kernel* kernel;
  unsigned grid[3], block[3];
  size_t dynamic_shared;
  void** arguments;
  char* static_shared;  // this OS thread's __shared__ variables, to be poisoned; may be null
  size_t static_shared_bytes;
};
void run_kernel(const Launch& launch);

}  // namespace fake
