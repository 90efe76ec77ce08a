// A stub cuBLASLt: matrix products with bias, ReLU and bias-gradient epilogues, summed sequentially over k by fused multiply-adds.
#include <memory>
#include <string>

#include "floats.h"
#include "hooks.h"

#define API extern "C" __attribute__((visibility("default")))
using namespace fake;

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Epilogue { RELU = 2, BIAS = 4, DRELU = 8, BGRAD = 16, AUX = 128, BGRADA = 256, BGRADB = 512 };
enum Compute { F32 = 68, F32_PEDANTIC = 69, FAST_16F = 74, FAST_16BF = 75, FAST_TF32 = 77 };
constexpr uint64_t ALGORITHM = 0xFA4EB1A5;

struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t ld;
  int order = 0, batches = 1;
  int64_t stride = 0;
  size_t at(uint64_t r, uint64_t c) const { return order ? r * uint64_t(ld) + c : r + c * uint64_t(ld); }
  // Elements from the first to the last of a batch.
  size_t extent() const { return rows && columns ? at(rows - 1, columns - 1) + 1 + size_t(batches - 1) * size_t(stride) : 0; }
};
struct Description {
  int compute, scale;
  int pointer_mode = 0, transpose_a = 0, transpose_b = 0, epilogue = 1, bias_type = -1;
  void* bias = nullptr;
  int64_t bias_stride = 0;
  void* aux = nullptr;
  int64_t aux_ld = 0;
};
struct Preference {
  uint64_t workspace = 0;
};
struct Algorithm {
  uint64_t words[8];  // [0] ALGORITHM, [1] bytes of workspace
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

static bool known(int type, Type* out) {
  if (type != 0 && type != 2 && type != 14) return false;
  *out = type == 0 ? Type::F32 : type == 2 ? Type::F16 : Type::BF16;
  return true;
}

struct Problem {
  Description d;
  Layout a, b, c, out;
  Type ta, tb, tc, tout, tbias;
  size_t m, n, k;
};

static int understand(const Description& d, const Layout& a, const Layout& b, const Layout& c, const Layout& out, Problem* p) {
  *p = {d, a, b, c, out, {}, {}, {}, {}, {}, 0, 0, 0};
  if (!known(a.type, &p->ta) || !known(b.type, &p->tb) || !known(c.type, &p->tc) || !known(out.type, &p->tout)) return NOT_SUPPORTED;
  if (a.type != b.type || c.type != out.type || (out.type != 0 && out.type != a.type) || d.scale != 0) return NOT_SUPPORTED;
  if (d.compute != F32 && d.compute != F32_PEDANTIC && d.compute != FAST_16F && d.compute != FAST_16BF && d.compute != FAST_TF32) return NOT_SUPPORTED;
  if (d.compute >= FAST_16F && a.type != 0) return NOT_SUPPORTED;  // the fast modes are about f32 inputs
  if (d.epilogue & ~(1 | RELU | BIAS | DRELU | BGRAD | AUX | BGRADA | BGRADB)) return NOT_SUPPORTED;
  if (!known(d.bias_type < 0 ? out.type : d.bias_type, &p->tbias)) return NOT_SUPPORTED;
  p->m = out.rows;
  p->n = out.columns;
  p->k = d.transpose_a ? a.rows : a.columns;
  bool fits = (d.transpose_a ? a.columns : a.rows) == p->m && (d.transpose_b ? b.rows : b.columns) == p->n && (d.transpose_b ? b.columns : b.rows) == p->k &&
              c.rows == p->m && c.columns == p->n && a.batches == out.batches && b.batches == out.batches && c.batches == out.batches;
  for (const Layout* l : {&a, &b, &c, &out}) fits &= uint64_t(l->ld) >= (l->order ? l->columns : l->rows);
  return fits && p->k ? SUCCESS : INVALID_VALUE;
}
// A long sum over few outputs is split, which wants room for the parts.
static size_t workspace_of(const Problem& p) { return p.k >= 1024 && p.k > 4 * std::max(p.m, p.n) ? 4 * p.m * p.n * 4 : 0; }

struct Job {
  Problem p;
  float alpha, beta;
  const float *device_alpha, *device_beta;
  const void *a, *b, *c;
  void *out, *workspace;
  size_t workspace_bytes;
};

static void run(void* data) {
  Job& job = *static_cast<Job*>(data);
  const Problem& p = job.p;
  if (job.device_alpha) {
    job.alpha = *job.device_alpha;
    job.beta = *job.device_beta;
  }
  if (job.workspace_bytes) fakecuda_poison(job.workspace, job.workspace_bytes);
  auto input = [&](float v) { return p.d.compute == FAST_TF32 ? to_tf32(v) : p.d.compute == FAST_16BF ? to_bf16(v) : p.d.compute == FAST_16F ? to_f16(v) : v; };
  std::vector<float> a(p.k * p.m), b(p.k * p.n), sum(p.m * p.n);
  for (int batch = 0; batch < p.out.batches; batch++) {
    size_t at_a = size_t(batch) * size_t(p.a.stride), at_b = size_t(batch) * size_t(p.b.stride), at_c = size_t(batch) * size_t(p.c.stride),
           at_out = size_t(batch) * size_t(p.out.stride);
    for (size_t x = 0; x < p.k; x++) {
      for (size_t i = 0; i < p.m; i++) a[x * p.m + i] = input(load(job.a, p.ta, at_a + (p.d.transpose_a ? p.a.at(x, i) : p.a.at(i, x))));
      for (size_t j = 0; j < p.n; j++) b[x * p.n + j] = input(load(job.b, p.tb, at_b + (p.d.transpose_b ? p.b.at(j, x) : p.b.at(x, j))));
    }
    std::fill(sum.begin(), sum.end(), 0.0f);
    product(p.m, p.n, p.k, a.data(), b.data(), sum.data());
    auto* mask = static_cast<uint8_t*>(p.d.aux);  // a bit per output, columns of aux_ld bits
    for (size_t j = 0; j < p.n; j++)
      for (size_t i = 0; i < p.m; i++) {
        float v = job.alpha * sum[j * p.m + i];
        if (job.beta != 0) v += job.beta * load(job.c, p.tc, at_c + p.c.at(i, j));
        if (p.d.epilogue & BIAS) v += load(p.d.bias, p.tbias, i + size_t(batch) * size_t(p.d.bias_stride));
        size_t bit = j * size_t(p.d.aux_ld) + i;
        if (p.d.epilogue & DRELU) v = mask[bit / 8] >> bit % 8 & 1 ? v : 0;
        if (p.d.epilogue & RELU) {
          if (p.d.epilogue & AUX) mask[bit / 8] = uint8_t(v > 0 ? mask[bit / 8] | 1 << bit % 8 : mask[bit / 8] & ~(1 << bit % 8));
          v = v > 0 ? v : v == v ? 0 : v;
        }
        store(job.out, p.tout, at_out + p.out.at(i, j), v);
        sum[j * p.m + i] = v;
      }
    auto gradient = [&](const std::vector<float>& of, size_t length, size_t terms, bool outer) {
      for (size_t i = 0; i < length; i++) {
        float s = 0;
        for (size_t x = 0; x < terms; x++) s += outer ? of[x * length + i] : 0;
        store(p.d.bias, p.tbias, i + size_t(batch) * size_t(p.d.bias_stride), s);
      }
    };
    if (p.d.epilogue & BGRAD) gradient(sum, p.m, p.n, true);
    if (p.d.epilogue & BGRADA) gradient(a, p.m, p.k, true);
    if (p.d.epilogue & BGRADB) gradient(b, p.n, p.k, true);
  }
}

API int cublasLtCreate(void** handle) {
  if (fakecuda_current_device() < 0 || !fakecuda_driver_is_new_enough()) return NOT_INITIALIZED;
  *handle = new int(fakecuda_current_device());
  return SUCCESS;
}
API int cublasLtDestroy(void* handle) {
  delete static_cast<int*>(handle);
  return SUCCESS;
}
API size_t cublasLtGetVersion() { return FAKE_CUDA_MAJOR * 10000; }
API size_t cublasLtGetCudartVersion() { return FAKE_CUDA_MAJOR * 1000; }
API const char* cublasLtGetStatusName(int status) {
  return status == SUCCESS ? "CUBLAS_STATUS_SUCCESS" : status == NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : status == INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS_EXECUTION_FAILED";
}
API const char* cublasLtGetStatusString(int status) { return cublasLtGetStatusName(status); }
API int cublasLtLoggerSetLevel(int) { return SUCCESS; }

API int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  *layout = new Layout{type, rows, columns, ld};
  return SUCCESS;
}
API int cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return SUCCESS;
}
// Copies an attribute whose size must be that of its type.
template <class T>
static int set(T* to, const void* from, size_t bytes) {
  if (bytes != sizeof(T)) return INVALID_VALUE;
  memcpy(to, from, bytes);
  return SUCCESS;
}
API int cublasLtMatrixLayoutSetAttribute(Layout* l, int attribute, const void* value, size_t bytes) {
  switch (attribute) {
    case 0: return set(&l->type, value, bytes);
    case 1: return set(&l->order, value, bytes);
    case 2: return set(&l->rows, value, bytes);
    case 3: return set(&l->columns, value, bytes);
    case 4: return set(&l->ld, value, bytes);
    case 5: return set(&l->batches, value, bytes);
    case 6: return set(&l->stride, value, bytes);
    default: return INVALID_VALUE;
  }
}
API int cublasLtMatmulDescCreate(Description** d, int compute, int scale) {
  *d = new Description{compute, scale};
  return SUCCESS;
}
API int cublasLtMatmulDescDestroy(Description* d) {
  delete d;
  return SUCCESS;
}
API int cublasLtMatmulDescSetAttribute(Description* d, int attribute, const void* value, size_t bytes) {
  switch (attribute) {
    case 0: return set(&d->compute, value, bytes);
    case 1: return set(&d->scale, value, bytes);
    case 2: return set(&d->pointer_mode, value, bytes);
    case 3: return set(&d->transpose_a, value, bytes);
    case 4: return set(&d->transpose_b, value, bytes);
    case 7: return set(&d->epilogue, value, bytes);
    case 8: return set(&d->bias, value, bytes);
    case 10: return set(&d->bias_stride, value, bytes);
    case 11: return set(&d->aux, value, bytes);
    case 12: return set(&d->aux_ld, value, bytes);
    case 26: return set(&d->bias_type, value, bytes);
    default: return INVALID_VALUE;
  }
}
API int cublasLtMatmulPreferenceCreate(Preference** p) {
  *p = new Preference;
  return SUCCESS;
}
API int cublasLtMatmulPreferenceDestroy(Preference* p) {
  delete p;
  return SUCCESS;
}
API int cublasLtMatmulPreferenceSetAttribute(Preference* p, int attribute, const void* value, size_t bytes) {
  return attribute == 1 ? set(&p->workspace, value, bytes) : SUCCESS;
}
API int cublasLtMatmulAlgoGetHeuristic(void*, Description* d, Layout* a, Layout* b, Layout* c, Layout* out, Preference* preference, int wanted, Heuristic* results, int* found) {
  *found = 0;
  Problem p;
  if (wanted < 1) return INVALID_VALUE;
  if (int status = understand(*d, *a, *b, *c, *out, &p)) return status;
  memset(static_cast<void*>(results), 0, sizeof *results * size_t(wanted));
  // First the split sum, where there is room, then the plain one.
  size_t split = workspace_of(p);
  if (split && split <= preference->workspace) {
    results[0].algorithm.words[0] = ALGORITHM;
    results[0].algorithm.words[1] = results[0].workspace = split;
    results[0].waves = 1;
    ++*found;
  }
  if (*found < wanted) {
    results[*found].algorithm.words[0] = ALGORITHM;
    results[*found].waves = 1;
    ++*found;
  }
  return SUCCESS;
}
API int cublasLtMatmul(void* handle, Description* d, const void* alpha, const void* a, Layout* la, const void* b, Layout* lb, const void* beta, const void* c, Layout* lc, void* out,
                       Layout* lout, const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
  if (!handle || !alpha || !beta) return INVALID_VALUE;
  int device = fakecuda_stream_device(stream);
  if (int fault = fakecuda_fault("cublaslt", device)) return fault;
  auto job = std::make_unique<Job>();
  if (int status = understand(*d, *la, *lb, *lc, *lout, &job->p)) return status;
  const Problem& p = job->p;
  size_t needed = algorithm ? algorithm->words[1] : 0;
  if (algorithm && algorithm->words[0] != ALGORITHM) return INVALID_VALUE;
  if (needed > workspace_bytes || (needed && uintptr_t(workspace) % 256)) return INVALID_VALUE;
  bool wants_bias = p.d.epilogue & (BIAS | BGRAD | BGRADA | BGRADB), wants_mask = p.d.epilogue & (AUX | DRELU);
  if (wants_bias && !p.d.bias) return INVALID_VALUE;
  if (wants_mask && (!p.d.aux || p.d.aux_ld % 128 || uint64_t(p.d.aux_ld) < p.m)) return INVALID_VALUE;
  float host_beta = p.d.pointer_mode ? 1 : *static_cast<const float*>(beta);
  auto usable = [&](const void* pointer, size_t elements, Type type, const char* who) {
    return uintptr_t(pointer) % size_of(type) == 0 && fakecuda_usable(device, pointer, elements * size_of(type), who);
  };
  size_t bias_length = p.d.epilogue & BGRADB ? p.n : p.m;
  if (!usable(a, p.a.extent(), p.ta, "cublasLtMatmul: A") || !usable(b, p.b.extent(), p.tb, "cublasLtMatmul: B") || !usable(out, p.out.extent(), p.tout, "cublasLtMatmul: D") ||
      (host_beta != 0 && !usable(c, p.c.extent(), p.tc, "cublasLtMatmul: C")) || (wants_bias && !usable(p.d.bias, bias_length, p.tbias, "cublasLtMatmul: bias")) ||
      (needed && !fakecuda_usable(device, workspace, needed, "cublasLtMatmul: workspace")))
    return INVALID_VALUE;
  job->a = a;
  job->b = b;
  job->c = c;
  job->out = out;
  job->workspace = workspace;
  job->workspace_bytes = needed;
  job->device_alpha = p.d.pointer_mode ? static_cast<const float*>(alpha) : nullptr;
  job->device_beta = p.d.pointer_mode ? static_cast<const float*>(beta) : nullptr;
  job->alpha = p.d.pointer_mode ? 0 : *static_cast<const float*>(alpha);
  job->beta = host_beta;
  int error = fakecuda_enqueue(stream, "cublaslt", "matmul", run, [](void* data) { delete static_cast<Job*>(data); }, job.release());
  return error ? EXECUTION_FAILED : SUCCESS;
}
