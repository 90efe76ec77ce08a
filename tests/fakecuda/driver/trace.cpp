// Counters (FAKE_CUDA_TRACE), a line per call (FAKE_CUDA_LOG), errors on demand (FAKE_CUDA_FAIL), delays, the report at exit.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"

namespace fake {

const char* variable(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

long number(const char* name, long otherwise) {
  const char* value = variable(name, nullptr);
  return value ? strtol(value, nullptr, 0) : otherwise;
}

static std::string path_of(const char* name) {
  std::string path = variable(name, "");
  if (auto at = path.find("%p"); at != std::string::npos) path.replace(at, 2, std::to_string(getpid()));
  return path;
}

void complain(const std::string& text) {
  std::string line = "fakecuda: " + text + "\n";
  (void)!write(2, line.data(), line.size());
}

struct Fault {
  std::string kind;
  uint64_t nth;
  int code, device;  // device -1: any
  uint64_t seen = 0;
};

static int code_of(const std::string& name) {
  static const std::map<std::string, int> names = {
      {"CUDA_ERROR_INVALID_VALUE", 1}, {"CUDA_ERROR_OUT_OF_MEMORY", 2}, {"CUDA_ERROR_NOT_INITIALIZED", 3}, {"CUDA_ERROR_NO_DEVICE", 100},
      {"CUDA_ERROR_INVALID_DEVICE", 101}, {"CUDA_ERROR_INVALID_CONTEXT", 201}, {"CUDA_ERROR_NO_BINARY_FOR_GPU", 209},
      {"CUDA_ERROR_ECC_UNCORRECTABLE", 214}, {"CUDA_ERROR_INVALID_PTX", 218}, {"CUDA_ERROR_NVLINK_UNCORRECTABLE", 220},
      {"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", 222}, {"CUDA_ERROR_ILLEGAL_ADDRESS", 700}, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", 701},
      {"CUDA_ERROR_LAUNCH_TIMEOUT", 702}, {"CUDA_ERROR_ASSERT", 710}, {"CUDA_ERROR_HARDWARE_STACK_ERROR", 714},
      {"CUDA_ERROR_ILLEGAL_INSTRUCTION", 715}, {"CUDA_ERROR_MISALIGNED_ADDRESS", 716}, {"CUDA_ERROR_LAUNCH_FAILED", 719},
      {"CUDA_ERROR_NOT_SUPPORTED", 801}, {"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", 803}, {"CUDA_ERROR_UNKNOWN", 999}};
  auto found = names.find(name);
  if (found != names.end()) return found->second;
  char* end;
  long code = strtol(name.c_str(), &end, 10);
  if (*end || code <= 0) {
    complain("FAKE_CUDA_FAIL: \"" + name + "\" is neither a number nor an error name known here");
    abort();
  }
  return int(code);
}

// "launch:100:CUDA_ERROR_ILLEGAL_ADDRESS@1,alloc:3:2"
static std::vector<Fault> parse_faults() {
  std::vector<Fault> faults;
  std::string text = variable("FAKE_CUDA_FAIL", "");
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find(',', at), text.size());
    std::string item = text.substr(at, end - at);
    at = end + 1;
    size_t first = item.find(':'), second = item.find(':', first + 1), device = item.find('@');
    if (first == std::string::npos || second == std::string::npos) {
      complain("FAKE_CUDA_FAIL: \"" + item + "\" is not kind:n:code[@device]");
      abort();
    }
    faults.push_back({item.substr(0, first), strtoull(item.c_str() + first + 1, nullptr, 10),
                      code_of(item.substr(second + 1, device == std::string::npos ? device : device - second - 1)),
                      device == std::string::npos ? -1 : atoi(item.c_str() + device + 1)});
  }
  return faults;
}

// Never destroyed: streams still run while the process leaves.
struct Trace {
  std::mutex mutex;
  std::map<std::string, uint64_t> counters, kernels;
  std::vector<Fault> faults = parse_faults();
  FILE* log = nullptr;
  Trace() {
    std::string path = path_of("FAKE_CUDA_LOG");
    if (!path.empty()) log = fopen(path.c_str(), "w");
  }
};
static Trace& trace() {
  static Trace* only = new Trace;
  return *only;
}

int note(const char* kind, Device* device, const std::string& detail) {
  Trace& t = trace();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.counters[kind]++;
  if (t.log) {
    fprintf(t.log, "%s device=%d %s\n", kind, device ? device->index : -1, detail.c_str());
    fflush(t.log);
  }
  for (Fault& fault : t.faults)
    if (fault.kind == kind && (fault.device < 0 || (device && fault.device == device->index)) && ++fault.seen == fault.nth) return fault.code;
  return 0;
}

void count(const char* counter, uint64_t by) {
  Trace& t = trace();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.counters[counter] += by;
}

void count_kernel(const std::string& name) {
  Trace& t = trace();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.kernels[name]++;
}

void delay() {
  static const long micros = number("FAKE_CUDA_DELAY_US", 0);
  if (micros <= 0) return;
  static thread_local uint32_t state = 0x9E3779B9u ^ uint32_t(std::hash<std::thread::id>{}(std::this_thread::get_id()));
  state = state * 1664525u + 1013904223u;  // half to one and a half times the delay, so that streams drift
  std::this_thread::sleep_for(std::chrono::microseconds(micros / 2 + long(uint64_t(state) * uint64_t(micros) >> 32)));
}

static void report() {
  size_t left = 0, left_bytes = 0;
  for (Device* device : devices()) {
    std::lock_guard<std::mutex> lock(device->mutex);
    for (auto& [start, allocation] : device->allocations) {
      left++;
      left_bytes += allocation.bytes;
      if (number("FAKE_CUDA_LEAKS", 0)) complain("device " + std::to_string(device->index) + ": " + std::to_string(allocation.bytes) + " bytes were never freed");
    }
  }
  std::string path = path_of("FAKE_CUDA_TRACE");
  if (!path.empty()) {
    Trace& t = trace();
    std::lock_guard<std::mutex> lock(t.mutex);
    if (FILE* file = fopen(path.c_str(), "w")) {
      fprintf(file, "{\"leaked\": %zu, \"leaked_bytes\": %zu", left, left_bytes);
      for (auto& [name, value] : t.counters) fprintf(file, ", \"%s\": %llu", name.c_str(), (unsigned long long)value);
      fprintf(file, ", \"peak_bytes\": [");
      for (Device* device : devices()) fprintf(file, "%s%zu", device->index ? ", " : "", device->peak);
      const char* comma = "";
      fprintf(file, "], \"kernels\": {");
      for (auto& [name, value] : t.kernels) {
        fprintf(file, "%s\"%s\": %llu", comma, name.c_str(), (unsigned long long)value);
        comma = ", ";
      }
      fprintf(file, "}}\n");
      fclose(file);
    }
  }
  check_guards_at_exit();
}

// At the first cuInit, so that it runs before what was registered earlier and the library (never unloaded) is still whole.
void report_at_exit() {
  static std::once_flag once;
  std::call_once(once, [] { atexit(report); });
}

}  // namespace fake

API int fakecuda_fault(const char* kind, int device) {
  auto& all = fake::devices();
  return fake::note(kind, device >= 0 && device < int(all.size()) ? all[size_t(device)] : nullptr);
}
API void fakecuda_poison(void* memory, size_t bytes) { fake::poison(memory, bytes); }
