// A stub NCCL. A communicator is a file in shared memory that every rank maps, whatever process it is in; an operation is a task on each
// rank's stream, and the tasks meet at barriers in that file. Sums are a fixed binary tree over the ranks: ((0 + 1) + (2 + 3)) + 4.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace fake {

enum Result { SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum DataType { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, TYPES };
enum Operation { SUM, PROD, MAX, MIN, AVG, OPERATIONS };
enum class Kind : uint32_t { AllReduce, Reduce, Broadcast, AllGather, ReduceScatter };
enum State : uint32_t { ABSENT, PRESENT, LEFT, ABORTED };
constexpr size_t CHUNK = 1 << 20, MOST_RANKS = 64;
constexpr size_t SIZES[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

struct UniqueId {
  char text[128];
};

// What a rank is about to do; all ranks must say the same.
struct Call {
  uint64_t sequence, count;
  Kind kind;
  int32_t type, operation, root;
  bool operator!=(const Call& o) const { return memcmp(this, &o, sizeof *this) != 0; }
};
struct Slot {
  std::atomic<uint32_t> state;
  int32_t device;  // on the machine
  char host[64];
  Call call;
};
struct Shared {
  std::atomic<uint32_t> ranks, joined, arrived, generation;
  Slot slots[MOST_RANKS];
};

// Says it on stderr and to ncclGetLastError.
void complain(const std::string& text);
std::string last_complaint();

struct Comm {
  int rank = 0, ranks = 0, device = -1, file = -1;
  bool nonblocking = false;
  size_t bytes = 0;
  Shared* shared = nullptr;
  std::string path;
  std::atomic<int> error{SUCCESS};
  std::atomic<bool> aborted{false}, in_progress{false};
  std::atomic<std::thread::id> user{};
  uint64_t sequence = 0;
  std::mutex one_at_a_time;

  int join(int nranks, const UniqueId& id, int own_rank);
  int wait_for_all();
  bool barrier();
  void stall();
  void abort();
  char* slot(int r) const { return reinterpret_cast<char*>(shared) + sizeof(Shared) + size_t(r) * CHUNK; }
  char* result() const { return slot(ranks); }
  ~Comm();

 private:
  bool waits_in_vain(const std::atomic<uint32_t>& word, uint32_t seen);
};
using Handle = std::shared_ptr<Comm>;

// One rank's part of an operation; the task that a stream runs.
struct Job {
  Handle comm;
  Call call;
  const char* send;
  char* receive;
  int stall_with;  // an asynchronous error on demand
};
void run(void* job);

}  // namespace fake
