// A stub NCCL. A communicator is a file in shared memory that every rank maps, whatever process it is in; an operation is a task on each
// rank's stream, and the tasks meet at barriers in that file. Sums are a fixed binary tree over the ranks: ((0 + 1) + (2 + 3)) + 4.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "floats.h"
#include "hooks.h"

#define API extern "C" __attribute__((visibility("default")))

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

static thread_local std::string last_error;
static void complain(const std::string& text) {
  last_error = text;
  std::string line = "fakenccl: " + text + "\n";
  (void)!write(2, line.data(), line.size());
}

static void sleep_until_changed(std::atomic<uint32_t>& word, uint32_t seen) {
  timespec timeout{0, 100'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}
static void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

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
  char* slot(int r) const { return reinterpret_cast<char*>(shared) + sizeof(Shared) + size_t(r) * CHUNK; }
  char* result() const { return slot(ranks); }
  ~Comm();

 private:
  bool somebody_is_gone();
};

static std::string host_name() {
  char name[64] = {};
  const char* set = getenv("NCCL_HOSTID");
  if (set && *set) snprintf(name, sizeof name, "%s", set);
  else gethostname(name, sizeof name - 1);
  return name;
}

static struct flock lock_of(int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

int Comm::join(int nranks, const UniqueId& id, int own_rank) {
  if (nranks < 1 || size_t(nranks) > MOST_RANKS || own_rank < 0 || own_rank >= nranks || strncmp(id.text, "/dev/shm/fakenccl-", 18)) {
    complain("rank " + std::to_string(own_rank) + " of " + std::to_string(nranks) + ": a wrong rank, or an id that is none");
    return INVALID_ARGUMENT;
  }
  rank = own_rank;
  ranks = nranks;
  device = fakecuda_current_device();
  if (device < 0 || !fakecuda_driver_is_new_enough()) {
    complain("no context is current, or the driver is older than this library");
    return UNHANDLED_CUDA_ERROR;
  }
  path = id.text;
  bytes = sizeof(Shared) + size_t(nranks + 1) * CHUNK;
  file = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  struct stat status;
  if (file < 0 || fstat(file, &status)) return SYSTEM_ERROR;
  if (size_t(status.st_size) < bytes && ftruncate(file, off_t(bytes))) return SYSTEM_ERROR;
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (map == MAP_FAILED) return SYSTEM_ERROR;
  shared = static_cast<Shared*>(map);
  uint32_t expected = 0;
  if (!shared->ranks.compare_exchange_strong(expected, uint32_t(nranks)) && expected != uint32_t(nranks)) {
    complain("ranks disagree about their number: " + std::to_string(nranks) + " and " + std::to_string(expected));
    return INVALID_ARGUMENT;
  }
  // The lock says that this process lives: the kernel drops it however the process ends.
  auto lock = lock_of(rank);
  if (fcntl(file, F_OFD_SETLK, &lock)) {
    complain("rank " + std::to_string(rank) + " is there twice");
    return INVALID_USAGE;
  }
  Slot& own = shared->slots[rank];
  own.device = fakecuda_physical_device(device);
  snprintf(own.host, sizeof own.host, "%s", host_name().c_str());
  own.state = PRESENT;
  shared->joined++;
  wake(shared->joined);
  return SUCCESS;
}

bool Comm::somebody_is_gone() {
  for (int r = 0; r < ranks; r++) {
    if (r == rank || shared->slots[r].state == ABSENT) continue;
    auto lock = lock_of(r);
    bool dead = fcntl(file, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
    if (dead || shared->slots[r].state != PRESENT) {
      if (!error) complain("rank " + std::to_string(rank) + ": rank " + std::to_string(r) + (dead ? " died" : " has left the communicator"));
      return true;
    }
  }
  return false;
}

// Until every rank has joined.
int Comm::wait_for_all() {
  for (uint32_t joined; (joined = shared->joined) < uint32_t(ranks);) {
    if (aborted) return INTERNAL_ERROR;
    sleep_until_changed(shared->joined, joined);
    if (shared->joined < uint32_t(ranks) && somebody_is_gone()) return error = REMOTE_ERROR;
  }
  unlink(path.c_str());
  for (int r = 0; r < ranks; r++) {
    const Slot &own = shared->slots[rank], &other = shared->slots[r];
    if (r != rank && other.device == own.device && !strcmp(other.host, own.host)) {
      complain("Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(r) + " both on CUDA device " + std::to_string(own.device));
      return INVALID_USAGE;
    }
  }
  return SUCCESS;
}

// False when the communicator was aborted meanwhile. A peer that is gone only sets the asynchronous error: as with the real library, who
// waits goes on waiting until ncclCommAbort.
bool Comm::barrier() {
  uint32_t generation = shared->generation;
  if (shared->arrived.fetch_add(1) + 1 == uint32_t(ranks)) {
    shared->arrived = 0;
    shared->generation++;
    wake(shared->generation);
    return !aborted;
  }
  while (shared->generation == generation) {
    if (aborted) return false;
    sleep_until_changed(shared->generation, generation);
    if (shared->generation == generation && somebody_is_gone()) {
      error = REMOTE_ERROR;
      stall();
    }
  }
  return !aborted;
}

void Comm::stall() {
  while (!aborted) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

Comm::~Comm() {
  if (shared) {
    uint32_t present = PRESENT;
    shared->slots[rank].state.compare_exchange_strong(present, LEFT);
    if (shared->joined < uint32_t(ranks)) unlink(path.c_str());
    munmap(shared, bytes);
  }
  if (file >= 0) close(file);
}
using Handle = std::shared_ptr<Comm>;

// ---- arithmetic
template <class T, class Get, class Put, class Round>
static void combine(const Comm& comm, char* out, size_t from, size_t to, int operation, Get get, Put put, Round round) {
  constexpr size_t BLOCK = 256;
  std::vector<T> values(size_t(comm.ranks) * BLOCK);
  for (size_t at = from; at < to; at += BLOCK) {
    size_t n = std::min(BLOCK, to - at);
    for (int r = 0; r < comm.ranks; r++)
      for (size_t i = 0; i < n; i++) values[size_t(r) * BLOCK + i] = get(comm.slot(r), at + i);
    for (int step = 1; step < comm.ranks; step *= 2)
      for (int r = 0; r + step < comm.ranks; r += 2 * step) {
        T *a = &values[size_t(r) * BLOCK], *b = &values[size_t(r + step) * BLOCK];
        auto all = [&](auto merge) {
          for (size_t i = 0; i < n; i++) a[i] = merge(a[i], b[i]);
        };
        switch (operation) {
          case PROD: all([&](T x, T y) { return T(round(x * y)); }); break;
          case MAX: all([](T x, T y) { return x > y ? x : y; }); break;
          case MIN: all([](T x, T y) { return x < y ? x : y; }); break;
          default: all([&](T x, T y) { return T(round(x + y)); });
        }
      }
    for (size_t i = 0; i < n; i++) {
      T v = values[i];
      if (operation == AVG) v = std::is_floating_point<T>::value ? T(v * (T(1) / T(comm.ranks))) : T(v / T(comm.ranks));
      put(out, at + i, v);
    }
  }
}
template <class T>
static void combine_plain(const Comm& comm, char* out, size_t from, size_t to, int operation) {
  combine<T>(comm, out, from, to, operation, [](const char* p, size_t i) { return reinterpret_cast<const T*>(p)[i]; },
             [](char* p, size_t i, T v) { reinterpret_cast<T*>(p)[i] = v; }, [](auto v) { return T(v); });
}
template <fake::Type type>
static void combine_short(const Comm& comm, char* out, size_t from, size_t to, int operation) {
  combine<float>(comm, out, from, to, operation, [](const char* p, size_t i) { return fake::load(p, type, i); }, [](char* p, size_t i, float v) { fake::store(p, type, i, v); },
                 [](float v) { return type == fake::Type::F16 ? fake::to_f16(v) : fake::to_bf16(v); });
}
// The slots' elements from .. to, combined, at the same place of `out`.
static void combine_any(const Comm& comm, char* out, size_t from, size_t to, int type, int operation) {
  switch (type) {
    case INT8: return combine_plain<int8_t>(comm, out, from, to, operation);
    case UINT8: return combine_plain<uint8_t>(comm, out, from, to, operation);
    case INT32: return combine_plain<int32_t>(comm, out, from, to, operation);
    case UINT32: return combine_plain<uint32_t>(comm, out, from, to, operation);
    case INT64: return combine_plain<int64_t>(comm, out, from, to, operation);
    case UINT64: return combine_plain<uint64_t>(comm, out, from, to, operation);
    case FLOAT16: return combine_short<fake::Type::F16>(comm, out, from, to, operation);
    case FLOAT32: return combine_plain<float>(comm, out, from, to, operation);
    case FLOAT64: return combine_plain<double>(comm, out, from, to, operation);
    default: return combine_short<fake::Type::BF16>(comm, out, from, to, operation);
  }
}

// ---- operations
struct Job {
  Handle comm;
  Call call;
  const char* send;
  char* receive;
  int stall_with;  // an asynchronous error on demand
};

// Puts a part of `send` into this rank's slot, meets the others, works on all slots, meets the others again.
static bool exchange(Job& job, bool first, const char* from, size_t bytes, const std::function<void()>& work) {
  Comm& comm = *job.comm;
  if (from) memcpy(comm.slot(comm.rank), from, bytes);
  if (first) comm.shared->slots[comm.rank].call = job.call;
  if (!comm.barrier()) return false;
  if (first)
    for (int r = 0; r < comm.ranks; r++)
      if (const Call& other = comm.shared->slots[r].call; other != job.call) {
        complain("rank " + std::to_string(comm.rank) + " calls operation " + std::to_string(int(job.call.kind)) + " of " + std::to_string(job.call.count) + " elements as its call " +
                 std::to_string(job.call.sequence) + ", rank " + std::to_string(r) + " operation " + std::to_string(int(other.kind)) + " of " + std::to_string(other.count) + " as its call " +
                 std::to_string(other.sequence));
        comm.error = INVALID_USAGE;
        comm.stall();
        return false;
      }
  work();
  return comm.barrier();
}

static void run(void* data) {
  Job job = *static_cast<Job*>(data);  // a graph runs it again
  Comm& comm = *job.comm;
  std::lock_guard<std::mutex> lock(comm.one_at_a_time);
  if (job.stall_with) comm.error = job.stall_with;
  if (comm.error) comm.stall();
  if (comm.aborted) return;
  job.call.sequence = comm.sequence++;
  size_t size = SIZES[job.call.type], count = job.call.count, step = CHUNK / size;
  bool first = true;
  if (job.call.kind == Kind::ReduceScatter) {
    for (int to = 0; to < comm.ranks; to++)
      for (size_t at = 0; at < count; at += step, first = false) {
        size_t n = std::min(step, count - at);
        if (!exchange(job, first, job.send + (size_t(to) * count + at) * size, n * size, [&] {
              if (to != comm.rank) return;
              combine_any(comm, comm.result(), 0, n, job.call.type, job.call.operation);
              memcpy(job.receive + at * size, comm.result(), n * size);
            }))
          return;
      }
    return;
  }
  for (size_t at = 0; at < count; at += step, first = false) {
    size_t n = std::min(step, count - at), bytes = n * size;
    const char* from = job.call.kind == Kind::Broadcast && job.call.root != comm.rank ? nullptr : job.send + at * size;
    bool fine = exchange(job, first, from, bytes, [&] {
      if (job.call.kind == Kind::AllReduce || job.call.kind == Kind::Reduce) {
        size_t r = size_t(comm.rank), all = size_t(comm.ranks);  // each rank combines its share
        combine_any(comm, comm.result(), n * r / all, n * (r + 1) / all, job.call.type, job.call.operation);
      } else if (job.call.kind == Kind::Broadcast) {
        memcpy(job.receive + at * size, comm.slot(job.call.root), bytes);
      } else {
        for (int r = 0; r < comm.ranks; r++) memcpy(job.receive + (size_t(r) * count + at) * size, comm.slot(r), bytes);
      }
    });
    if (!fine) return;
    // The result is not written again before every rank has come to the next first barrier.
    if (job.call.kind == Kind::AllReduce || (job.call.kind == Kind::Reduce && job.call.root == comm.rank)) memcpy(job.receive + at * size, comm.result(), bytes);
  }
}

// ---- groups
struct Posted {
  std::unique_ptr<Job> job;
  void* stream;
};
static thread_local int group_depth = 0;
static thread_local std::vector<Posted> posted;
static thread_local std::vector<Handle> joining;

static int enqueue(Posted& p) {
  static const char* names[] = {"allreduce", "reduce", "broadcast", "allgather", "reducescatter"};
  const char* name = names[int(p.job->call.kind)];
  int error = fakecuda_enqueue(p.stream, "nccl", name, run, [](void* data) { delete static_cast<Job*>(data); }, p.job.release());
  if (error) complain(std::string(name) + ": CUDA error " + std::to_string(error));
  return error ? UNHANDLED_CUDA_ERROR : SUCCESS;
}
static int answer(Comm& comm) {
  if (!comm.nonblocking) return SUCCESS;
  comm.in_progress = true;
  return IN_PROGRESS;
}

// One thread that drives several ranks must group its calls: the first would wait for ever for the second.
static std::mutex registry_mutex;
static std::vector<std::weak_ptr<Comm>>& registry() {
  static auto* all = new std::vector<std::weak_ptr<Comm>>;
  return *all;
}
static bool drives_another_rank(const Comm& comm) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  for (auto& weak : registry())
    if (auto other = weak.lock(); other && other.get() != &comm && other->path == comm.path && other->user.load() == std::this_thread::get_id()) return true;
  return false;
}

static int post(Kind kind, const void* send, void* receive, size_t count, int type, int operation, int root, Handle* handle, void* stream) {
  if (!handle) return INVALID_ARGUMENT;
  Comm& comm = **handle;
  static const char* names[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter"};
  std::string name = names[int(kind)];
  if (int fault = fakecuda_fault("nccl", comm.device)) {
    complain(name + ": FAKE_CUDA_FAIL wants it");
    return fault;
  }
  if (type < 0 || type >= TYPES || operation < 0 || operation >= OPERATIONS || root < 0 || root >= comm.ranks || fakecuda_stream_device(stream) != comm.device) {
    complain(name + ": a wrong type, operation or root, or a stream of another device");
    return INVALID_ARGUMENT;
  }
  size_t bytes = count * SIZES[type], all = bytes * size_t(comm.ranks);
  bool reads = kind != Kind::Broadcast || root == comm.rank, writes = kind != Kind::Reduce || root == comm.rank;
  if (bytes && ((reads && !fakecuda_usable(comm.device, send, kind == Kind::ReduceScatter ? all : bytes, (name + ": sendbuff").c_str())) ||
                (writes && !fakecuda_usable(comm.device, receive, kind == Kind::AllGather ? all : bytes, (name + ": recvbuff").c_str()))))
    return INVALID_ARGUMENT;
  if (comm.shared->joined < uint32_t(comm.ranks)) {
    complain(name + ": the communicator is not ready yet");
    return INVALID_USAGE;
  }
  auto job = std::make_unique<Job>();
  memset(static_cast<void*>(&job->call), 0, sizeof job->call);  // compared as bytes
  job->comm = *handle;
  job->call.count = count;
  job->call.kind = kind;
  job->call.type = type;
  job->call.operation = operation;
  job->call.root = root;
  job->send = static_cast<const char*>(send);
  job->receive = static_cast<char*>(receive);
  job->stall_with = fakecuda_fault("nccl_async", comm.device);
  comm.user = std::this_thread::get_id();
  Posted p{std::move(job), stream};
  if (group_depth) {
    posted.push_back(std::move(p));
    return answer(comm);
  }
  if (drives_another_rank(comm)) {
    complain(name + ": this thread drives several ranks, so its calls need ncclGroupStart and ncclGroupEnd");
    return INVALID_USAGE;
  }
  if (int error = enqueue(p)) return error;
  return answer(comm);
}

API int ncclGetVersion(int* version) {
  *version = 22800;
  return SUCCESS;
}
API const char* ncclGetErrorString(int result) {
  switch (result) {
    case SUCCESS: return "no error";
    case UNHANDLED_CUDA_ERROR: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case SYSTEM_ERROR: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case INTERNAL_ERROR: return "internal error - please report this issue to the NCCL developers";
    case INVALID_ARGUMENT: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case INVALID_USAGE: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case REMOTE_ERROR: return "remote process exited or there was a network error";
    case IN_PROGRESS: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}
API const char* ncclGetLastError(Handle*) { return last_error.c_str(); }
API int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<unsigned> made{0};
  memset(id, 0, sizeof *id);
  uint64_t now = uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
  snprintf(id->text, sizeof id->text, "/dev/shm/fakenccl-%d-%u-%llx", getpid(), made++, (unsigned long long)now);
  return SUCCESS;
}

static int init_rank(Handle** out, int ranks, const UniqueId& id, int rank, bool nonblocking) {
  *out = nullptr;
  if (int fault = fakecuda_fault("nccl_init", fakecuda_current_device())) return fault;
  auto comm = std::make_shared<Comm>();
  comm->nonblocking = nonblocking;
  if (int error = comm->join(ranks, id, rank)) return error;
  {
    std::lock_guard<std::mutex> lock(registry_mutex);
    registry().push_back(comm);
  }
  *out = new Handle(comm);
  if (group_depth) {
    joining.push_back(comm);
    return nonblocking ? IN_PROGRESS : SUCCESS;
  }
  if (nonblocking) {
    std::thread([comm] {
      if (int error = comm->wait_for_all()) comm->error = error;
      comm->in_progress = false;
    }).detach();
    comm->in_progress = true;
    return IN_PROGRESS;
  }
  int error = comm->wait_for_all();
  if (error) {
    delete *out;
    *out = nullptr;
  }
  return error;
}
API int ncclCommInitRank(Handle** comm, int ranks, UniqueId id, int rank) { return init_rank(comm, ranks, id, rank, false); }
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};
API int ncclCommInitRankConfig(Handle** comm, int ranks, UniqueId id, int rank, const Config* config) {
  if (config && (config->magic != 0xcafebeef || config->size < sizeof(Config))) {
    complain("ncclConfig_t was not initialised by NCCL_CONFIG_INITIALIZER");
    return INVALID_ARGUMENT;
  }
  return init_rank(comm, ranks, id, rank, config && config->blocking == 0);
}
extern "C" int cuDevicePrimaryCtxRetain(void**, int);
extern "C" int cuDevicePrimaryCtxRelease_v2(int);
extern "C" int cuCtxGetCurrent(void**);
extern "C" int cuCtxSetCurrent(void*);
API int ncclCommInitAll(Handle** comms, int count, const int* devices) {
  for (int i = 0; i < count; i++)
    for (int j = 0; j < i; j++)
      if (devices && devices[i] == devices[j]) {
        complain("Duplicate GPU detected : device " + std::to_string(devices[i]) + " is listed twice");
        return INVALID_USAGE;
      }
  UniqueId id;
  ncclGetUniqueId(&id);
  void* before = nullptr;
  cuCtxGetCurrent(&before);
  int error = SUCCESS;
  group_depth++;  // joins without waiting
  for (int i = 0; i < count && !error; i++) {
    void* context;
    int device = devices ? devices[i] : i;
    if (cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context)) error = UNHANDLED_CUDA_ERROR;
    else error = init_rank(&comms[i], count, id, i, false);
    if (!error) cuDevicePrimaryCtxRelease_v2(device);
  }
  group_depth--;
  for (auto& comm : joining)
    if (!error) error = comm->wait_for_all();
  joining.clear();
  cuCtxSetCurrent(before);
  return error;
}
API int ncclGroupStart() {
  group_depth++;
  return SUCCESS;
}
API int ncclGroupEnd() {
  if (!group_depth) return INVALID_USAGE;
  if (--group_depth) return SUCCESS;
  int result = SUCCESS;
  for (auto& comm : joining) {
    int error = comm->nonblocking ? SUCCESS : comm->wait_for_all();
    if (error && !result) result = error;
    if (comm->nonblocking) {
      comm->in_progress = true;
      std::thread([comm = comm] {
        if (int failed = comm->wait_for_all()) comm->error = failed;
        comm->in_progress = false;
      }).detach();
      if (!result) result = IN_PROGRESS;
    }
  }
  joining.clear();
  for (auto& p : posted) {
    int waits = answer(*p.job->comm), error = enqueue(p);
    if (error && (!result || result == IN_PROGRESS)) result = error;
    if (waits && !result) result = waits;
  }
  posted.clear();
  return result;
}
API int ncclCommCount(Handle* comm, int* count) {
  *count = (*comm)->ranks;
  return SUCCESS;
}
API int ncclCommUserRank(Handle* comm, int* rank) {
  *rank = (*comm)->rank;
  return SUCCESS;
}
API int ncclCommCuDevice(Handle* comm, int* device) {
  *device = (*comm)->device;
  return SUCCESS;
}
API int ncclCommGetAsyncError(Handle* handle, int* error) {
  Comm& comm = **handle;
  bool ready = comm.shared->joined >= uint32_t(comm.ranks);
  *error = comm.error ? comm.error.load() : !ready || comm.in_progress ? int(IN_PROGRESS) : int(SUCCESS);
  if (ready) comm.in_progress = false;
  return SUCCESS;
}
API int ncclCommAbort(Handle* handle) {
  (*handle)->aborted = true;
  (*handle)->shared->slots[(*handle)->rank].state = ABORTED;
  wake((*handle)->shared->generation);
  wake((*handle)->shared->joined);
  delete handle;
  return SUCCESS;
}
API int ncclCommFinalize(Handle*) { return SUCCESS; }
API int ncclCommDestroy(Handle* handle) {
  delete handle;
  return SUCCESS;
}
API int ncclAllReduce(const void* send, void* receive, size_t count, int type, int operation, Handle* comm, void* stream) {
  return post(Kind::AllReduce, send, receive, count, type, operation, 0, comm, stream);
}
API int ncclReduce(const void* send, void* receive, size_t count, int type, int operation, int root, Handle* comm, void* stream) {
  return post(Kind::Reduce, send, receive, count, type, operation, root, comm, stream);
}
API int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, Handle* comm, void* stream) {
  return post(Kind::Broadcast, send, receive, count, type, SUM, root, comm, stream);
}
API int ncclBcast(void* buffer, size_t count, int type, int root, Handle* comm, void* stream) { return ncclBroadcast(buffer, buffer, count, type, root, comm, stream); }
API int ncclAllGather(const void* send, void* receive, size_t count, int type, Handle* comm, void* stream) {
  return post(Kind::AllGather, send, receive, count, type, SUM, 0, comm, stream);
}
API int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int operation, Handle* comm, void* stream) {
  return post(Kind::ReduceScatter, send, receive, count, type, operation, 0, comm, stream);
}
