// A stub cuDNN 9: the legacy convolutions in two dimensions. Numbers are right (f32 sums by fused multiply-adds), restrictions are cuDNN's:
// which algorithm takes which layout, how much workspace, and that f32 means TF32 unless CUDNN_FMA_MATH is asked for.
#include <cstdarg>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>

#include "floats.h"
#include "hooks.h"

#define API extern "C" __attribute__((visibility("default")))
using fake::Type;

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1001, BAD_PARAM = 2000, BAD_PARAM_NULL = 2002, BAD_PARAM_SIZE = 2006, BAD_PARAM_SHAPE = 2008, NOT_SUPPORTED = 3000, NOT_SUPPORTED_SHAPE = 3002,
              NOT_SUPPORTED_DATA_TYPE = 3003, NOT_SUPPORTED_LAYOUT = 3004, EXECUTION_FAILED = 5000 };
enum Format { NCHW = 0, NHWC = 1 };
enum Math { DEFAULT_MATH = 0, TENSOR_OP = 1, ALLOW_CONVERSION = 2, FMA_MATH = 3 };
enum Activation { RELU = 1, IDENTITY = 5 };

static thread_local std::string last_error;
static int refuse(int status, const std::string& why) {
  last_error = why;
  fprintf(stderr, "fakecudnn: status %d: %s\n", status, why.c_str());
  return status;
}

struct Handle {
  int device;
  void* stream = nullptr;
};
struct Tensor {
  int type = -1;
  size_t dims[4] = {}, strides[4] = {};  // n, c, h, w
  bool nhwc_packed() const { return strides[1] == 1 && strides[3] == dims[1] && strides[2] == dims[1] * dims[3] && strides[0] == dims[1] * dims[3] * dims[2]; }
  size_t extent() const {
    size_t last = 0;
    for (int i = 0; i < 4; i++) last += (dims[i] - 1) * strides[i];
    return last + 1;
  }
  size_t at(size_t n, size_t c, size_t h, size_t w) const { return n * strides[0] + c * strides[1] + h * strides[2] + w * strides[3]; }
};
struct Filter {
  int type = -1, format = NCHW;
  size_t dims[4] = {};  // k, c, h, w
  size_t count() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
  size_t at(size_t k, size_t c, size_t h, size_t w) const {
    return format == NHWC ? ((k * dims[2] + h) * dims[3] + w) * dims[1] + c : ((k * dims[1] + c) * dims[2] + h) * dims[3] + w;
  }
};
struct Convolution {
  int pad[2] = {}, stride[2] = {1, 1}, dilation[2] = {1, 1}, mode = 1, compute = 0, math = DEFAULT_MATH, groups = 1;
};
struct ActivationDescriptor {
  int mode = RELU;
};
struct Performance {
  int algorithm, status;
  float time;
  size_t memory;
  int determinism, math, reserved[3];
};

enum class Direction { Forward, Data, FilterGradient };
struct Shape {
  Tensor x, y;
  Filter w;
  Convolution conv;
  Type type;
};

static bool known(int type, Type* out) {
  if (type != 0 && type != 2 && type != 9) return false;
  *out = type == 0 ? Type::F32 : type == 2 ? Type::F16 : Type::BF16;
  return true;
}

