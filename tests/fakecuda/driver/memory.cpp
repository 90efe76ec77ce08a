// Device memory with guard zones and poison, pinned host memory, copies.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "driver.h"

// There when the process runs under AddressSanitizer.
extern "C" void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));

namespace fake {

constexpr size_t ARENA = size_t(1) << 42, PAGE = 4096, GUARD = 256;
constexpr unsigned char GUARD_BYTE = 0xA5;

void poison(void* memory, size_t bytes) {
  // 0x7FCD is not a number in f16 and bf16, 0x7FCD7FCD in f32. Written once, then doubled.
  auto* out = static_cast<char*>(memory);
  memcpy(out, "\xCD\x7F", std::min<size_t>(bytes, 2));
  for (size_t done = 2; done < bytes; done *= 2) memcpy(out + done, out, std::min(done, bytes - done));
}

// All arenas lie behind each other: the device of a pointer is a division.
static char* arenas() {
  static char* start = [] {
    size_t bytes = ARENA * std::max<size_t>(devices().size(), 1);
    void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      complain("cannot reserve addresses");
      abort();
    }
    return static_cast<char*>(p);
  }();
  return start;
}

Device* device_of(uintptr_t pointer) {
  uintptr_t start = uintptr_t(arenas());
  size_t index = (pointer - start) / ARENA;
  return pointer < start || index >= devices().size() ? nullptr : devices()[index];
}

bool find_allocation(uintptr_t pointer, size_t bytes, Device** device, std::string* why) {
  *device = device_of(pointer);
  if (!*device) {
    *why = "not device memory";
    return false;
  }
  std::lock_guard<std::mutex> lock((*device)->mutex);
  auto& all = (*device)->allocations;
  auto after = all.upper_bound(pointer);
  if (after == all.begin() || pointer >= std::prev(after)->first + std::max<size_t>(std::prev(after)->second.bytes, 1)) {
    *why = "no live allocation of device " + std::to_string((*device)->index) + " (freed?)";
    return false;
  }
  auto& [start, allocation] = *std::prev(after);
  if (pointer + bytes <= start + allocation.bytes) return true;
  *why = std::to_string(bytes) + " bytes from offset " + std::to_string(pointer - start) + " of an allocation of " + std::to_string(allocation.bytes);
  return false;
}

static void guard_broken(Device* device, const Allocation& allocation, bool before) {
  complain("GUARD: device " + std::to_string(device->index) + ": something wrote " + (before ? "before" : "past the end of") + " an allocation of " +
           std::to_string(allocation.bytes) + " bytes");
}
static bool guards_hold(Device* device, uintptr_t start, const Allocation& allocation) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(allocation.region, allocation.region_bytes);
  auto check = [](const unsigned char* from, const unsigned char* to) {
    for (; from < to; from++)
      if (*from != GUARD_BYTE) return false;
    return true;
  };
  auto* user = reinterpret_cast<const unsigned char*>(start);
  auto* end = reinterpret_cast<const unsigned char*>(allocation.region) + allocation.region_bytes;
  bool before = check(user - GUARD, user), after = check(user + allocation.bytes, end);
  if (!before) guard_broken(device, allocation, true);
  if (!after) guard_broken(device, allocation, false);
  return before && after;
}
void check_guards_at_exit() {
  bool hold = true;
  for (Device* device : devices()) {
    std::lock_guard<std::mutex> lock(device->mutex);
    for (auto& [start, allocation] : device->allocations) hold &= guards_hold(device, start, allocation);
  }
  if (!hold) abort();
}

