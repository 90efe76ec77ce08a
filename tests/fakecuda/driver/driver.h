// The inside of the stub driver: devices, streams that are threads, events, captures. See ../README.md.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace fake {

enum Result : int {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201, NO_BINARY_FOR_GPU = 209, ECC_UNCORRECTABLE = 214, PEER_ACCESS_UNSUPPORTED = 217, NVLINK_UNCORRECTABLE = 220,
  UNSUPPORTED_PTX_VERSION = 222, FILE_NOT_FOUND = 301, INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600,
  ILLEGAL_ADDRESS = 700, LAUNCH_TIMEOUT = 702, PEER_ACCESS_ALREADY_ENABLED = 704, PEER_ACCESS_NOT_ENABLED = 705, ASSERT = 710,
  HARDWARE_STACK_ERROR = 714, ILLEGAL_INSTRUCTION = 715, MISALIGNED_ADDRESS = 716, INVALID_ADDRESS_SPACE = 717, INVALID_PC = 718,
  LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_MERGE = 902,
  CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907,
  CAPTURE_WRONG_THREAD = 908, UNKNOWN = 999
};

using Clock = std::chrono::steady_clock;
struct Device;
struct Stream;

// One recording of an event.
struct Moment {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  Clock::time_point time;
  void reach();
  void wait();
  bool is_reached();
};

// A graph in the order of its capture, which is an order of its dependencies.
struct Node {
  std::function<void()> run;
  std::vector<size_t> after;
  Stream* lane;  // the stream it was captured on: branches run beside each other
  bool kernel, library;
};
struct Graph {
  Device* device;
  std::vector<Node> nodes;
};

struct Capture {
  Stream* origin;
  int mode;  // 0 global, 1 of the thread, 2 relaxed
  std::thread::id thread;
  bool invalidated = false;
  std::unique_ptr<Graph> graph = std::make_unique<Graph>();
  std::map<Stream*, std::set<size_t>> frontier;  // per stream of the capture, the nodes that its next one comes after
};

struct Event {
  Device* device;
  bool timing;
  std::shared_ptr<Moment> moment;    // the last recording, if any
  std::shared_ptr<Capture> capture;  // the capture it was last recorded in, if any
  std::set<size_t> captured;
};

struct Task {
  std::function<void()> run;
  bool always;  // events and frees: also after an error of the device
};

struct Stream {
  Device* device;
  bool blocking;  // waits for the legacy default stream, as it waits for this one
  int priority = 0;
  std::shared_ptr<Capture> capture;  // guarded by capture_mutex()
  std::atomic<bool> destroyed{false};

  Stream(Device* device, bool blocking);
  void retire();  // the thread ends when its work is done; the object stays, so that a stale handle is found out
  void push(std::function<void()> run, bool always);
  void synchronize();
  bool idle();
  std::shared_ptr<Moment> record();
  void wait(std::shared_ptr<Moment> moment);

 private:
  void work();
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  uint64_t pushed = 0, finished = 0;
};

struct Allocation {
  size_t bytes;
  char* region;  // with the guard zones, whole pages
  size_t region_bytes;
};

struct Device {
  int index, physical;
  size_t memory;
  std::mutex mutex;  // of everything below
  size_t used = 0, peak = 0;
  std::map<uintptr_t, Allocation> allocations;
  std::set<Stream*> streams;
  Stream* legacy = nullptr;
  std::set<Device*> peers;
  int retained = 0;
  char* arena = nullptr;  // addresses are never given out twice, so a stale pointer is found out
  size_t arena_used = 0;
  std::atomic<int> error{0};  // what a kernel or the hardware did; stays
  Stream* default_stream();
  std::vector<Stream*> all_streams();
};

const std::vector<Device*>& devices();
extern std::atomic<bool> initialized;
extern thread_local Device* current;
const char* variable(const char* name, const char* otherwise);
long number(const char* name, long otherwise);

// The stream a handle means: null, 1 and 2 are default streams of the thread's context.
Stream* stream_of(void* handle);
// The same, with the errors of a call that uses it.
int usable_stream(void* handle, Stream** stream);

// What every call that touches a device begins with: is there a context, is it healthy.
int healthy(Device* device);
// Makes an error stay.
void break_device(Device* device, int error, const std::string& why);
bool is_sticky(int error);

// ---- captures (stream.cpp)
std::mutex& capture_mutex();
// INVALID_* for a call that no capture allows (allocation, synchronisation of the device); invalidates the capture.
int forbidden_while_capturing(const char* call);
// Puts work on a stream, or into the graph that it is being captured into.
int submit(Stream* stream, std::function<void()> run, bool kernel = false, bool library = false);

// ---- memory (memory.cpp)
struct Range {
  Device* device;
  const Allocation* allocation;
  uintptr_t start;
};
// The device in whose address range a pointer lies, null for host memory.
Device* device_of(uintptr_t pointer);
bool find_allocation(uintptr_t pointer, size_t bytes, Device** device, std::string* why);
bool is_pinned(const void* pointer, size_t bytes);
void check_guards_at_exit();
void poison(void* memory, size_t bytes);

// ---- counters and faults (trace.cpp)
// Counts a call and returns the error that FAKE_CUDA_FAIL wants for it, or 0.
int note(const char* kind, Device* device, const std::string& detail = "");
void count(const char* counter, uint64_t by = 1);
void count_kernel(const std::string& name);
void complain(const std::string& text);
void delay();

}  // namespace fake
