// Streams, events, and what a capture makes of them.
#include <algorithm>

#include "driver.h"

namespace fake {

void Moment::reach() {
  std::lock_guard<std::mutex> lock(mutex);
  time = Clock::now();
  reached = true;
  changed.notify_all();
}
void Moment::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return reached; });
}
bool Moment::is_reached() {
  std::lock_guard<std::mutex> lock(mutex);
  return reached;
}

Stream::Stream(Device* device, bool blocking) : device(device), blocking(blocking) {
  std::thread([this] { work(); }).detach();
}

void Stream::work() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return destroyed || !tasks.empty(); });
    if (tasks.empty()) break;
    Task task = std::move(tasks.front());
    tasks.pop_front();
    lock.unlock();
    if (!task.always) delay();
    if (task.always || !device->error) task.run();
    task.run = nullptr;
    lock.lock();
    finished++;
    changed.notify_all();
  }
  lock.unlock();
  std::lock_guard<std::mutex> device_lock(device->mutex);
  device->streams.erase(this);
}

void Stream::push(std::function<void()> run, bool always) {
  std::lock_guard<std::mutex> lock(mutex);
  tasks.push_back({std::move(run), always});
  pushed++;
  changed.notify_all();
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex);
  uint64_t until = pushed;
  changed.wait(lock, [&] { return finished >= until; });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex);
  return finished == pushed;
}

std::shared_ptr<Moment> Stream::record() {
  auto moment = std::make_shared<Moment>();
  push([moment] { moment->reach(); }, true);
  return moment;
}

void Stream::wait(std::shared_ptr<Moment> moment) {
  push([moment] { moment->wait(); }, true);
}

void Stream::retire() {
  std::lock_guard<std::mutex> lock(mutex);
  destroyed = true;
  changed.notify_all();
}

std::mutex& capture_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
static std::vector<std::shared_ptr<Capture>>& captures() {
  static auto* active = new std::vector<std::shared_ptr<Capture>>;
  return *active;
}
static thread_local int thread_mode = 0;

static void invalidate(Capture& capture, const std::string& why) {
  if (!capture.invalidated) complain("capture invalidated: " + why);
  capture.invalidated = true;
}

int forbidden_while_capturing(const char* call) {
  std::lock_guard<std::mutex> lock(capture_mutex());
  int error = SUCCESS;
  for (auto& capture : captures()) {
    bool mine = capture->thread == std::this_thread::get_id();
    bool minds = capture->mode == 0 ? mine || thread_mode == 0 : capture->mode == 1 && mine;
    if (!minds || thread_mode == 2) continue;
    invalidate(*capture, std::string(call) + " is not allowed meanwhile");
    error = CAPTURE_UNSUPPORTED;
  }
  return error;
}

int submit(Stream* stream, std::function<void()> run, bool kernel, bool library) {
  {
    std::lock_guard<std::mutex> lock(capture_mutex());
    if (stream->capture) {
      Capture& capture = *stream->capture;
      if (capture.invalidated) return CAPTURE_INVALIDATED;
      auto& before = capture.frontier[stream];
      capture.graph->nodes.push_back({std::move(run), {before.begin(), before.end()}, stream, kernel, library});
      before = {capture.graph->nodes.size() - 1};
      return SUCCESS;
    }
    if (stream == stream->device->legacy)
      for (auto& capture : captures())
        for (auto& [other, nodes] : capture->frontier)
          if (other->blocking && other->device == stream->device) {
            invalidate(*capture, "the default stream was used, for which a blocking stream waits");
            return CAPTURE_IMPLICIT;
          }
  }
  // The default stream and the blocking streams of a device wait for each other.
  Device* device = stream->device;
  if (stream == device->legacy) {
    for (Stream* other : device->all_streams())
      if (other->blocking && !other->idle()) stream->wait(other->record());
  } else if (stream->blocking && device->legacy && !device->legacy->idle()) {
    stream->wait(device->legacy->record());
  }
  stream->push(std::move(run), false);
  return SUCCESS;
}

}  // namespace fake
using namespace fake;

