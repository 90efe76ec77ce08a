// Modules ("PTX" and "cubins" that hold a shared object, see ../nvrtc.cpp) and launches.
#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "block.h"
#include "driver.h"
#include "../image.h"

// Where a thread-local variable of a loaded object is, for the calling thread; makes room at the first call.
struct TlsIndex {
  unsigned long module, offset;
};
extern "C" void* __tls_get_addr(TlsIndex*);

namespace fake {

struct Module {
  Device* device;
  void* handle;
  size_t shared_bytes;  // of the thread-local segment, in which __shared__ variables lie
  bool sanitized;
};
struct Function {
  Module* module;
  const Kernel* kernel;
  std::atomic<size_t> max_dynamic_shared{48 << 10};
};

static size_t thread_local_bytes(void* handle) {
  struct Search {
    ElfW(Addr) address;
    size_t bytes;
  } search{static_cast<link_map*>(handle)->l_addr, 0};
  dl_iterate_phdr([](dl_phdr_info* info, size_t, void* data) {
    auto* s = static_cast<Search*>(data);
    if (info->dlpi_addr != s->address) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++)
      if (info->dlpi_phdr[i].p_type == PT_TLS) s->bytes = info->dlpi_phdr[i].p_memsz;
    return 1;
  }, &search);
  return search.bytes;
}

static int load(void** module, const char* text) {
  Image image;
  if (!image.parse(text)) return INVALID_IMAGE;
  int capability = int(number("FAKE_CUDA_ARCH", 90)), version = int(number("FAKE_CUDA_DRIVER_VERSION", FAKE_CUDA_MAJOR * 1000));
  if (image.is_ptx && image.nvrtc_major * 1000 > version) return UNSUPPORTED_PTX_VERSION;
  if (image.arch > capability || (!image.is_ptx && image.arch / 10 != capability / 10)) return NO_BINARY_FOR_GPU;
  std::string path = cache_folder() + "/module-" + image.sum + ".so";
  if (access(path.c_str(), R_OK)) {
    std::string part = path + "." + std::to_string(getpid()) + "." + std::to_string(reinterpret_cast<uintptr_t>(&image));
    FILE* file = fopen(part.c_str(), "wb");
    if (!file) {
      complain("cannot write " + part + ": set FAKE_CUDA_CACHE to a folder");
      return UNKNOWN;
    }
    fwrite(image.object.data(), 1, image.object.size(), file);
    fclose(file);
    rename(part.c_str(), path.c_str());
  }
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    complain(dlerror());
    return INVALID_IMAGE;
  }
  auto* sanitized = static_cast<unsigned char*>(dlsym(handle, "fakecuda_sanitized"));
  *module = new Module{current, handle, thread_local_bytes(handle), sanitized && *sanitized};
  return SUCCESS;
}

// What the arguments point to when the kernel starts: live memory that this device may use, as aligned as its type.
static void check_arguments(Device* device, const Kernel& kernel, void** arguments) {
  for (unsigned i = 0; i < kernel.arguments; i++) {
    unsigned alignment = kernel.pointee_alignments[i];
    for (unsigned at = 0; at + 8 <= kernel.sizes[i]; at += 8) {
      uintptr_t pointer;
      memcpy(&pointer, static_cast<char*>(arguments[i]) + at, 8);
      Device* owner;
      std::string why, where = std::string("kernel ") + kernel.name + ", argument " + std::to_string(i) + ": ";
      if (device_of(pointer)) {
        if (!find_allocation(pointer, 0, &owner, &why) && !find_allocation(pointer - 1, 0, &owner, &why))
          return break_device(device, ILLEGAL_ADDRESS, where + why);
        std::lock_guard<std::mutex> lock(device->mutex);
        if (owner != device && !device->peers.count(owner))
          return break_device(device, ILLEGAL_ADDRESS, where + "memory of device " + std::to_string(owner->index));
      } else if (alignment && pointer && !is_pinned(reinterpret_cast<void*>(pointer), 1)) {
        return break_device(device, ILLEGAL_ADDRESS, where + "host memory that is not pinned");
      }
      if (alignment && pointer % alignment) return break_device(device, MISALIGNED_ADDRESS, where + "a misaligned pointer");
    }
  }
}

struct Arguments {
  std::vector<char> bytes;
  std::vector<size_t> offsets;
};

static void execute(Function* function, Launch launch, const Arguments& arguments) {
  static auto* one_at_a_time = new std::mutex;  // under AddressSanitizer __shared__ variables are plain statics
  Module* module = function->module;
  std::vector<void*> pointers;
  for (size_t offset : arguments.offsets) pointers.push_back(const_cast<char*>(arguments.bytes.data()) + offset);
  launch.arguments = pointers.data();
  check_arguments(module->device, *launch.kernel, launch.arguments);
  if (module->device->error) return;
  std::unique_lock<std::mutex> lock(*one_at_a_time, std::defer_lock);
  if (module->sanitized) lock.lock();
  void* shared = nullptr;
  TlsIndex index{0, 0};
  if (module->shared_bytes && !dlinfo(module->handle, RTLD_DI_TLS_MODID, &index.module)) shared = __tls_get_addr(&index);
  launch.static_shared = static_cast<char*>(shared);
  launch.static_shared_bytes = module->shared_bytes;
  run_kernel(launch);
}

}  // namespace fake
using namespace fake;

