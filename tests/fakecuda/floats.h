// Numbers of the libraries: loading and storing f32, f16 and bf16, rounding to TF32, and one matrix product.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <algorithm>
#include <vector>

namespace fake {

enum class Type { F32, F16, BF16 };
inline size_t size_of(Type type) { return type == Type::F32 ? 4 : 2; }

// To nearest, ties to even; what is dropped are the lowest `bits` of an f32.
inline float rounded(float v, int bits) {
  uint32_t u;
  memcpy(&u, &v, 4);
  if ((u & 0x7f800000) == 0x7f800000) return v;
  u += (1u << (bits - 1)) - 1 + (u >> bits & 1);
  u &= ~((1u << bits) - 1);
  memcpy(&v, &u, 4);
  return v;
}
inline float to_tf32(float v) { return rounded(v, 13); }
inline float to_bf16(float v) { return rounded(v, 16); }
inline float to_f16(float v) { return float(_Float16(v)); }

inline float load(const void* p, Type type, size_t i) {
  if (type == Type::F32) return static_cast<const float*>(p)[i];
  uint16_t h = static_cast<const uint16_t*>(p)[i];
  if (type == Type::F16) {
    _Float16 f;
    memcpy(&f, &h, 2);
    return float(f);
  }
  uint32_t u = uint32_t(h) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline void store(void* p, Type type, size_t i, float v) {
  if (type == Type::F32) {
    static_cast<float*>(p)[i] = v;
  } else if (type == Type::F16) {
    _Float16 f = _Float16(v);
    memcpy(static_cast<uint16_t*>(p) + i, &f, 2);
  } else {
    v = to_bf16(v);
    uint32_t u;
    memcpy(&u, &v, 4);
    static_cast<uint16_t*>(p)[i] = uint16_t(u >> 16);
  }
}

// sum[j * m + i] += a[x * m + i] * b[x * n + j] over x = 0 .. k - 1 in this order, by fused multiply-adds: the same bits as a plain loop.
inline void product(size_t m, size_t n, size_t k, const float* a, const float* b, float* sum) {
  constexpr size_t MR = 32, NR = 4;
  for (size_t j = 0; j < n; j += NR)
    for (size_t i = 0; i < m; i += MR) {
      size_t rows = std::min(MR, m - i), columns = std::min(NR, n - j);
      float tile[NR][MR] = {};
      for (size_t c = 0; c < columns; c++) memcpy(tile[c], sum + (j + c) * m + i, rows * 4);
      if (rows == MR && columns == NR) {
        for (size_t x = 0; x < k; x++)
          for (size_t c = 0; c < NR; c++)
            for (size_t r = 0; r < MR; r++) tile[c][r] = std::fma(a[x * m + i + r], b[x * n + j + c], tile[c][r]);
      } else {
        for (size_t x = 0; x < k; x++)
          for (size_t c = 0; c < columns; c++)
            for (size_t r = 0; r < rows; r++) tile[c][r] = std::fma(a[x * m + i + r], b[x * n + j + c], tile[c][r]);
      }
      for (size_t c = 0; c < columns; c++) memcpy(sum + (j + c) * m + i, tile[c], rows * 4);
    }
}

}  // namespace fake
