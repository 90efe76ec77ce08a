// The functions of nccl.h: groups, checks, and the tasks put on streams.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <vector>

#include "../hooks.h"
#include "comm.h"

#define API extern "C" __attribute__((visibility("default")))
using namespace fake;

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
API const char* ncclGetLastError(Handle*) {
  static thread_local std::string text;
  text = last_complaint();
  return text.c_str();
}
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
  (*handle)->abort();
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
