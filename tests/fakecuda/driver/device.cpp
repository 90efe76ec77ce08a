// Devices, contexts, attributes, peers, errors.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"

namespace fake {

void report_at_exit();
std::atomic<bool> initialized{false};
thread_local Device* current = nullptr;

// CUDA_VISIBLE_DEVICES as the driver reads it: the list ends at the first entry that names no device.
static std::vector<int> visible(int installed) {
  std::vector<int> indices;
  const char* list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) {
    for (int i = 0; i < installed; i++) indices.push_back(i);
    return indices;
  }
  while (*list) {
    char* end;
    long index = strtol(list, &end, 10);
    bool twice = false;
    for (int i : indices) twice |= i == index;
    if (end == list || index < 0 || index >= installed) break;
    if (twice) return {};
    indices.push_back(int(index));
    while (*end == ' ') end++;
    if (*end != ',') break;
    list = end + 1;
  }
  return indices;
}

const std::vector<Device*>& devices() {
  static const std::vector<Device*>* all = [] {
    auto* list = new std::vector<Device*>;
    for (int physical : visible(int(number("FAKE_CUDA_DEVICES", 2)))) {
      auto* device = new Device;
      device->index = int(list->size());
      device->physical = physical;
      device->memory = size_t(number("FAKE_CUDA_MEMORY", 4L << 30));
      list->push_back(device);
    }
    return list;
  }();
  return *all;
}

Stream* Device::default_stream() {
  std::lock_guard<std::mutex> lock(mutex);
  if (!legacy) legacy = new Stream(this, false);
  return legacy;
}

std::vector<Stream*> Device::all_streams() {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<Stream*> all(streams.begin(), streams.end());
  if (legacy) all.push_back(legacy);
  return all;
}

Stream* stream_of(void* handle) {
  if (uintptr_t(handle) <= 2) return current ? current->default_stream() : nullptr;
  return static_cast<Stream*>(handle);
}

int usable_stream(void* handle, Stream** stream) {
  if (!initialized) return NOT_INITIALIZED;
  *stream = stream_of(handle);
  if (!*stream) return INVALID_CONTEXT;
  return (*stream)->destroyed ? int(INVALID_HANDLE) : (*stream)->device->error.load();
}

int healthy(Device* device) {
  if (!initialized) return NOT_INITIALIZED;
  return device ? device->error.load() : INVALID_CONTEXT;
}

bool is_sticky(int error) {
  switch (error) {
    case ECC_UNCORRECTABLE: case NVLINK_UNCORRECTABLE: case ILLEGAL_ADDRESS: case LAUNCH_TIMEOUT: case ASSERT: case HARDWARE_STACK_ERROR:
    case ILLEGAL_INSTRUCTION: case MISALIGNED_ADDRESS: case INVALID_ADDRESS_SPACE: case INVALID_PC: case LAUNCH_FAILED:
      return true;
    default:
      return false;
  }
}

void break_device(Device* device, int error, const std::string& why) {
  int none = 0;
  if (device->error.compare_exchange_strong(none, error))
    complain("device " + std::to_string(device->index) + ": error " + std::to_string(error) + " from now on: " + why);
}

static int driver_version() { return int(number("FAKE_CUDA_DRIVER_VERSION", FAKE_CUDA_MAJOR * 1000)); }
static Device* at(int index) { return index >= 0 && size_t(index) < devices().size() ? devices()[size_t(index)] : nullptr; }

}  // namespace fake
using namespace fake;

API bool fakecuda_driver_is_new_enough() { return driver_version() >= FAKE_CUDA_MAJOR * 1000; }
API int fakecuda_stream_device(void* stream) {
  Stream* s = stream_of(stream);
  return s ? s->device->index : -1;
}
API int fakecuda_current_device() { return current ? current->index : -1; }
API int fakecuda_physical_device(int device) { return at(device) ? at(device)->physical : -1; }