API int cuModuleLoadData(void** module, const void* image) {
  if (int error = healthy(current)) return error;
  if (int error = forbidden_while_capturing("cuModuleLoadData")) return error;
  if (int fault = note("module", current)) return fault;
  return load(module, static_cast<const char*>(image));
}
API int cuModuleLoadDataEx(void** module, const void* image, unsigned, void*, void*) { return cuModuleLoadData(module, image); }
API int cuModuleLoad(void** module, const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) return FILE_NOT_FOUND;
  std::string text;
  char part[4096];
  for (size_t n; (n = fread(part, 1, sizeof part, file)) > 0;) text.append(part, n);
  fclose(file);
  return cuModuleLoadData(module, text.c_str());
}
API int cuModuleUnload(void* module) { return module ? SUCCESS : INVALID_HANDLE; }  // its code stays: work that uses it may be queued
API int cuModuleGetFunction(void** function, void* handle, const char* name) {
  auto* module = static_cast<Module*>(handle);
  auto* kernels = static_cast<const Kernel*>(dlsym(module->handle, "fakecuda_kernels"));
  for (; kernels && kernels->name; kernels++)
    if (!strcmp(kernels->name, name)) {
      auto* made = new Function;
      made->module = module;
      made->kernel = kernels;
      *function = made;
      return SUCCESS;
    }
  return NOT_FOUND;
}
API int cuModuleGetGlobal_v2(uint64_t*, size_t*, void*, const char*) { return NOT_FOUND; }
API int cuFuncGetAttribute(int* value, int attribute, void* handle) {
  auto* function = static_cast<Function*>(handle);
  *value = attribute == 0 ? (function->kernel->max_threads ? int(function->kernel->max_threads) : 1024)
           : attribute == 4 ? 32
           : attribute == 8 ? int(function->max_dynamic_shared) : 0;
  return SUCCESS;
}
API int cuFuncSetAttribute(void* handle, int attribute, int value) {
  if (attribute != 8) return SUCCESS;
  if (value < 0 || value > 227 << 10) return INVALID_VALUE;
  static_cast<Function*>(handle)->max_dynamic_shared = size_t(value);
  return SUCCESS;
}
API int cuFuncSetCacheConfig(void*, int) { return SUCCESS; }
API int cuFuncGetName(const char** name, void* handle) {
  *name = static_cast<Function*>(handle)->kernel->name;
  return SUCCESS;
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, void*, int threads, size_t, unsigned) {
  if (threads < 1 || threads > 1024) return INVALID_VALUE;
  *blocks = 2048 / ((threads + 31) / 32 * 32);
  return SUCCESS;
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t shared) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
API int cuOccupancyMaxPotentialBlockSize(int* grid, int* block, void*, void*, size_t, int) {
  *block = 256;
  *grid = int(number("FAKE_CUDA_SMS", 4)) * 8;
  return SUCCESS;
}

API int cuLaunchKernel(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream_handle,
                       void** parameters, void** extra) {
  auto* function = static_cast<Function*>(handle);
  Stream* stream;
  if (int error = usable_stream(stream_handle, &stream)) return error;
  if (!function || function->module->device != stream->device || current != stream->device) return INVALID_HANDLE;
  const Kernel& kernel = *function->kernel;
  uint64_t threads = uint64_t(bx) * by * bz;
  bool fits = gx && gy && gz && bx && by && bz && gx <= 0x7fffffff && gy <= 65535 && gz <= 65535 && bx <= 1024 && by <= 1024 && bz <= 64 && threads <= 1024;
  if (!fits || shared > function->max_dynamic_shared || (kernel.max_threads && threads > kernel.max_threads) || extra || (kernel.arguments && !parameters)) {
    complain(std::string("launch of ") + kernel.name + " refused: grid " + std::to_string(gx) + "x" + std::to_string(gy) + "x" + std::to_string(gz) + ", block " +
             std::to_string(bx) + "x" + std::to_string(by) + "x" + std::to_string(bz) + ", " + std::to_string(shared) + " bytes of shared memory");
    return INVALID_VALUE;
  }
  int fault = note("launch", stream->device, kernel.name);
  if (fault && !is_sticky(fault)) return fault;
  count_kernel(kernel.name);
  auto arguments = std::make_shared<Arguments>();  // the call copies them, as the driver's does
  for (unsigned i = 0; i < kernel.arguments; i++) {
    arguments->offsets.push_back((arguments->bytes.size() + 15) / 16 * 16);
    arguments->bytes.resize(arguments->offsets.back() + kernel.sizes[i]);
    memcpy(arguments->bytes.data() + arguments->offsets.back(), parameters[i], kernel.sizes[i]);
  }
  Launch launch{&kernel, {gx, gy, gz}, {bx, by, bz}, shared, nullptr, nullptr, 0};
  return submit(stream, [=] {
    if (fault) break_device(stream->device, fault, std::string("FAKE_CUDA_FAIL wants it of ") + kernel.name);
    else execute(function, launch, *arguments);
  }, true);
}
API int cuLaunchCooperativeKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**) { return NOT_SUPPORTED; }
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned count;
};
API int cuLaunchKernelEx(const LaunchConfig* c, void* function, void** parameters, void** extra) {
  return cuLaunchKernel(function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->stream, parameters, extra);
}