API int fakecuda_enqueue(void* handle, const char* library, const char* name, void (*task)(void*), void (*drop)(void*), void* data) {
  std::shared_ptr<void> owned(data, drop);
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  count("library");
  count_kernel(std::string(library) + ":" + name);
  return submit(stream, [task, owned] { task(owned.get()); }, false, true);
}

static int create_stream(void** stream, unsigned flags, int priority) {
  if (int error = healthy(current)) return error;
  if (flags > 1) return INVALID_VALUE;
  if (int error = forbidden_while_capturing("cuStreamCreate")) return error;
  note("stream", current);
  auto* created = new Stream(current, flags == 0);
  created->priority = priority;
  std::lock_guard<std::mutex> lock(current->mutex);
  current->streams.insert(created);
  *stream = created;
  return SUCCESS;
}
API int cuStreamCreate(void** stream, unsigned flags) { return create_stream(stream, flags, 0); }
API int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) { return create_stream(stream, flags, priority); }
API int cuStreamDestroy_v2(void* handle) {
  if (uintptr_t(handle) <= 2) return INVALID_HANDLE;
  auto* stream = static_cast<Stream*>(handle);
  if (stream->destroyed) return INVALID_HANDLE;
  stream->retire();
  return stream->device->error;
}
API int cuStreamGetPriority(void* handle, int* priority) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  *priority = stream->priority;
  return SUCCESS;
}
API int cuStreamGetFlags(void* handle, unsigned* flags) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  *flags = !stream->blocking && stream != stream->device->legacy;
  return SUCCESS;
}
API int cuStreamGetCtx(void* handle, void** context) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  *context = stream->device;
  return SUCCESS;
}

static bool is_capturing(Stream* stream, const char* call) {
  std::lock_guard<std::mutex> lock(capture_mutex());
  if (stream->capture) invalidate(*stream->capture, std::string(call) + " on the capturing stream");
  return stream->capture != nullptr;
}
API int cuStreamSynchronize(void* handle) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  if (is_capturing(stream, "cuStreamSynchronize")) return CAPTURE_UNSUPPORTED;
  if (int error = forbidden_while_capturing("cuStreamSynchronize")) return error;
  if (int fault = note("sync", stream->device, "stream")) return fault;
  stream->synchronize();
  return stream->device->error;
}
API int cuStreamQuery(void* handle) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  if (is_capturing(stream, "cuStreamQuery")) return CAPTURE_UNSUPPORTED;
  if (int error = forbidden_while_capturing("cuStreamQuery")) return error;
  note("query", stream->device);
  bool idle = stream->idle();
  return stream->device->error ? stream->device->error.load() : idle ? SUCCESS : NOT_READY;
}
API int cuCtxSynchronize() {
  if (int error = healthy(current)) return error;
  for (Stream* stream : current->all_streams())
    if (is_capturing(stream, "cuCtxSynchronize")) return CAPTURE_UNSUPPORTED;
  if (int error = forbidden_while_capturing("cuCtxSynchronize")) return error;
  if (int fault = note("sync", current, "context")) return fault;
  for (Stream* stream : current->all_streams()) stream->synchronize();
  return current->error;
}
API int cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  note("hostfunc", stream->device);
  return submit(stream, [=] { function(data); });
}