API int cuInit(unsigned flags) {
  if (flags) return INVALID_VALUE;
  if (int fault = note("init", nullptr)) return fault;
  if (devices().empty()) return NO_DEVICE;
  initialized = true;
  report_at_exit();
  return SUCCESS;
}
API int cuDriverGetVersion(int* version) {
  *version = driver_version();
  return SUCCESS;
}
API int cuDeviceGetCount(int* count) {
  if (!initialized) return NOT_INITIALIZED;
  *count = int(devices().size());
  return SUCCESS;
}
API int cuDeviceGet(int* device, int ordinal) {
  if (!initialized) return NOT_INITIALIZED;
  if (!at(ordinal)) return INVALID_DEVICE;
  *device = ordinal;
  return SUCCESS;
}
API int cuDeviceGetName(char* name, int size, int device) {
  if (!at(device)) return INVALID_DEVICE;
  snprintf(name, size_t(size), "CPU threads as CUDA device %d", at(device)->physical);
  return SUCCESS;
}
API int cuDeviceGetUuid_v2(void* uuid, int device) {
  if (!at(device)) return INVALID_DEVICE;
  memset(uuid, 0xFA, 16);
  static_cast<unsigned char*>(uuid)[15] = static_cast<unsigned char>(at(device)->physical);
  return SUCCESS;
}
API int cuDeviceGetUuid(void* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
API int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  if (!at(device)) return INVALID_DEVICE;
  *bytes = at(device)->memory;
  return SUCCESS;
}
API int cuDeviceGetPCIBusId(char* id, int size, int device) {
  if (!at(device)) return INVALID_DEVICE;
  snprintf(id, size_t(size), "0000:%02x:00.0", at(device)->physical + 1);
  return SUCCESS;
}
API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (!at(device)) return INVALID_DEVICE;
  int capability = int(number("FAKE_CUDA_ARCH", 90));
  static const std::map<int, int> fixed = {
      {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 0x7fffffff}, {6, 65535}, {7, 65535},  // limits of a block and of a grid
      {8, 48 << 10}, {9, 64 << 10}, {10, 32}, {12, 65536},                                // shared, constant, warp, registers
      {13, 1000000}, {19, 1}, {31, 1}, {32, 1}, {36, 1000000}, {37, 1024}, {38, 1 << 20}, {39, 2048}, {40, 2}, {41, 1}, {78, 1},
      {79, 1}, {80, 1}, {81, 228 << 10}, {82, 65536}, {97, 227 << 10}, {106, 32}, {111, 1 << 10}, {115, 1}};
  auto found = fixed.find(attribute);
  if (found != fixed.end()) *value = found->second;
  else if (attribute == 16) *value = int(number("FAKE_CUDA_SMS", 4));
  else if (attribute == 33) *value = at(device)->physical + 1;
  else if (attribute == 75) *value = capability / 10;
  else if (attribute == 76) *value = capability % 10;
  else *value = 0;
  return SUCCESS;
}

API int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (!initialized) return NOT_INITIALIZED;
  if (!at(device)) return INVALID_DEVICE;
  if (int fault = note("ctx", at(device))) return fault;
  std::lock_guard<std::mutex> lock(at(device)->mutex);
  at(device)->retained++;
  *context = at(device);
  return SUCCESS;
}
API int cuDevicePrimaryCtxRelease_v2(int device) {
  if (!at(device)) return INVALID_DEVICE;
  std::lock_guard<std::mutex> lock(at(device)->mutex);
  if (!at(device)->retained) return INVALID_CONTEXT;
  at(device)->retained--;
  return SUCCESS;
}
API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  if (!at(device)) return INVALID_DEVICE;
  *flags = 0;
  *active = at(device)->retained > 0;
  return SUCCESS;
}
API int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned) { return at(device) ? SUCCESS : INVALID_DEVICE; }
API int cuCtxCreate_v4(void**, void*, unsigned, int) { return NOT_SUPPORTED; }
API int cuCtxGetCurrent(void** context) {
  if (!initialized) return NOT_INITIALIZED;
  *context = current;
  return SUCCESS;
}
API int cuCtxSetCurrent(void* context) {
  if (!initialized) return NOT_INITIALIZED;
  current = static_cast<Device*>(context);
  return SUCCESS;
}
API int cuCtxGetDevice(int* device) {
  if (!current) return INVALID_CONTEXT;
  *device = current->index;
  return SUCCESS;
}
API int cuCtxSetFlags(unsigned) { return current ? SUCCESS : INVALID_CONTEXT; }
API int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return SUCCESS;
}
API int cuCtxGetLimit(size_t* value, int) {
  *value = 1024;
  return SUCCESS;
}
API int cuCtxSetLimit(int, size_t) { return SUCCESS; }
API int cuCtxSetCacheConfig(int) { return SUCCESS; }
API int cuProfilerStart() { return SUCCESS; }
API int cuProfilerStop() { return SUCCESS; }

