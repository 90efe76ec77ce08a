// CUDA C++ for g++: what NVRTC knows without any header. Included before the source of every kernel; includes no C++ header, so that kernels
// may define names of their own as freely as under NVRTC.
#pragma once
#include "fakecuda_thread.h"

extern "C" {
extern __thread FakecudaThread fakecuda_thread __attribute__((tls_model("initial-exec")));
void fakecuda_warp_barrier(unsigned mask);
unsigned long long fakecuda_shuffle(unsigned mask, unsigned long long value, int source);
unsigned fakecuda_ballot(unsigned mask, int predicate);
unsigned fakecuda_alive();
unsigned fakecuda_block_barrier(int predicate, unsigned* participants);
[[noreturn]] void fakecuda_trap(const char* what);
}

#define threadIdx (fakecuda_thread.thread)
#define blockIdx (fakecuda_thread.block)
#define blockDim (fakecuda_thread.block_dim)
#define gridDim (fakecuda_thread.grid_dim)
#define warpSize 32
#define __global__
#define __device__
#define __host__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static const
#define __grid_constant__
#if FAKECUDA_SANITIZED
#define __shared__ static  // one launch at a time; has zones around it that AddressSanitizer watches
#else
#define __shared__ static thread_local  // one block at a time on a thread
#endif

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

// ---- vectors
#define FAKECUDA_VECTORS(T, name, align)                                                                              \
  struct name##1 { T x; };                                                                                            \
  struct alignas(2 * align) name##2 { T x, y; };                                                                      \
  struct name##3 { T x, y, z; };                                                                                      \
  struct alignas(4 * align > 16 ? 16 : 4 * align) name##4 { T x, y, z, w; };                                          \
  inline name##1 make_##name##1(T x) { return {x}; }                                                                  \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                          \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                                  \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