// Whether the parts fit together, and whether the algorithm takes them.
static int understand(const Tensor& x, const Filter& w, const Convolution& conv, const Tensor& y, Direction direction, int algorithm, Shape* s) {
  *s = {x, y, w, conv, Type::F32};
  if (x.type < 0 || y.type < 0 || w.type < 0) return refuse(BAD_PARAM, "a descriptor was never set");
  if (!known(x.type, &s->type) || x.type != w.type || x.type != y.type) return refuse(NOT_SUPPORTED_DATA_TYPE, "types of x, w and y");
  if (conv.compute != 0 && !(conv.compute == 2 && x.type == 2)) return refuse(NOT_SUPPORTED_DATA_TYPE, "the compute type is not float");
  size_t groups = size_t(conv.groups);
  if (x.dims[1] != w.dims[1] * groups || y.dims[1] != w.dims[0] || w.dims[0] % groups || x.dims[0] != y.dims[0]) return refuse(BAD_PARAM_SHAPE, "channels or batch do not fit");
  for (int i = 0; i < 2; i++) {
    long in = long(x.dims[2 + i]) + 2 * conv.pad[i] - (conv.dilation[i] * (long(w.dims[2 + i]) - 1) + 1);
    if (in < 0 || size_t(in / conv.stride[i] + 1) != y.dims[2 + i]) return refuse(BAD_PARAM_SHAPE, "height or width of the output do not fit");
  }
  bool nhwc = w.format == NHWC;
  if (nhwc && !(x.nhwc_packed() && y.nhwc_packed())) return refuse(NOT_SUPPORTED_LAYOUT, "an NHWC filter wants packed NHWC tensors");
  if (nhwc && conv.mode == 0) return refuse(NOT_SUPPORTED, "NHWC filters want CUDNN_CROSS_CORRELATION");
  bool plain = algorithm == 0 || algorithm == 1 || (direction == Direction::FilterGradient && algorithm == 3 && !nhwc);
  if (!plain) return NOT_SUPPORTED;
  if (algorithm == 0 && direction != Direction::Forward && s->type == Type::BF16) return NOT_SUPPORTED;
  return SUCCESS;
}
static size_t workspace_of(const Shape& s, Direction direction, int algorithm) {
  if (algorithm == 0) return 0;
  size_t filter = s.w.count() * 4, tensor = s.x.dims[2] * s.x.dims[3] * s.w.dims[2] * s.w.dims[3] * 4;
  return direction == Direction::Forward ? tensor : direction == Direction::Data ? filter + tensor : 2 * filter;
}

struct Job {
  Shape s;
  Direction direction;
  float alpha, beta, alpha2 = 0;
  bool reverse = false;  // a sum whose order changes from call to call
  const void *x, *w, *y;
  void* out;
  const void *z = nullptr, *bias = nullptr;
  int activation = IDENTITY;
  void* workspace;
  size_t workspace_bytes;
};

static float input(const Job& job, const void* p, size_t i) {
  float v = fake::load(p, job.s.type, i);
  if (job.s.type != Type::F32 || job.s.conv.math == FMA_MATH) return v;
  return job.s.conv.math == ALLOW_CONVERSION ? fake::to_f16(v) : fake::to_tf32(v);
}

// For every output position of image n (rows of the product below): the patch of one group, in the filter's order r, s, c.
static void patches(const Job& job, size_t n, size_t group, std::vector<float>& out) {
  const Shape& s = job.s;
  size_t channels = s.w.dims[1], positions = s.y.dims[2] * s.y.dims[3];
  std::vector<float> image(s.x.dims[2] * s.x.dims[3] * channels);
  for (size_t h = 0; h < s.x.dims[2]; h++)
    for (size_t w = 0; w < s.x.dims[3]; w++)
      for (size_t c = 0; c < channels; c++) image[(h * s.x.dims[3] + w) * channels + c] = input(job, job.x, s.x.at(n, group * channels + c, h, w));
  for (size_t r = 0; r < s.w.dims[2]; r++)
    for (size_t q = 0; q < s.w.dims[3]; q++)
      for (size_t oh = 0; oh < s.y.dims[2]; oh++)
        for (size_t ow = 0; ow < s.y.dims[3]; ow++) {
          long h = long(oh) * s.conv.stride[0] - s.conv.pad[0] + long(r) * s.conv.dilation[0], w = long(ow) * s.conv.stride[1] - s.conv.pad[1] + long(q) * s.conv.dilation[1];
          bool inside = h >= 0 && w >= 0 && h < long(s.x.dims[2]) && w < long(s.x.dims[3]);
          const float* from = inside ? &image[(size_t(h) * s.x.dims[3] + size_t(w)) * channels] : nullptr;
          for (size_t c = 0; c < channels; c++) out[((r * s.w.dims[3] + q) * channels + c) * positions + oh * s.y.dims[3] + ow] = inside ? from[c] : 0.0f;
        }
}

// Calls with k, c, h, w of every weight of a group and its row in the product.
static void each_weight(const Shape& s, size_t group, const std::function<void(size_t k, size_t row, size_t at)>& visit) {
  size_t per_group = s.w.dims[0] / size_t(s.conv.groups);
  for (size_t k = 0; k < per_group; k++)
    for (size_t r = 0; r < s.w.dims[2]; r++)
      for (size_t q = 0; q < s.w.dims[3]; q++)
        for (size_t c = 0; c < s.w.dims[1]; c++) {
          size_t flipped_r = s.conv.mode ? r : s.w.dims[2] - 1 - r, flipped_q = s.conv.mode ? q : s.w.dims[3] - 1 - q;
          visit(k, (r * s.w.dims[3] + q) * s.w.dims[1] + c, s.w.at(group * per_group + k, c, flipped_r, flipped_q));
        }
}