static int allocate(uint64_t* pointer, size_t bytes, bool wait_for_frees) {
  Device* device = current;
  if (int error = healthy(device)) return error;
  if (!bytes) return INVALID_VALUE;
  if (int fault = note("alloc", device, std::to_string(bytes))) return fault;
  size_t counted = (bytes + 511) / 512 * 512;
  {
    std::unique_lock<std::mutex> lock(device->mutex);
    if (device->used + counted > device->memory && wait_for_frees) {
      // The pool waits for frees that are still queued before it gives up.
      lock.unlock();
      for (Stream* stream : device->all_streams()) stream->synchronize();
      lock.lock();
    }
    size_t region_bytes = (GUARD + bytes + GUARD + PAGE - 1) / PAGE * PAGE;
    if (device->used + counted > device->memory || device->arena_used + region_bytes + PAGE > ARENA) return OUT_OF_MEMORY;
    char* region = arenas() + ARENA * size_t(device->index) + device->arena_used;
    if (mprotect(region, region_bytes, PROT_READ | PROT_WRITE)) return OUT_OF_MEMORY;
    device->arena_used += region_bytes + PAGE;  // the page between stays out of reach
    device->used += counted;
    device->peak = std::max(device->peak, device->used);
    *pointer = uint64_t(region) + GUARD;
    device->allocations[*pointer] = {bytes, region, region_bytes};
    memset(region, GUARD_BYTE, region_bytes);
    poison(region + GUARD, bytes);
    if (__asan_poison_memory_region) {
      __asan_poison_memory_region(region, GUARD);
      __asan_poison_memory_region(region + GUARD + bytes, region_bytes - GUARD - bytes);
    }
  }
  return SUCCESS;
}

static int release(uintptr_t pointer) {
  Device* device = device_of(pointer);
  if (!device) return INVALID_VALUE;
  std::lock_guard<std::mutex> lock(device->mutex);
  auto found = device->allocations.find(pointer);
  if (found == device->allocations.end()) return INVALID_VALUE;
  if (!guards_hold(device, pointer, found->second)) abort();
  madvise(found->second.region, found->second.region_bytes, MADV_DONTNEED);
  mprotect(found->second.region, found->second.region_bytes, PROT_NONE);
  device->used -= (found->second.bytes + 511) / 512 * 512;
  device->allocations.erase(found);
  return SUCCESS;
}

// ---- pinned host memory
struct Pinned {
  std::mutex mutex;
  std::map<uintptr_t, size_t> ranges;
};
static Pinned& pinned() {
  static auto* only = new Pinned;
  return *only;
}
bool is_pinned(const void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto after = pinned().ranges.upper_bound(uintptr_t(pointer));
  if (after == pinned().ranges.begin()) return false;
  auto& [start, size] = *std::prev(after);
  return uintptr_t(pointer) + bytes <= start + size;
}

}  // namespace fake
using namespace fake;

API bool fakecuda_usable(int index, const void* pointer, size_t bytes, const char* who) {
  Device* owner;
  std::string why;
  bool found = find_allocation(uintptr_t(pointer), bytes, &owner, &why);
  if (found && owner->index != index) {
    std::lock_guard<std::mutex> lock(devices()[size_t(index)]->mutex);
    if (!devices()[size_t(index)]->peers.count(owner)) {
      why = "memory of device " + std::to_string(owner->index) + ", used on device " + std::to_string(index) + " without peer access";
      found = false;
    }
  }
  if (!found) complain(std::string(who) + ": " + why);
  return found;
}