FAKECUDA_VECTORS(signed char, char, 1)
FAKECUDA_VECTORS(unsigned char, uchar, 1)
FAKECUDA_VECTORS(short, short, 2)
FAKECUDA_VECTORS(unsigned short, ushort, 2)
FAKECUDA_VECTORS(int, int, 4)
FAKECUDA_VECTORS(float, float, 4)
FAKECUDA_VECTORS(double, double, 8)
FAKECUDA_VECTORS(long long, longlong, 8)
FAKECUDA_VECTORS(unsigned long long, ulonglong, 8)
struct uint1 { unsigned x; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint1 make_uint1(unsigned x) { return {x}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- barriers and warps
inline void __syncthreads() { fakecuda_block_barrier(0, nullptr); }
inline int __syncthreads_count(int predicate) { return int(fakecuda_block_barrier(predicate != 0, nullptr)); }
inline int __syncthreads_or(int predicate) { return fakecuda_block_barrier(predicate != 0, nullptr) != 0; }
inline int __syncthreads_and(int predicate) { return fakecuda_block_barrier(predicate == 0, nullptr) == 0; }
inline void __syncwarp(unsigned mask = ~0u) { fakecuda_warp_barrier(mask); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
inline unsigned __activemask() { return fakecuda_alive(); }
inline unsigned __ballot_sync(unsigned mask, int predicate) { return fakecuda_ballot(mask, predicate); }
inline int __any_sync(unsigned mask, int predicate) { return fakecuda_ballot(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return fakecuda_ballot(mask, !predicate) == 0; }
namespace fakecuda {
inline int lane() {
  const uint3 &t = fakecuda_thread.thread, &d = fakecuda_thread.block_dim;
  return int((t.x + d.x * (t.y + d.y * t.z)) & 31);
}
template <class T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most eight bytes");
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = fakecuda_shuffle(mask, bits, source);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace fakecuda
// Lanes that lie outside the part of `width` keep their own value, as on the hardware.
template <class T>
T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
  int base = fakecuda::lane() & ~(width - 1);
  return fakecuda::shuffle(mask, v, base + (from & (width - 1)));
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  int lane = fakecuda::lane(), to = lane + int(by);
  return fakecuda::shuffle(mask, v, (lane & (width - 1)) + int(by) < width ? to : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
  int lane = fakecuda::lane();
  return fakecuda::shuffle(mask, v, (lane & (width - 1)) >= int(by) ? lane - int(by) : lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int with, int width = 32) {
  int lane = fakecuda::lane(), to = lane ^ with;
  return fakecuda::shuffle(mask, v, (to & ~(width - 1)) <= (lane & ~(width - 1)) ? to : lane);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) {
  unsigned sum = 0;
  for (int i = 0; i < 32; i++)
    if (unsigned other = fakecuda::shuffle(mask, v, i); mask >> i & 1) sum += other;
  return sum;
}

// ---- atomics
template <class T, class Change>
T fakecuda_atomic(T* at, Change change) {
  T old, next;
  __atomic_load(at, &old, __ATOMIC_RELAXED);
  do next = change(old);
  while (!__atomic_compare_exchange(at, &old, &next, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
  return old;
}
#define FAKECUDA_ATOMICS(T)                                                                                           \
  inline T atomicAdd(T* at, T v) { return fakecuda_atomic(at, [=](T old) { return static_cast<T>(old + v); }); }                   \
  inline T atomicExch(T* at, T v) { return fakecuda_atomic(at, [=](T) { return v; }); }
#define FAKECUDA_INTEGER_ATOMICS(T)                                                                                   \
  FAKECUDA_ATOMICS(T)                                                                                                 \
  inline T atomicSub(T* at, T v) { return fakecuda_atomic(at, [=](T old) { return static_cast<T>(old - v); }); }                   \
  inline T atomicMax(T* at, T v) { return fakecuda_atomic(at, [=](T old) { return old > v ? old : v; }); }            \
  inline T atomicMin(T* at, T v) { return fakecuda_atomic(at, [=](T old) { return old < v ? old : v; }); }            \
  inline T atomicAnd(T* at, T v) { return fakecuda_atomic(at, [=](T old) { return static_cast<T>(old & v); }); }                   \
  inline T atomicOr(T* at, T v) { return fakecuda_atomic(at, [=](T old) { return static_cast<T>(old | v); }); }                    \
  inline T atomicXor(T* at, T v) { return fakecuda_atomic(at, [=](T old) { return static_cast<T>(old ^ v); }); }                   \
  inline T atomicCAS(T* at, T expected, T v) { return fakecuda_atomic(at, [=](T old) { return old == expected ? v : old; }); }
FAKECUDA_ATOMICS(float)
FAKECUDA_ATOMICS(double)
FAKECUDA_INTEGER_ATOMICS(int)
FAKECUDA_INTEGER_ATOMICS(unsigned)
FAKECUDA_INTEGER_ATOMICS(unsigned long long)
inline unsigned atomicInc(unsigned* at, unsigned limit) { return fakecuda_atomic(at, [=](unsigned old) { return old >= limit ? 0u : old + 1; }); }

// ---- memory, bits
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldca(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcv(const T* p) { return *p; }
template <class T> void __stcs(T* p, T v) { *p = v; }
template <class T> void __stcg(T* p, T v) { *p = v; }
template <class T> void __stwt(T* p, T v) { *p = v; }
inline int __float_as_int(float v) { return fakecuda::bits<int>(v); }
inline unsigned __float_as_uint(float v) { return fakecuda::bits<unsigned>(v); }
inline float __int_as_float(int v) { return fakecuda::bits<float>(v); }
inline float __uint_as_float(unsigned v) { return fakecuda::bits<float>(v); }
inline long long __double_as_longlong(double v) { return fakecuda::bits<long long>(v); }
inline double __longlong_as_double(long long v) { return fakecuda::bits<double>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __brev(unsigned v) {
  unsigned out = 0;
  for (int i = 0; i < 32; i++) out |= (v >> i & 1) << (31 - i);
  return out;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return unsigned(((unsigned long long)high << 32 | low) << (by & 31) >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return unsigned(((unsigned long long)high << 32 | low) >> (by & 31)); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= unsigned(both >> (selector >> (4 * i) & 7) * 8 & 255) << (8 * i);
  return out;
}

// ---- mathematics
#define FAKECUDA_UNARY(name)                                                                                          \
  extern "C" float name##f(float) noexcept;                                                                           \
  extern "C" double name(double) noexcept;                                                                            \
  inline float name(float v) { return __builtin_##name##f(v); }
#define FAKECUDA_BINARY(name)                                                                                         \
  extern "C" float name##f(float, float) noexcept;                                                                    \
  extern "C" double name(double, double) noexcept;                                                                    \
  inline float name(float a, float b) { return __builtin_##name##f(a, b); }
FAKECUDA_UNARY(sqrt) FAKECUDA_UNARY(exp) FAKECUDA_UNARY(exp2) FAKECUDA_UNARY(expm1) FAKECUDA_UNARY(log) FAKECUDA_UNARY(log2)
FAKECUDA_UNARY(log10) FAKECUDA_UNARY(log1p) FAKECUDA_UNARY(sin) FAKECUDA_UNARY(cos) FAKECUDA_UNARY(tan) FAKECUDA_UNARY(tanh)
FAKECUDA_UNARY(sinh) FAKECUDA_UNARY(cosh) FAKECUDA_UNARY(asin) FAKECUDA_UNARY(acos) FAKECUDA_UNARY(atan) FAKECUDA_UNARY(erf)
FAKECUDA_UNARY(erfc) FAKECUDA_UNARY(floor) FAKECUDA_UNARY(ceil) FAKECUDA_UNARY(round) FAKECUDA_UNARY(trunc) FAKECUDA_UNARY(rint)
FAKECUDA_UNARY(nearbyint) FAKECUDA_UNARY(fabs) FAKECUDA_UNARY(cbrt)
FAKECUDA_BINARY(pow) FAKECUDA_BINARY(fmax) FAKECUDA_BINARY(fmin) FAKECUDA_BINARY(fmod) FAKECUDA_BINARY(atan2) FAKECUDA_BINARY(copysign)
FAKECUDA_BINARY(hypot) FAKECUDA_BINARY(fdim)
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double fma(double, double, double) noexcept;
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
extern "C" int abs(int) noexcept;
inline float abs(float v) { return __builtin_fabsf(v); }
inline double abs(double v) { return __builtin_fabs(v); }
extern "C" long lrintf(float) noexcept;
extern "C" long lroundf(float) noexcept;
inline bool isnan(float v) { return __builtin_isnan(v); }
inline bool isnan(double v) { return __builtin_isnan(v); }
inline bool isinf(float v) { return __builtin_isinf(v); }
inline bool isinf(double v) { return __builtin_isinf(v); }
inline bool isfinite(float v) { return __builtin_isfinite(v); }
inline bool isfinite(double v) { return __builtin_isfinite(v); }
inline bool signbit(float v) { return __builtin_signbit(v); }
inline float rsqrtf(float v) { return 1.0f / __builtin_sqrtf(v); }
inline double rsqrt(double v) { return 1.0 / __builtin_sqrt(v); }
inline float rsqrt(float v) { return rsqrtf(v); }
inline float __expf(float v) { return __builtin_expf(v); }
inline float __exp10f(float v) { return __builtin_powf(10.0f, v); }
inline float __logf(float v) { return __builtin_logf(v); }
inline float __log2f(float v) { return __builtin_log2f(v); }
inline float __sinf(float v) { return __builtin_sinf(v); }
inline float __cosf(float v) { return __builtin_cosf(v); }
inline float __powf(float a, float b) { return __builtin_powf(a, b); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float v) { return v < 0 || v != v ? 0.0f : v > 1 ? 1.0f : v; }
inline void sincosf(float v, float* s, float* c) {
  *s = __builtin_sinf(v);
  *c = __builtin_cosf(v);
}
inline void __sincosf(float v, float* s, float* c) { sincosf(v, s, c); }
// Rounded to nearest, and never contracted to a fused multiply-add.
inline float fakecuda_rounded(float v) {
  asm("" : "+x"(v));
  return v;
}
inline float __fmul_rn(float a, float b) { return fakecuda_rounded(a * b); }
inline float __fadd_rn(float a, float b) { return fakecuda_rounded(a + b); }
inline float __fsub_rn(float a, float b) { return fakecuda_rounded(a - b); }
inline double fakecuda_rounded(double v) {
  asm("" : "+x"(v));
  return v;
}
inline double __dmul_rn(double a, double b) { return fakecuda_rounded(a * b); }
inline double __dadd_rn(double a, double b) { return fakecuda_rounded(a + b); }
inline double __dsub_rn(double a, double b) { return fakecuda_rounded(a - b); }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __frsqrt_rn(float a) { return 1.0f / __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline int __float2int_rn(float v) { return int(__builtin_rintf(v)); }
inline int __float2int_rz(float v) { return int(v); }
inline int __float2int_rd(float v) { return int(__builtin_floorf(v)); }
inline int __float2int_ru(float v) { return int(__builtin_ceilf(v)); }
inline unsigned __float2uint_rn(float v) { return unsigned(__builtin_rintf(v)); }
inline unsigned __float2uint_rz(float v) { return unsigned(v); }
inline float __int2float_rn(int v) { return float(v); }
inline float __uint2float_rn(unsigned v) { return float(v); }
inline float __ull2float_rn(unsigned long long v) { return float(v); }
#define FAKECUDA_MIN_MAX(T)                                                                                           \
  inline T min(T a, T b) { return b < a ? b : a; }                                                                    \
  inline T max(T a, T b) { return a < b ? b : a; }
FAKECUDA_MIN_MAX(int) FAKECUDA_MIN_MAX(unsigned) FAKECUDA_MIN_MAX(long) FAKECUDA_MIN_MAX(unsigned long) FAKECUDA_MIN_MAX(long long)
FAKECUDA_MIN_MAX(unsigned long long)
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
extern "C" int printf(const char*, ...);
extern "C" void* memcpy(void*, const void*, size_t) noexcept;
extern "C" void* memset(void*, int, size_t) noexcept;
#define assert(condition) ((condition) ? (void)0 : fakecuda_trap("assertion " #condition " failed"))
inline void __trap() { fakecuda_trap("__trap()"); }
inline long long clock64() { return (long long)__builtin_ia32_rdtsc(); }
inline void __nanosleep(unsigned) {}

// ---- the table of kernels
namespace fakecuda {
template <class T> struct Pointee { static constexpr unsigned alignment = 0; };
template <class T> struct Pointee<T*> { static constexpr unsigned alignment = alignof(T); };
template <> struct Pointee<void*> { static constexpr unsigned alignment = 1; };
template <> struct Pointee<const void*> { static constexpr unsigned alignment = 1; };
template <size_t...> struct Indices {};
template <unsigned n> struct Upto { typedef Indices<__integer_pack(n)...> indices; };
template <class T> struct Plain { typedef T type; };
template <class T> struct Plain<const T> { typedef T type; };
template <class T> struct Plain<T* __restrict> { typedef T* type; };
template <class... A>
struct Signature {
  static constexpr unsigned count = sizeof...(A);
  static constexpr unsigned sizes[sizeof...(A) + 1] = {unsigned(sizeof(A))..., 0};
  static constexpr unsigned alignments[sizeof...(A) + 1] = {Pointee<typename Plain<A>::type>::alignment..., 0};
};
template <class... A>
Signature<A...> signature(void (*)(A...));
template <auto kernel, class S, class I>
struct Caller;
template <auto kernel, class... A, size_t... I>
struct Caller<kernel, Signature<A...>, Indices<I...>> {
  static void call(void** arguments) {
    (void)arguments;
    kernel(*static_cast<typename Plain<A>::type*>(arguments[I])...);
  }
};
constexpr unsigned first(unsigned n = 0, unsigned = 0, unsigned = 0) { return n; }
struct Kernel {
  const char* name;
  void (*call)(void**);
  unsigned arguments;
  const unsigned *sizes, *pointee_alignments;
  unsigned max_threads;
};
}  // namespace fakecuda
#define FAKECUDA_KERNEL(name, ...)                                                                                    \
  {#name,                                                                                                             \
   fakecuda::Caller<&name, decltype(fakecuda::signature(&name)),                                                      \
                    fakecuda::Upto<decltype(fakecuda::signature(&name))::count>::indices>::call,                \
   decltype(fakecuda::signature(&name))::count, decltype(fakecuda::signature(&name))::sizes,                          \
   decltype(fakecuda::signature(&name))::alignments, fakecuda::first(__VA_ARGS__)}