static void run(void* data) {
  const Job& job = *static_cast<Job*>(data);
  const Shape& s = job.s;
  if (job.workspace_bytes) fakecuda_poison(job.workspace, job.workspace_bytes);
  size_t groups = size_t(s.conv.groups), outputs = s.w.dims[0] / groups, rows = s.w.dims[1] * s.w.dims[2] * s.w.dims[3], positions = s.y.dims[2] * s.y.dims[3];
  auto mixed = [&](float v, void* out, size_t at) { fake::store(out, s.type, at, job.alpha * v + (job.beta != 0 ? job.beta * fake::load(out, s.type, at) : 0)); };
  std::vector<float> weights(rows * outputs), patch(rows * positions), sum;
  for (size_t g = 0; g < groups; g++) {
    if (job.direction != Direction::FilterGradient) each_weight(s, g, [&](size_t k, size_t row, size_t at) { weights[row * outputs + k] = input(job, job.w, at); });
    else sum.assign(rows * outputs, 0.0f);
    for (size_t i = 0; i < s.x.dims[0]; i++) {
      size_t n = job.reverse ? s.x.dims[0] - 1 - i : i;
      auto y_at = [&](size_t k, size_t position) { return s.y.at(n, g * outputs + k, position / s.y.dims[3], position % s.y.dims[3]); };
      if (job.direction == Direction::Forward) {
        // [positions][k]: sums over the patch in its order.
        patches(job, n, g, patch);
        sum.assign(positions * outputs, 0.0f);
        fake::product(positions, outputs, rows, patch.data(), weights.data(), sum.data());
        for (size_t k = 0; k < outputs; k++)
          for (size_t position = 0; position < positions; position++) {
            size_t at = y_at(k, position);
            float v = sum[k * positions + position];
            if (!job.bias) {
              mixed(v, job.out, at);
              continue;
            }
            v = job.alpha * v + (job.alpha2 != 0 ? job.alpha2 * fake::load(job.z, s.type, at) : 0) + fake::load(job.bias, s.type, g * outputs + k);
            fake::store(job.out, s.type, at, job.activation == RELU && v < 0 ? 0 : v);
          }
      } else if (job.direction == Direction::FilterGradient) {
        // [row][k]: sums over images, then positions.
        patches(job, n, g, patch);
        std::vector<float> by_position(positions * rows), gradient(positions * outputs);
        for (size_t row = 0; row < rows; row++)
          for (size_t position = 0; position < positions; position++) by_position[position * rows + row] = patch[row * positions + position];
        for (size_t k = 0; k < outputs; k++)
          for (size_t position = 0; position < positions; position++) gradient[position * outputs + k] = input(job, job.y, y_at(k, position));
        fake::product(rows, outputs, positions, by_position.data(), gradient.data(), sum.data());
      } else {
        // Each patch's gradient is [row] = sum over k; then it is added to the pixels that it came from, in the order r, s.
        std::vector<float> gradient(outputs * positions), by_k(outputs * rows);
        for (size_t k = 0; k < outputs; k++)
          for (size_t position = 0; position < positions; position++) gradient[k * positions + position] = input(job, job.y, y_at(k, position));
        for (size_t row = 0; row < rows; row++)
          for (size_t k = 0; k < outputs; k++) by_k[k * rows + row] = weights[row * outputs + k];
        sum.assign(positions * rows, 0.0f);
        fake::product(positions, rows, outputs, gradient.data(), by_k.data(), sum.data());
        size_t channels = s.w.dims[1];
        std::vector<float> pixels(s.x.dims[2] * s.x.dims[3] * channels, 0.0f);
        for (size_t t = 0; t < s.w.dims[2] * s.w.dims[3]; t++) {
          size_t tap = job.reverse ? s.w.dims[2] * s.w.dims[3] - 1 - t : t, r = tap / s.w.dims[3], q = tap % s.w.dims[3];
          for (size_t position = 0; position < positions; position++) {
            long h = long(position / s.y.dims[3]) * s.conv.stride[0] - s.conv.pad[0] + long(r) * s.conv.dilation[0];
            long w = long(position % s.y.dims[3]) * s.conv.stride[1] - s.conv.pad[1] + long(q) * s.conv.dilation[1];
            if (h < 0 || w < 0 || h >= long(s.x.dims[2]) || w >= long(s.x.dims[3])) continue;
            for (size_t c = 0; c < channels; c++) pixels[(size_t(h) * s.x.dims[3] + size_t(w)) * channels + c] += sum[(tap * channels + c) * positions + position];
          }
        }
        for (size_t h = 0; h < s.x.dims[2]; h++)
          for (size_t w = 0; w < s.x.dims[3]; w++)
            for (size_t c = 0; c < channels; c++) mixed(pixels[(h * s.x.dims[3] + w) * channels + c], job.out, s.x.at(n, g * channels + c, h, w));
      }
    }
    if (job.direction == Direction::FilterGradient) each_weight(s, g, [&](size_t k, size_t row, size_t at) { mixed(sum[k * rows + row], job.out, at); });
  }
}