API int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!at(device) || !at(peer)) return INVALID_DEVICE;
  *can = device != peer && number("FAKE_CUDA_PEERS", 1);
  return SUCCESS;
}
API int cuDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  if (!at(device) || !at(peer) || device == peer) return INVALID_DEVICE;
  *value = attribute == 2 || attribute == 3 ? int(number("FAKE_CUDA_PEERS", 1)) : 0;  // rank 0: the best there is
  return SUCCESS;
}
API int cuCtxEnablePeerAccess(void* peer, unsigned flags) {
  if (int error = healthy(current)) return error;
  if (flags || peer == current) return INVALID_VALUE;
  if (!number("FAKE_CUDA_PEERS", 1)) return PEER_ACCESS_UNSUPPORTED;
  std::lock_guard<std::mutex> lock(current->mutex);
  return current->peers.insert(static_cast<Device*>(peer)).second ? SUCCESS : PEER_ACCESS_ALREADY_ENABLED;
}
API int cuCtxDisablePeerAccess(void* peer) {
  if (int error = healthy(current)) return error;
  std::lock_guard<std::mutex> lock(current->mutex);
  return current->peers.erase(static_cast<Device*>(peer)) ? SUCCESS : PEER_ACCESS_NOT_ENABLED;
}

static const std::map<int, std::pair<const char*, const char*>>& errors() {
  static const auto* table = new std::map<int, std::pair<const char*, const char*>>{
      {0, {"CUDA_SUCCESS", "no error"}}, {1, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}}, {2, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
      {3, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}}, {100, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
      {101, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}}, {200, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
      {201, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
      {209, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"}},
      {214, {"CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"}},
      {217, {"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"}},
      {218, {"CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"}},
      {220, {"CUDA_ERROR_NVLINK_UNCORRECTABLE", "uncorrectable NVLink error detected during the execution"}},
      {222, {"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."}},
      {301, {"CUDA_ERROR_FILE_NOT_FOUND", "file not found"}}, {400, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
      {401, {"CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"}},
      {500, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}}, {600, {"CUDA_ERROR_NOT_READY", "device not ready"}},
      {700, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
      {701, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
      {702, {"CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"}},
      {704, {"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"}},
      {705, {"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"}},
      {710, {"CUDA_ERROR_ASSERT", "device-side assert triggered"}}, {714, {"CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"}},
      {715, {"CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"}},
      {716, {"CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"}}, {719, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
      {801, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
      {803, {"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"}},
      {900, {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"}},
      {901, {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"}},
      {902, {"CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"}},
      {903, {"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"}},
      {904, {"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"}},
      {905, {"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"}},
      {906, {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"}},
      {907, {"CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"}},
      {908, {"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"}},
      {999, {"CUDA_ERROR_UNKNOWN", "unknown error"}}};
  return *table;
}
API int cuGetErrorName(int error, const char** name) {
  auto found = errors().find(error);
  *name = found == errors().end() ? nullptr : found->second.first;
  return *name ? SUCCESS : INVALID_VALUE;
}
API int cuGetErrorString(int error, const char** text) {
  auto found = errors().find(error);
  *text = found == errors().end() ? nullptr : found->second.second;
  return *text ? SUCCESS : INVALID_VALUE;
}
