// What the operations do.
#include <functional>
#include <type_traits>

#include "../floats.h"
#include "comm.h"

namespace fake {

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
template <Type type>
static void combine_short(const Comm& comm, char* out, size_t from, size_t to, int operation) {
  combine<float>(comm, out, from, to, operation, [](const char* p, size_t i) { return load(p, type, i); }, [](char* p, size_t i, float v) { store(p, type, i, v); },
                 [](float v) { return type == Type::F16 ? to_f16(v) : to_bf16(v); });
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
    case FLOAT16: return combine_short<Type::F16>(comm, out, from, to, operation);
    case FLOAT32: return combine_plain<float>(comm, out, from, to, operation);
    case FLOAT64: return combine_plain<double>(comm, out, from, to, operation);
    default: return combine_short<Type::BF16>(comm, out, from, to, operation);
  }
}

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

void run(void* data) {
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

}  // namespace fake