// ---- descriptors
#define DESCRIPTOR(name, type)                  \
  API int cudnnCreate##name(type** descriptor) { \
    *descriptor = new type;                     \
    return SUCCESS;                             \
  }                                             \
  API int cudnnDestroy##name(type* descriptor) { \
    delete descriptor;                          \
    return SUCCESS;                             \
  }
DESCRIPTOR(TensorDescriptor, Tensor)
DESCRIPTOR(FilterDescriptor, Filter)
DESCRIPTOR(ConvolutionDescriptor, Convolution)
DESCRIPTOR(ActivationDescriptor, ActivationDescriptor)

API int cudnnCreate(Handle** handle) {
  int device = fakecuda_current_device();
  if (device < 0 || !fakecuda_driver_is_new_enough()) return refuse(NOT_INITIALIZED, "no context is current, or the driver is older than this library");
  if (int fault = fakecuda_fault("cudnn_create", device)) return fault;
  *handle = new Handle{device};
  return SUCCESS;
}
API int cudnnDestroy(Handle* handle) {
  delete handle;
  return SUCCESS;
}
API int cudnnSetStream(Handle* handle, void* stream) {
  if (!handle || fakecuda_stream_device(stream) != handle->device) return refuse(BAD_PARAM, "a stream of another device");
  handle->stream = stream;
  return SUCCESS;
}
API int cudnnGetStream(Handle* handle, void** stream) {
  *stream = handle->stream;
  return SUCCESS;
}
API size_t cudnnGetVersion() { return 91000; }
API size_t cudnnGetMaxDeviceVersion() { return 1210; }
API size_t cudnnGetCudartVersion() { return FAKE_CUDA_MAJOR * 1000; }
API int cudnnOpsVersionCheck() { return SUCCESS; }
API int cudnnCnnVersionCheck() { return SUCCESS; }
API int cudnnAdvVersionCheck() { return SUCCESS; }
API const char* cudnnGetErrorString(int status) {
  if (status == SUCCESS) return "CUDNN_STATUS_SUCCESS";
  switch (status / 1000) {
    case 1: return "CUDNN_STATUS_NOT_INITIALIZED";
    case 2: return "CUDNN_STATUS_BAD_PARAM";
    case 3: return "CUDNN_STATUS_NOT_SUPPORTED";
    case 4: return "CUDNN_STATUS_INTERNAL_ERROR";
    default: return "CUDNN_STATUS_EXECUTION_FAILED";
  }
}
API void cudnnGetLastErrorString(char* message, size_t size) { snprintf(message, size, "%s", last_error.c_str()); }

