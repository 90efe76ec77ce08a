// A block of CUDA threads as fibers of one OS thread.
//
// A fiber runs one CUDA thread after the other, by plain calls; only a thread that meets a barrier stays behind on its stack, and the next
// thread begins on another. So a kernel without barriers is a loop. Warp operations wait for the lanes of their mask, and are computed at the
// moment when the last of them has come.
#include "block.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "driver.h"
#include "../include/fakecuda_thread.h"

extern "C" {
__attribute__((visibility("default"), tls_model("initial-exec"))) thread_local FakecudaThread fakecuda_thread{};
}

extern "C" void __sanitizer_start_switch_fiber(void**, const void*, size_t) __attribute__((weak));
extern "C" void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) __attribute__((weak));

#ifndef __x86_64__
#error "the switch between fibers is written for x86-64"
#endif
#if __AVX512F__
#define MORE_REGISTERS , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#else
#define MORE_REGISTERS
#endif
// Leaves the stack for another, and goes on here when somebody comes back. Inline and without call or return: all threads of a block wait at
// the same call, so the processor's guess where it returns to stays right.
static inline __attribute__((always_inline)) void change_stack(void** from, void* to) {
  asm volatile(
      "subq $128, %%rsp\n"  // below it may lie what a leaf function keeps
      "pushq %%rbp\n"
      "leaq 1f(%%rip), %%rdx\n"
      "pushq %%rdx\n"
      "movq %%rsp, (%0)\n"
      "movq %1, %%rsp\n"
      "popq %%rdx\n"
      "jmp *%%rdx\n"
      "1:\n"
      "popq %%rbp\n"
      "addq $128, %%rsp\n"
      : "+D"(from), "+S"(to)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
        "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15" MORE_REGISTERS);
}

namespace fake {

constexpr size_t STACK = 256 << 10;  // of addresses; only what is touched costs memory
constexpr uint64_t CANARY = 0x5AFE57ACC0DE0001, NOT_A_VALUE = 0x7FCD7FCD7FCD7FCD;
enum class Operation : unsigned char { Barrier, Shuffle, Ballot };

struct Context {
  void* stack_pointer = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;
  void* sanitizer = nullptr;
};

static inline __attribute__((always_inline)) void jump(Context& from, Context& to) {
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&from.sanitizer, to.bottom, to.size);
  change_stack(&from.stack_pointer, to.stack_pointer);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(from.sanitizer, nullptr, nullptr);
}

struct Fiber {
  Context context;
  char* stack;
};

// A CUDA thread that waits.
struct Waiting {
  Fiber* fiber;
  unsigned mask;
  Operation operation;
  int source;  // of a shuffle; of a ballot or a block barrier, the predicate
  uint64_t value, result;
};

struct Block {
  const Launch* launch = nullptr;
  unsigned threads = 0, next = 0, live = 0;
  bool reverse = false;
  Context scheduler;
  Fiber* running = nullptr;
  unsigned running_thread = 0;
  std::vector<Fiber*> fibers, idle;
  uint3 indices[1024];  // threadIdx of each
  Waiting waiting[1024];
  unsigned alive[32], at_warp[32], at_block[32];
  unsigned block_waiting = 0, votes = 0;

  ~Block() {
    for (Fiber* fiber : fibers) {
      munmap(fiber->stack, STACK);
      delete fiber;
    }
  }
  void run();
  void resume(unsigned thread);
  void suspend();
  bool release_warp(unsigned warp);
  unsigned ordered(unsigned i, unsigned n) const { return reverse ? n - 1 - i : i; }

 private:
  Fiber* fresh();
  static void enter();
  void set_thread(unsigned thread);
};
static thread_local Block* block = nullptr;

void Block::set_thread(unsigned thread) {
  running_thread = thread;
  fakecuda_thread.thread = indices[thread];
}

// The first function on a fiber's stack.
void Block::enter() {
  Block& b = *block;
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, &b.scheduler.bottom, &b.scheduler.size);
  Fiber* self = b.running;
  for (;;) {
    do {
      b.set_thread(b.ordered(b.next++, b.threads));
      b.launch->kernel->call(b.launch->arguments);
      b.live--;
      b.alive[b.running_thread / 32] &= ~(1u << b.running_thread % 32);
    } while (b.next < b.threads);
    b.idle.push_back(self);
    jump(self->context, b.scheduler);
  }
}