// ---- events
API int cuEventCreate(void** event, unsigned flags) {
  if (int error = healthy(current)) return error;
  note("event_create", current);
  *event = new Event{current, !(flags & 2), nullptr, nullptr, {}};
  return SUCCESS;
}
API int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return SUCCESS;
}
API int cuEventRecord(void* handle, void* stream_handle) {
  auto* event = static_cast<Event*>(handle);
  Stream* stream;
  if (int error = usable_stream(stream_handle, &stream)) return error;
  if (event->device != stream->device) return INVALID_HANDLE;
  note("event_record", stream->device);
  std::lock_guard<std::mutex> lock(capture_mutex());
  event->capture = stream->capture;
  if (!event->capture) event->moment = stream->record();
  else if (event->capture->invalidated) return CAPTURE_INVALIDATED;
  else event->captured = event->capture->frontier[stream];
  return SUCCESS;
}
API int cuEventRecordWithFlags(void* event, void* stream, unsigned) { return cuEventRecord(event, stream); }
API int cuStreamWaitEvent(void* stream_handle, void* handle, unsigned) {
  auto* event = static_cast<Event*>(handle);
  Stream* stream;
  if (int error = usable_stream(stream_handle, &stream)) return error;
  note("event_wait", stream->device);
  std::lock_guard<std::mutex> lock(capture_mutex());
  if (auto capture = event->capture) {
    auto& active = captures();
    if (std::find(active.begin(), active.end(), capture) == active.end()) return CAPTURED_EVENT;
    if (capture->invalidated) return CAPTURE_INVALIDATED;
    if (stream->capture && stream->capture != capture) {
      invalidate(*capture, "an event joins two captures");
      invalidate(*stream->capture, "an event joins two captures");
      return CAPTURE_MERGE;
    }
    stream->capture = capture;
    capture->frontier[stream].insert(event->captured.begin(), event->captured.end());
  } else if (stream->capture && event->moment) {
    invalidate(*stream->capture, "a wait for an event that was recorded outside the capture");
    return CAPTURE_ISOLATION;
  } else if (event->moment) {
    stream->wait(event->moment);
  }
  return SUCCESS;
}
static int captured_event(Event* event, const char* call) {
  {
    std::lock_guard<std::mutex> lock(capture_mutex());
    if (event->capture) {
      invalidate(*event->capture, std::string(call) + " on an event recorded in the capture");
      return CAPTURED_EVENT;
    }
  }
  return forbidden_while_capturing(call);
}
API int cuEventQuery(void* handle) {
  auto* event = static_cast<Event*>(handle);
  if (int error = healthy(event->device)) return error;
  if (int error = captured_event(event, "cuEventQuery")) return error;
  note("query", event->device);
  if (event->moment && !event->moment->is_reached()) return NOT_READY;
  return event->device->error;
}
API int cuEventSynchronize(void* handle) {
  auto* event = static_cast<Event*>(handle);
  if (int error = healthy(event->device)) return error;
  if (int error = captured_event(event, "cuEventSynchronize")) return error;
  if (int fault = note("event_sync", event->device, "event")) return fault;
  if (event->moment) event->moment->wait();
  return event->device->error;
}
API int cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
  auto *a = static_cast<Event*>(from), *b = static_cast<Event*>(to);
  if (!a->timing || !b->timing || !a->moment || !b->moment || a->device != b->device) return INVALID_HANDLE;
  if (!a->moment->is_reached() || !b->moment->is_reached()) return NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(b->moment->time - a->moment->time).count();
  return SUCCESS;
}
API int cuEventElapsedTime(float* milliseconds, void* from, void* to) { return cuEventElapsedTime_v2(milliseconds, from, to); }