API int cudnnSetTensor4dDescriptorEx(Tensor* t, int type, int n, int c, int h, int w, int sn, int sc, int sh, int sw) {
  if (n < 1 || c < 1 || h < 1 || w < 1) return refuse(BAD_PARAM, "a dimension below one");
  *t = {type, {size_t(n), size_t(c), size_t(h), size_t(w)}, {size_t(sn), size_t(sc), size_t(sh), size_t(sw)}};
  return SUCCESS;
}
API int cudnnSetTensor4dDescriptor(Tensor* t, int format, int type, int n, int c, int h, int w) {
  if (format == NHWC) return cudnnSetTensor4dDescriptorEx(t, type, n, c, h, w, c * h * w, 1, c * w, c);
  if (format == NCHW) return cudnnSetTensor4dDescriptorEx(t, type, n, c, h, w, c * h * w, h * w, w, 1);
  return refuse(NOT_SUPPORTED, "CUDNN_TENSOR_NCHW_VECT_C");
}
API int cudnnSetFilter4dDescriptor(Filter* f, int type, int format, int k, int c, int h, int w) {
  if (k < 1 || c < 1 || h < 1 || w < 1) return refuse(BAD_PARAM, "a dimension below one");
  if (format != NCHW && format != NHWC) return refuse(NOT_SUPPORTED, "CUDNN_TENSOR_NCHW_VECT_C");
  *f = {type, format, {size_t(k), size_t(c), size_t(h), size_t(w)}};
  return SUCCESS;
}
API int cudnnSetConvolution2dDescriptor(Convolution* c, int pad_h, int pad_w, int stride_h, int stride_w, int dilation_h, int dilation_w, int mode, int compute) {
  if (pad_h < 0 || pad_w < 0 || stride_h < 1 || stride_w < 1 || dilation_h < 1 || dilation_w < 1) return refuse(BAD_PARAM, "padding, stride or dilation");
  int math = c->math, groups = c->groups;
  *c = {{pad_h, pad_w}, {stride_h, stride_w}, {dilation_h, dilation_w}, mode, compute, math, groups};
  return SUCCESS;
}
API int cudnnSetConvolutionMathType(Convolution* c, int math) {
  c->math = math;
  return SUCCESS;
}
API int cudnnSetConvolutionGroupCount(Convolution* c, int groups) {
  if (groups < 1) return BAD_PARAM;
  c->groups = groups;
  return SUCCESS;
}
API int cudnnSetActivationDescriptor(ActivationDescriptor* a, int mode, int, double) {
  a->mode = mode;
  return SUCCESS;
}
API int cudnnGetConvolution2dForwardOutputDim(Convolution* c, Tensor* x, Filter* f, int* n, int* k, int* h, int* w) {
  auto out = [&](int i) { return (int(x->dims[2 + i]) + 2 * c->pad[i] - (c->dilation[i] * (int(f->dims[2 + i]) - 1) + 1)) / c->stride[i] + 1; };
  *n = int(x->dims[0]);
  *k = int(f->dims[0]);
  *h = out(0);
  *w = out(1);
  return SUCCESS;
}

