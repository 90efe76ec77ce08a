// Joining, meeting, leaving; noticing that a peer has died.
#include "comm.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstdio>

#include "../hooks.h"

namespace fake {

static std::mutex complaint_mutex;
static std::string& complaint() {
  static auto* text = new std::string;
  return *text;
}
void complain(const std::string& text) {
  std::string line = "fakenccl: " + text + "\n";
  (void)!write(2, line.data(), line.size());
  std::lock_guard<std::mutex> lock(complaint_mutex);
  complaint() = text;
}
std::string last_complaint() {
  std::lock_guard<std::mutex> lock(complaint_mutex);
  return complaint();
}

static void sleep_until_changed(std::atomic<uint32_t>& word, uint32_t seen) {
  timespec timeout{0, 100'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}
static void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

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

// Whether this rank waits for one that is gone. Who has come last may leave at once, so the word is read again after that was seen.
bool Comm::waits_in_vain(const std::atomic<uint32_t>& word, uint32_t seen) {
  for (int r = 0; r < ranks; r++) {
    if (r == rank || shared->slots[r].state == ABSENT) continue;
    auto lock = lock_of(r);
    bool dead = fcntl(file, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
    if (!dead && shared->slots[r].state == PRESENT) continue;
    if (word != seen) return false;
    if (!error) complain("rank " + std::to_string(rank) + ": rank " + std::to_string(r) + (dead ? " died" : " has left the communicator"));
    return true;
  }
  return false;
}

// Until every rank has joined.
int Comm::wait_for_all() {
  for (uint32_t joined; (joined = shared->joined) < uint32_t(ranks);) {
    if (aborted) return INTERNAL_ERROR;
    sleep_until_changed(shared->joined, joined);
    if (waits_in_vain(shared->joined, joined)) return error = REMOTE_ERROR;
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
    if (waits_in_vain(shared->generation, generation)) {
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

void Comm::abort() {
  aborted = true;
  shared->slots[rank].state = ABORTED;
  wake(shared->generation);
  wake(shared->joined);
}

}  // namespace fake