Fiber* Block::fresh() {
  if (!idle.empty()) {
    Fiber* fiber = idle.back();
    idle.pop_back();
    return fiber;
  }
  auto* fiber = new Fiber;
  void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) {
    complain("no memory for the stacks of a block");
    abort();
  }
  fiber->stack = static_cast<char*>(stack);
  *reinterpret_cast<uint64_t*>(fiber->stack) = CANARY;
  // Tops differ in their low bits: stacks at equal distances would all want the same lines of the cache.
  auto** top = reinterpret_cast<void**>(fiber->stack + STACK - fibers.size() % 61 * 1088);
  *--top = nullptr;  // where a return address would be
  *--top = reinterpret_cast<void*>(&Block::enter);
  fiber->context = {top, fiber->stack, STACK, nullptr};
  fibers.push_back(fiber);
  return fiber;
}

inline __attribute__((always_inline)) void Block::resume(unsigned thread) {
  running = waiting[thread].fiber;
  set_thread(thread);
  jump(scheduler, running->context);
}

// Called by a CUDA thread; returns when the scheduler resumes it.
inline __attribute__((always_inline)) void Block::suspend() {
  waiting[running_thread].fiber = running;
  jump(running->context, scheduler);
}

bool Block::release_warp(unsigned warp) {
  unsigned ready = 0;
  Waiting* lanes = waiting + warp * 32;
  for (unsigned rest = at_warp[warp]; rest; rest &= rest - 1) {
    unsigned group = lanes[__builtin_ctz(rest)].mask & alive[warp];
    if ((group & at_warp[warp]) == group) ready |= group;
    if (ready == at_warp[warp]) break;
  }
  if (!ready) return false;
  for (unsigned rest = ready; rest; rest &= rest - 1) {
    Waiting& lane = lanes[__builtin_ctz(rest)];
    if (lane.operation == Operation::Shuffle) {
      unsigned bit = 1u << (lane.source & 31);
      lane.result = ready & lane.mask & bit ? lanes[lane.source & 31].value : NOT_A_VALUE;
    } else if (lane.operation == Operation::Ballot) {
      unsigned ballot = 0;
      for (unsigned other = ready & lane.mask; other; other &= other - 1)
        if (lanes[__builtin_ctz(other)].source) ballot |= other & -other;
      lane.result = ballot;
    }
  }
  at_warp[warp] &= ~ready;
  for (unsigned i = 0; i < 32; i++)
    if (unsigned lane = ordered(i, 32); ready >> lane & 1) resume(warp * 32 + lane);
  return true;
}

void Block::run() {
  unsigned warps = (threads + 31) / 32;
  next = 0;
  live = threads;
  block_waiting = votes = 0;
  for (unsigned w = 0; w < warps; w++) {
    unsigned lanes = std::min(threads - w * 32, 32u);
    alive[w] = lanes == 32 ? ~0u : (1u << lanes) - 1;
    at_warp[w] = at_block[w] = 0;
  }
  while (next < threads) {
    running = fresh();
    jump(scheduler, running->context);
  }
  while (live) {
    bool progress = false;
    for (unsigned i = 0; i < warps; i++)
      while (at_warp[ordered(i, warps)] && release_warp(ordered(i, warps))) progress = true;
    if (live && block_waiting == live) {
      unsigned released[32], count = 0;
      for (unsigned w = 0; w < warps; w++) {
        released[w] = at_block[w];
        at_block[w] = 0;
        for (unsigned rest = released[w]; rest; rest &= rest - 1) count += waiting[w * 32 + unsigned(__builtin_ctz(rest))].source != 0;
      }
      block_waiting = 0;
      votes = count;
      for (unsigned i = 0; i < threads; i++)
        if (unsigned t = ordered(i, threads); released[t / 32] >> t % 32 & 1) {
          waiting[t].result = count;
          resume(t);
        }
      progress = true;
    }
    if (live && !progress) {
      complain(std::string("kernel ") + launch->kernel->name + ": threads wait at different barriers (a barrier in divergent code, or a mask that names lanes which do not come)");
      abort();
    }
  }
}

// Says which kernel reached where no memory is; then it is a crash like any other.
static struct sigaction crash_before;
static thread_local const Kernel* running_kernel = nullptr;
static void crashed(int number, siginfo_t* info, void*) {
  if (running_kernel) {
    char line[256];
    int n = snprintf(line, sizeof line, "fakecuda: kernel %s: block %u,%u,%u, thread %u,%u,%u: illegal address %p\n", running_kernel->name, fakecuda_thread.block.x,
                     fakecuda_thread.block.y, fakecuda_thread.block.z, fakecuda_thread.thread.x, fakecuda_thread.thread.y, fakecuda_thread.thread.z, info->si_addr);
    (void)!write(2, line, size_t(n));
  }
  sigaction(number, &crash_before, nullptr);  // the instruction runs again, and meets the handler before this one
}
static void watch_for_crashes() {
  if (__sanitizer_start_switch_fiber) return;  // AddressSanitizer says more
  struct sigaction action = {};
  action.sa_sigaction = crashed;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &crash_before);
}