// ---- algorithms
static int list(const Tensor& x, const Filter& w, const Convolution& conv, const Tensor& y, Direction direction, int wanted, int* found, Performance* results) {
  if (wanted < 1) return refuse(BAD_PARAM, "no algorithm is wanted");
  static const int counts[] = {8, 6, 7};
  std::vector<Performance> good, bad;
  // The order of preference: tensor cores and a workspace first, then the one without.
  std::vector<int> order = {1, 0};
  for (int a = 2; a < counts[int(direction)]; a++) order.push_back(a);
  for (int a : order) {
    Shape s;
    int status = understand(x, w, conv, y, direction, a, &s);
    if (status / 1000 == 2) return status;
    Performance p{a, status ? int(NOT_SUPPORTED) : int(SUCCESS), -1.0f, status ? 0 : workspace_of(s, direction, a), direction == Direction::Forward || a == 1, conv.math, {}};
    (status ? bad : good).push_back(p);
  }
  good.insert(good.end(), bad.begin(), bad.end());
  *found = std::min(wanted, int(good.size()));
  memset(static_cast<void*>(results), 0, sizeof *results * size_t(*found));
  for (int i = 0; i < *found; i++) {
    results[i].algorithm = good[size_t(i)].algorithm;
    results[i].status = good[size_t(i)].status;
    results[i].time = good[size_t(i)].status ? -1.0f : 0.1f * float(i + 1);
    results[i].memory = good[size_t(i)].memory;
    results[i].determinism = good[size_t(i)].determinism;
    results[i].math = good[size_t(i)].math;
  }
  return SUCCESS;
}
API int cudnnGetConvolutionForwardAlgorithm_v7(Handle*, Tensor* x, Filter* w, Convolution* c, Tensor* y, int wanted, int* found, Performance* results) {
  return list(*x, *w, *c, *y, Direction::Forward, wanted, found, results);
}
API int cudnnGetConvolutionBackwardDataAlgorithm_v7(Handle*, Filter* w, Tensor* dy, Convolution* c, Tensor* dx, int wanted, int* found, Performance* results) {
  return list(*dx, *w, *c, *dy, Direction::Data, wanted, found, results);
}
API int cudnnGetConvolutionBackwardFilterAlgorithm_v7(Handle*, Tensor* x, Tensor* dy, Convolution* c, Filter* dw, int wanted, int* found, Performance* results) {
  return list(*x, *dw, *c, *dy, Direction::FilterGradient, wanted, found, results);
}
API int cudnnFindConvolutionForwardAlgorithm(Handle*, Tensor* x, Filter* w, Convolution* c, Tensor* y, int wanted, int* found, Performance* results) {
  return list(*x, *w, *c, *y, Direction::Forward, wanted, found, results);
}
API int cudnnFindConvolutionBackwardDataAlgorithm(Handle*, Filter* w, Tensor* dy, Convolution* c, Tensor* dx, int wanted, int* found, Performance* results) {
  return list(*dx, *w, *c, *dy, Direction::Data, wanted, found, results);
}
API int cudnnFindConvolutionBackwardFilterAlgorithm(Handle*, Tensor* x, Tensor* dy, Convolution* c, Filter* dw, int wanted, int* found, Performance* results) {
  return list(*x, *dw, *c, *dy, Direction::FilterGradient, wanted, found, results);
}
// With buffers: real ones run, so they write into the output and the workspace; here both are poisoned.
static int find_with_buffers(Handle* handle, const Shape& s, Direction direction, void* out, size_t out_bytes, void* workspace, size_t workspace_bytes, int wanted, int* found, Performance* results) {
  if (int status = list(s.x, s.w, s.conv, s.y, direction, wanted, found, results)) return status;
  if (!fakecuda_usable(handle->device, out, out_bytes, "cudnnFind...Ex: output") || (workspace_bytes && !fakecuda_usable(handle->device, workspace, workspace_bytes, "cudnnFind...Ex: workspace")))
    return BAD_PARAM;
  for (int i = 0; i < *found; i++)
    if (results[i].memory > workspace_bytes) results[i].status = 2000;
  std::stable_partition(results, results + *found, [](const Performance& p) { return p.status == SUCCESS; });
  struct Poison {
    void* memory;
    size_t bytes;
  };
  int error = fakecuda_enqueue(handle->stream, "cudnn", "find", [](void* data) { fakecuda_poison(static_cast<Poison*>(data)->memory, static_cast<Poison*>(data)->bytes); },
                               [](void* data) { delete static_cast<Poison*>(data); }, new Poison{out, out_bytes});
  return error ? EXECUTION_FAILED : SUCCESS;
}
API int cudnnFindConvolutionForwardAlgorithmEx(Handle* h, Tensor* x, const void*, Filter* w, const void*, Convolution* c, Tensor* y, void* out, int wanted, int* found, Performance* results,
                                               void* workspace, size_t bytes) {
  return find_with_buffers(h, {*x, *y, *w, *c, {}}, Direction::Forward, out, y->extent() * (y->type ? 2 : 4), workspace, bytes, wanted, found, results);
}
API int cudnnFindConvolutionBackwardDataAlgorithmEx(Handle* h, Filter* w, const void*, Tensor* dy, const void*, Convolution* c, Tensor* dx, void* out, int wanted, int* found,
                                                    Performance* results, void* workspace, size_t bytes) {
  return find_with_buffers(h, {*dx, *dy, *w, *c, {}}, Direction::Data, out, dx->extent() * (dx->type ? 2 : 4), workspace, bytes, wanted, found, results);
}
API int cudnnFindConvolutionBackwardFilterAlgorithmEx(Handle* h, Tensor* x, const void*, Tensor* dy, const void*, Convolution* c, Filter* dw, void* out, int wanted, int* found,
                                                      Performance* results, void* workspace, size_t bytes) {
  return find_with_buffers(h, {*x, *dy, *dw, *c, {}}, Direction::FilterGradient, out, dw->count() * (dw->type ? 2 : 4), workspace, bytes, wanted, found, results);
}