// ---- allocations
API int cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
  if (int error = forbidden_while_capturing("cuMemAlloc")) return error;
  return allocate(pointer, bytes, false);
}
API int cuMemFree_v2(uint64_t pointer) {
  if (!pointer) return SUCCESS;
  if (int error = forbidden_while_capturing("cuMemFree")) return error;
  note("free", current);
  if (Device* device = device_of(pointer))
    for (Stream* stream : device->all_streams()) stream->synchronize();  // cuMemFree waits for the device
  return release(pointer);
}
API int cuMemAllocAsync(uint64_t* pointer, size_t bytes, void* handle) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  {
    // The driver would make it a node of the graph; no step of ours may allocate, so here it is an error.
    std::lock_guard<std::mutex> lock(capture_mutex());
    if (stream->capture) {
      complain("cuMemAllocAsync in a capture");
      stream->capture->invalidated = true;
      return CAPTURE_UNSUPPORTED;
    }
  }
  return allocate(pointer, bytes, true);
}
API int cuMemFreeAsync(uint64_t pointer, void* handle) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  Device* owner;
  std::string why;
  if (!find_allocation(pointer, 1, &owner, &why)) {
    complain("cuMemFreeAsync: " + why);
    return INVALID_VALUE;
  }
  note("free", stream->device);
  stream->push([pointer] {
    if (release(pointer) != SUCCESS) {
      complain("cuMemFreeAsync: freed twice");
      abort();
    }
  }, true);
  return SUCCESS;
}
API int cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (int error = healthy(current)) return error;
  std::lock_guard<std::mutex> lock(current->mutex);
  *total = current->memory;
  *free = current->memory - current->used;
  return SUCCESS;
}
API int cuMemGetAddressRange_v2(uint64_t* start, size_t* bytes, uint64_t pointer) {
  Device* owner;
  std::string why;
  if (!find_allocation(pointer, 0, &owner, &why)) return NOT_FOUND;
  std::lock_guard<std::mutex> lock(owner->mutex);
  auto& found = *std::prev(owner->allocations.upper_bound(pointer));
  if (start) *start = found.first;
  if (bytes) *bytes = found.second.bytes;
  return SUCCESS;
}
API int cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (int error = healthy(current)) return error;
  if (int error = forbidden_while_capturing("cuMemHostAlloc")) return error;
  if (!bytes) return INVALID_VALUE;
  if (int fault = note("hostalloc", current, std::to_string(bytes))) return fault;
  *pointer = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
  if (!*pointer) return OUT_OF_MEMORY;
  poison(*pointer, bytes);
  std::lock_guard<std::mutex> lock(pinned().mutex);
  pinned().ranges[uintptr_t(*pointer)] = bytes;
  return SUCCESS;
}
API int cuMemAllocHost_v2(void** pointer, size_t bytes) { return cuMemHostAlloc(pointer, bytes, 0); }
API int cuMemFreeHost(void* pointer) {
  if (int error = forbidden_while_capturing("cuMemFreeHost")) return error;
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    if (!pinned().ranges.erase(uintptr_t(pointer))) return INVALID_VALUE;
  }
  for (Device* device : devices())
    for (Stream* stream : device->all_streams()) stream->synchronize();
  free(pointer);
  return SUCCESS;
}
API int cuMemHostGetDevicePointer_v2(uint64_t* device, void* host, unsigned) {
  *device = uint64_t(host);
  return is_pinned(host, 1) ? SUCCESS : INVALID_VALUE;
}
API int cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  pinned().ranges[uintptr_t(pointer)] = bytes;
  return SUCCESS;
}
API int cuMemHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  return pinned().ranges.erase(uintptr_t(pointer)) ? SUCCESS : INVALID_VALUE;
}
API int cuPointerGetAttribute(void* data, int attribute, uint64_t pointer) {
  Device* device = device_of(pointer);
  if (attribute == 2) *static_cast<int*>(data) = device ? 2 : 1;             // memory type
  else if (attribute == 9 && device) *static_cast<int*>(data) = device->index;  // ordinal
  else return INVALID_VALUE;
  return device || is_pinned(reinterpret_cast<void*>(pointer), 1) ? SUCCESS : INVALID_VALUE;
}