// ---- captures and graphs
API int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, thread_mode);
  return SUCCESS;
}
API int cuStreamBeginCapture_v2(void* handle, int mode) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  if (uintptr_t(handle) <= 2) return CAPTURE_UNSUPPORTED;
  note("capture", stream->device);
  std::lock_guard<std::mutex> lock(capture_mutex());
  if (stream->capture) return ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->graph->device = stream->device;
  capture->frontier[stream];
  stream->capture = capture;
  captures().push_back(capture);
  return SUCCESS;
}
API int cuStreamIsCapturing(void* handle, int* status) {
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  std::lock_guard<std::mutex> lock(capture_mutex());
  *status = !stream->capture ? 0 : stream->capture->invalidated ? 2 : 1;
  return SUCCESS;
}
API int cuStreamGetCaptureInfo_v2(void* handle, int* status, uint64_t* id, void*, void*, void*) {
  if (id) *id = 1;
  return cuStreamIsCapturing(handle, status);
}
static bool all_joined(const Capture& capture) {
  auto& nodes = capture.graph->nodes;
  std::vector<bool> reached(nodes.size());
  for (size_t last : capture.frontier.at(capture.origin)) reached[last] = true;
  for (size_t i = nodes.size(); i-- > 0;)
    if (!reached[i]) return false;
    else
      for (size_t before : nodes[i].after) reached[before] = true;
  return true;
}
API int cuStreamEndCapture(void* handle, void** graph) {
  *graph = nullptr;
  Stream* stream;
  if (int error = usable_stream(handle, &stream)) return error;
  std::lock_guard<std::mutex> lock(capture_mutex());
  auto capture = stream->capture;
  if (!capture) return ILLEGAL_STATE;
  if (capture->origin != stream) {
    invalidate(*capture, "it was ended on another stream");
    return CAPTURE_UNMATCHED;
  }
  if (capture->mode != 2 && capture->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
  for (auto& [other, nodes] : capture->frontier) other->capture = nullptr;
  auto& active = captures();
  active.erase(std::find(active.begin(), active.end(), capture));
  if (capture->invalidated) return CAPTURE_INVALIDATED;
  if (!all_joined(*capture)) return CAPTURE_UNJOINED;
  *graph = capture->graph.release();
  return SUCCESS;
}

struct GraphExec {
  Graph graph;
  std::mutex running;  // a graph runs once at a time
  std::vector<std::vector<size_t>> lanes;
};
API int cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) {
  if (int error = healthy(current)) return error;
  if (!graph) return INVALID_VALUE;
  auto made = std::make_shared<GraphExec>();
  made->graph = *static_cast<Graph*>(graph);
  std::map<Stream*, std::vector<size_t>> lanes;
  for (size_t i = 0; i < made->graph.nodes.size(); i++) lanes[made->graph.nodes[i].lane].push_back(i);
  for (auto& [stream, nodes] : lanes) made->lanes.push_back(nodes);
  *exec = new std::shared_ptr<GraphExec>(made);
  return SUCCESS;
}
static void run_graph(GraphExec& exec) {
  std::lock_guard<std::mutex> once(exec.running);
  auto& nodes = exec.graph.nodes;
  std::vector<Moment> done(nodes.size());
  auto run_lane = [&](const std::vector<size_t>& lane) {
    for (size_t i : lane) {
      for (size_t before : nodes[i].after) done[before].wait();
      delay();
      if (!nodes[i].lane->device->error) nodes[i].run();
      done[i].reach();
    }
  };
  std::vector<std::thread> others;  // branches really run beside each other
  for (size_t i = 1; i < exec.lanes.size(); i++) others.emplace_back(run_lane, std::cref(exec.lanes[i]));
  if (!exec.lanes.empty()) run_lane(exec.lanes[0]);
  for (auto& other : others) other.join();
}
API int cuGraphLaunch(void* handle, void* stream_handle) {
  auto graph = *static_cast<std::shared_ptr<GraphExec>*>(handle);
  Stream* stream;
  if (int error = usable_stream(stream_handle, &stream)) return error;
  if (is_capturing(stream, "cuGraphLaunch")) return CAPTURE_UNSUPPORTED;
  int fault = note("graph", stream->device);
  if (fault && !is_sticky(fault)) return fault;
  for (Node& node : graph->graph.nodes) count(node.kernel ? "graph_kernels" : node.library ? "graph_library" : "graph_other");
  return submit(stream, [=] {
    if (fault) break_device(stream->device, fault, "FAKE_CUDA_FAIL wants it of this graph");
    else run_graph(*graph);
  });
}
API int cuGraphUpload(void*, void*) { return SUCCESS; }
API int cuGraphDestroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return SUCCESS;
}
API int cuGraphExecDestroy(void* exec) {
  delete static_cast<std::shared_ptr<GraphExec>*>(exec);  // a launch that still runs keeps its own reference
  return SUCCESS;
}
API int cuGraphGetNodes(void* graph, void** nodes, size_t* count) {
  if (!nodes) *count = static_cast<Graph*>(graph)->nodes.size();
  return nodes ? NOT_SUPPORTED : SUCCESS;
}