static int workspace(const Tensor& x, const Filter& w, const Convolution& c, const Tensor& y, Direction direction, int algorithm, size_t* bytes) {
  Shape s;
  if (int status = understand(x, w, c, y, direction, algorithm, &s)) return status;
  *bytes = workspace_of(s, direction, algorithm);
  return SUCCESS;
}
API int cudnnGetConvolutionForwardWorkspaceSize(Handle*, Tensor* x, Filter* w, Convolution* c, Tensor* y, int algorithm, size_t* bytes) {
  return workspace(*x, *w, *c, *y, Direction::Forward, algorithm, bytes);
}
API int cudnnGetConvolutionBackwardDataWorkspaceSize(Handle*, Filter* w, Tensor* dy, Convolution* c, Tensor* dx, int algorithm, size_t* bytes) {
  return workspace(*dx, *w, *c, *dy, Direction::Data, algorithm, bytes);
}
API int cudnnGetConvolutionBackwardFilterWorkspaceSize(Handle*, Tensor* x, Tensor* dy, Convolution* c, Filter* dw, int algorithm, size_t* bytes) {
  return workspace(*x, *dw, *c, *dy, Direction::FilterGradient, algorithm, bytes);
}

// ---- convolutions
struct Buffers {
  const void *alpha, *beta, *x, *w, *y;
  void* out;
  void* workspace;
  size_t workspace_bytes;
};
static int convolve(Handle* handle, const char* name, const Tensor& x, const Filter& w, const Convolution& conv, const Tensor& y, Direction direction, int algorithm, const Buffers& b,
                    const std::function<int(Job&)>& more = nullptr) {
  if (!handle || !b.alpha || !b.beta) return refuse(BAD_PARAM_NULL, "a null pointer");
  if (int fault = fakecuda_fault("cudnn", handle->device)) return refuse(fault, "FAKE_CUDA_FAIL wants it");
  auto job = std::make_unique<Job>();
  if (int status = understand(x, w, conv, y, direction, algorithm, &job->s)) return refuse(status, std::string(name) + ": algorithm " + std::to_string(algorithm) + " does not take this");
  size_t size = fake::size_of(job->s.type), needed = workspace_of(job->s, direction, algorithm);
  if (b.workspace_bytes < needed) return refuse(BAD_PARAM_SIZE, std::string(name) + ": the workspace has " + std::to_string(b.workspace_bytes) + " bytes, not " + std::to_string(needed));
  auto usable = [&](const void* pointer, size_t elements, const char* what) {
    return uintptr_t(pointer) % size == 0 && fakecuda_usable(handle->device, pointer, elements * size, (std::string(name) + ": " + what).c_str());
  };
  const void *px = direction == Direction::Data ? b.out : b.x, *pw = direction == Direction::FilterGradient ? b.out : b.w, *py = direction == Direction::Forward ? b.out : b.y;
  if (!usable(px, x.extent(), "x") || !usable(pw, w.count(), "w") || !usable(py, y.extent(), "y")) return refuse(BAD_PARAM, "a pointer");
  if (needed && !fakecuda_usable(handle->device, b.workspace, needed, "workspace")) return refuse(BAD_PARAM, "the workspace");
  job->direction = direction;
  job->alpha = *static_cast<const float*>(b.alpha);
  job->beta = *static_cast<const float*>(b.beta);
  job->x = b.x;
  job->w = b.w;
  job->y = b.y;
  job->out = b.out;
  job->workspace = b.workspace;
  job->workspace_bytes = needed;
  if (direction != Direction::Forward && algorithm != 1) {  // these are not deterministic, and it shows
    static unsigned calls = 0;
    job->reverse = __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED) & 1;
  }
  if (more)
    if (int status = more(*job)) return status;
  int error = fakecuda_enqueue(handle->stream, "cudnn", name, run, [](void* data) { delete static_cast<Job*>(data); }, job.release());
  return error ? refuse(EXECUTION_FAILED, std::string(name) + ": CUDA error " + std::to_string(error)) : SUCCESS;
}
API int cudnnConvolutionForward(Handle* h, const void* alpha, Tensor* xd, const void* x, Filter* wd, const void* w, Convolution* c, int algorithm, void* workspace, size_t bytes, const void* beta,
                                Tensor* yd, void* y) {
  return convolve(h, "forward", *xd, *wd, *c, *yd, Direction::Forward, algorithm, {alpha, beta, x, w, nullptr, y, workspace, bytes});
}
API int cudnnConvolutionBackwardData(Handle* h, const void* alpha, Filter* wd, const void* w, Tensor* dyd, const void* dy, Convolution* c, int algorithm, void* workspace, size_t bytes,
                                     const void* beta, Tensor* dxd, void* dx) {
  return convolve(h, "backward_data", *dxd, *wd, *c, *dyd, Direction::Data, algorithm, {alpha, beta, nullptr, w, dy, dx, workspace, bytes});
}
API int cudnnConvolutionBackwardFilter(Handle* h, const void* alpha, Tensor* xd, const void* x, Tensor* dyd, const void* dy, Convolution* c, int algorithm, void* workspace, size_t bytes,
                                       const void* beta, Filter* dwd, void* dw) {
  return convolve(h, "backward_filter", *xd, *dwd, *c, *dyd, Direction::FilterGradient, algorithm, {alpha, beta, x, nullptr, dy, dw, workspace, bytes});
}
API int cudnnConvolutionBiasActivationForward(Handle* h, const void* alpha1, Tensor* xd, const void* x, Filter* wd, const void* w, Convolution* c, int algorithm, void* workspace, size_t bytes,
                                              const void* alpha2, Tensor* zd, const void* z, Tensor* biasd, const void* bias, ActivationDescriptor* activation, Tensor* yd, void* y) {
  if (activation->mode != RELU && activation->mode != IDENTITY) return refuse(NOT_SUPPORTED, "only ReLU and identity can follow");
  if (activation->mode == IDENTITY && algorithm != 1) return refuse(NOT_SUPPORTED, "identity wants IMPLICIT_PRECOMP_GEMM");
  if (x == y) return refuse(BAD_PARAM, "x and y are one buffer");
  if (biasd->dims[1] != yd->dims[1] || biasd->dims[0] != 1 || biasd->dims[2] != 1 || biasd->dims[3] != 1) return refuse(BAD_PARAM_SHAPE, "the bias is not 1 x channels x 1 x 1");
  const float zero = 0;
  return convolve(h, "forward_bias_activation", *xd, *wd, *c, *yd, Direction::Forward, algorithm, {alpha1, &zero, x, w, nullptr, y, workspace, bytes}, [&](Job& job) -> int {
    job.alpha2 = *static_cast<const float*>(alpha2);
    if (!z || memcmp(zd->dims, yd->dims, sizeof yd->dims)) return refuse(BAD_PARAM_SHAPE, "z is not like y");
    if (!fakecuda_usable(h->device, bias, biasd->dims[1] * fake::size_of(job.s.type), "bias")) return refuse(BAD_PARAM, "the bias");
    job.z = z;
    job.bias = bias;
    job.activation = activation->mode;
    return SUCCESS;
  });
}
struct BiasJob {
  Tensor dy;
  Type type;
  float alpha, beta;
  const void* from;
  void* to;
};
API int cudnnConvolutionBackwardBias(Handle* h, const void* alpha, Tensor* dyd, const void* dy, const void* beta, Tensor* dbd, void* db) {
  Type type;
  if (!known(dyd->type, &type) || dbd->dims[1] != dyd->dims[1]) return refuse(BAD_PARAM, "BackwardBias");
  if (!fakecuda_usable(h->device, dy, dyd->extent() * fake::size_of(type), "dy") || !fakecuda_usable(h->device, db, dbd->dims[1] * fake::size_of(type), "db")) return refuse(BAD_PARAM, "a pointer");
  auto* job = new BiasJob{*dyd, type, *static_cast<const float*>(alpha), *static_cast<const float*>(beta), dy, db};
  int error = fakecuda_enqueue(h->stream, "cudnn", "backward_bias", [](void* data) {
    const BiasJob& j = *static_cast<BiasJob*>(data);
    for (size_t c = 0; c < j.dy.dims[1]; c++) {
      float sum = 0;
      for (size_t n = 0; n < j.dy.dims[0]; n++)
        for (size_t y = 0; y < j.dy.dims[2]; y++)
          for (size_t x = 0; x < j.dy.dims[3]; x++) sum += fake::load(j.from, j.type, j.dy.at(n, c, y, x));
      fake::store(j.to, j.type, c, j.alpha * sum + (j.beta != 0 ? j.beta * fake::load(j.to, j.type, c) : 0));
    }
  }, [](void* data) { delete static_cast<BiasJob*>(data); }, job);
  return error ? EXECUTION_FAILED : SUCCESS;
}