// ---- copies
static bool check(uint64_t pointer, size_t bytes, const char* who) {
  Device* owner;
  std::string why;
  if (!bytes || find_allocation(pointer, bytes, &owner, &why)) return true;
  complain(std::string(who) + ": " + why);
  return false;
}
// Counts a copy and puts it on the stream; a hardware error on demand comes when it runs.
static int copy(Stream* stream, const char* counter, size_t bytes, std::function<void()> run) {
  int fault = note("copy", stream->device, std::string(counter) + " " + std::to_string(bytes));
  if (fault && !is_sticky(fault)) return fault;
  count(counter);
  count((std::string(counter) + "_bytes").c_str(), bytes);
  return submit(stream, [=] {
    if (fault) break_device(stream->device, fault, "FAKE_CUDA_FAIL wants it of this copy");
    else run();
  });
}
API int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* handle) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  if (!check(to, bytes, "cuMemcpyHtoDAsync")) return INVALID_VALUE;
  if (is_pinned(from, bytes)) return copy(stream, "copies_h2d", bytes, [=] { memcpy(reinterpret_cast<void*>(to), from, bytes); });
  count("pageable_copies");
  auto* first = static_cast<const char*>(from);  // staged before the call returns, as the driver does
  auto staged = std::make_shared<std::vector<char>>(first, first + bytes);
  return copy(stream, "copies_h2d", bytes, [=] { memcpy(reinterpret_cast<void*>(to), staged->data(), bytes); });
}
API int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* handle) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  if (!check(from, bytes, "cuMemcpyDtoHAsync")) return INVALID_VALUE;
  bool fast = is_pinned(to, bytes);
  int error = copy(stream, "copies_d2h", bytes, [=] {
    if (fast && number("FAKE_CUDA_DELAY_US", 0)) {  // who reads too early sees nonsense, not last step's values
      poison(to, bytes);
      delay();
    }
    memcpy(to, reinterpret_cast<void*>(from), bytes);
  });
  if (error || fast) return error;
  count("pageable_copies");
  {
    std::lock_guard<std::mutex> lock(capture_mutex());
    if (stream->capture) return SUCCESS;
  }
  stream->synchronize();  // a copy to pageable memory returns when it is done
  return stream->device->error;
}
API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* handle) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  if (!check(to, bytes, "cuMemcpyDtoDAsync") || !check(from, bytes, "cuMemcpyDtoDAsync")) return INVALID_VALUE;
  return copy(stream, device_of(to) == device_of(from) ? "copies_d2d" : "copies_peer", bytes,
              [=] { memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes); });
}
API int cuMemcpyPeerAsync(uint64_t to, void* to_context, uint64_t from, void* from_context, size_t bytes, void* handle) {
  if (device_of(to) != to_context || device_of(from) != from_context) return INVALID_VALUE;
  return cuMemcpyDtoDAsync_v2(to, from, bytes, handle);
}
// The legacy synchronous ones go through the default stream.
static int finish(int error) {
  if (error) return error;
  if (int fault = note("sync", current, "copy")) return fault;
  current->default_stream()->synchronize();
  return current->error;
}
API int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) { return finish(cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr)); }
API int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) { return finish(cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr)); }
API int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) { return finish(cuMemcpyDtoDAsync_v2(to, from, bytes, nullptr)); }
template <class T>
static int fill(uint64_t to, T value, size_t count_, void* handle) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  if (to % sizeof(T) || !check(to, count_ * sizeof(T), "cuMemset")) return INVALID_VALUE;
  int fault = note("memset", stream->device, std::to_string(count_ * sizeof(T)));
  if (fault && !is_sticky(fault)) return fault;
  return submit(stream, [=] {
    if (fault) break_device(stream->device, fault, "FAKE_CUDA_FAIL wants it of this memset");
    else std::fill_n(reinterpret_cast<T*>(to), count_, value);
  });
}
API int cuMemsetD8Async(uint64_t to, unsigned char value, size_t n, void* stream) { return fill(to, value, n, stream); }
API int cuMemsetD16Async(uint64_t to, unsigned short value, size_t n, void* stream) { return fill(to, value, n, stream); }
API int cuMemsetD32Async(uint64_t to, unsigned value, size_t n, void* stream) { return fill(to, value, n, stream); }
API int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t n) { return finish(fill(to, value, n, nullptr)); }
API int cuMemsetD32_v2(uint64_t to, unsigned value, size_t n) { return finish(fill(to, value, n, nullptr)); }