void run_kernel(const Launch& launch) {
  static std::once_flag once;
  std::call_once(once, watch_for_crashes);
  static thread_local std::unique_ptr<Block> mine;
  if (!mine) mine = std::make_unique<Block>();
  block = mine.get();
  static const bool reverse = variable("FAKE_CUDA_ORDER", "forward") == std::string("reverse");
  Block& b = *block;
  b.launch = &launch;
  b.reverse = reverse;
  b.threads = launch.block[0] * launch.block[1] * launch.block[2];
  for (unsigned t = 0; t < b.threads; t++) b.indices[t] = {t % launch.block[0], t / launch.block[0] % launch.block[1], t / (launch.block[0] * launch.block[1])};
  // Exactly as large as asked for: AddressSanitizer then sees the end.
  void* shared = nullptr;
  if (posix_memalign(&shared, 128, std::max<size_t>(launch.dynamic_shared, 1))) abort();
  std::unique_ptr<char, decltype(&free)> dynamic(static_cast<char*>(shared), free);
  running_kernel = launch.kernel;
  fakecuda_thread.block_dim = {launch.block[0], launch.block[1], launch.block[2]};
  fakecuda_thread.grid_dim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  fakecuda_thread.dynamic_shared = dynamic.get();
  uint64_t blocks = uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2];
  for (uint64_t i = 0; i < blocks; i++) {
    uint64_t at = reverse ? blocks - 1 - i : i;
    fakecuda_thread.block = {unsigned(at % launch.grid[0]), unsigned(at / launch.grid[0] % launch.grid[1]), unsigned(at / launch.grid[0] / launch.grid[1])};
    if (launch.dynamic_shared) poison(dynamic.get(), launch.dynamic_shared);
    if (launch.static_shared && i < 4) poison(launch.static_shared, launch.static_shared_bytes);  // the first blocks are enough to find a missing store
    b.run();
  }
  running_kernel = nullptr;
  for (Fiber* fiber : b.fibers)
    if (*reinterpret_cast<uint64_t*>(fiber->stack) != CANARY) {
      complain(std::string("kernel ") + launch.kernel->name + ": a thread's local variables overflowed its stack");
      abort();
    }
}

static uint64_t warp_operation(Operation operation, unsigned mask, uint64_t value, int source) {
  Block& b = *block;
  unsigned warp = b.running_thread / 32, bit = 1u << b.running_thread % 32, thread = b.running_thread;
  if (!(mask & bit)) {
    complain(std::string("kernel ") + b.launch->kernel->name + ": a lane calls a warp operation whose mask leaves it out");
    abort();
  }
  Waiting& self = b.waiting[thread];
  self.mask = mask;
  self.operation = operation;
  self.value = value;
  self.source = source;
  b.at_warp[warp] |= bit;
  b.suspend();
  return self.result;
}

}  // namespace fake
using namespace fake;

API void fakecuda_warp_barrier(unsigned mask) { warp_operation(Operation::Barrier, mask, 0, 0); }
API unsigned long long fakecuda_shuffle(unsigned mask, unsigned long long value, int source) { return warp_operation(Operation::Shuffle, mask, value, source); }
API unsigned fakecuda_ballot(unsigned mask, int predicate) { return unsigned(warp_operation(Operation::Ballot, mask, 0, predicate != 0)); }
API unsigned fakecuda_alive() { return block->alive[block->running_thread / 32]; }
// The number of threads whose predicate holds, and of all that came.
API unsigned fakecuda_block_barrier(int predicate, unsigned* participants) {
  Block& b = *block;
  unsigned thread = b.running_thread;
  if (participants) *participants = b.live;
  b.waiting[thread].source = predicate;
  b.at_block[thread / 32] |= 1u << thread % 32;
  b.block_waiting++;
  b.suspend();
  return unsigned(b.waiting[thread].result);
}
API void fakecuda_trap(const char* what) {
  complain(std::string("kernel ") + block->launch->kernel->name + ": " + what);
  abort();
}
