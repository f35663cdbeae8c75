#include "streams.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>
#include <utility>

#include "graphs.h"

namespace host_gpu {

namespace {

thread_local bool runs_a_stream = false;

}  // namespace

void Stream::push(Work work) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void Stream::drain() {
  if (runs_a_stream) stop("what runs on a stream waits for a stream");
  const WithoutPython released;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

bool Stream::idle() {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

bool Stream::closed() {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void Stream::run() {
  runs_a_stream = true;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    work();
    work = nullptr;  // releases the objects it holds while the lock is not held
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

namespace {

// All streams that are open or have work left. The object is never destroyed: threads use it until the process ends.
struct Streams {
  std::mutex mutex;
  std::map<Stream*, std::shared_ptr<Stream>> all;
  std::map<int, Stream*> defaults;
};

Streams& streams() {
  static auto* made = new Streams;
  return *made;
}

Stream* open_locked(int device, int priority) {
  auto stream = std::make_shared<Stream>(device, priority);
  streams().all[stream.get()] = stream;
  std::thread([stream] {
    stream->run();
    const std::lock_guard lock(streams().mutex);
    streams().all.erase(stream.get());
  }).detach();
  return stream.get();
}

Stream& default_stream() {
  const std::lock_guard lock(streams().mutex);
  Stream*& stream = streams().defaults[current_device()];
  if (stream == nullptr) stream = open_locked(current_device(), 0);
  return *stream;
}

}  // namespace

Stream& stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return default_stream();
  if (handle == cudaStreamPerThread) stop("default streams of threads are not imitated");
  auto* stream = reinterpret_cast<Stream*>(handle);
  {
    const std::lock_guard lock(streams().mutex);
    if (streams().all.count(stream) == 0) stop("stream %p does not exist, or no longer", static_cast<void*>(handle));
  }
  if (stream->closed()) stop("stream %p has been destroyed", static_cast<void*>(handle));
  return *stream;
}

cudaError_t enqueue(cudaStream_t handle, Work work) {
  Stream& stream = stream_of(handle);
  if (stream.capture != nullptr) return stream.capture->add(stream, std::move(work));
  stream.push(std::move(work));
  return cudaSuccess;
}

void drain_device() {
  std::vector<std::shared_ptr<Stream>> running;
  {
    const std::lock_guard lock(streams().mutex);
    for (const auto& [key, stream] : streams().all) {
      if (stream->device == current_device()) running.push_back(stream);
    }
  }
  for (const auto& stream : running) stream->drain();
}

}  // namespace host_gpu

using namespace host_gpu;

CUDA_FUNCTION cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  // In CUDA, the default stream and other streams wait for each other, unless the others are created as non-blocking.
  // Here they never wait.
  if ((flags & cudaStreamNonBlocking) == 0) stop("streams that wait for the default stream are not imitated");
  const std::lock_guard lock(streams().mutex);
  *handle = reinterpret_cast<cudaStream_t>(open_locked(current_device(), priority));
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

// Returns at once, as CUDA does. The stream still finishes its remaining work.
CUDA_FUNCTION cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  stream_of(handle).close();
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  *priority = stream_of(handle).priority;
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  stream_of(handle).drain();
  return has_failed() ? result(cudaErrorAssert) : cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaStreamQuery(cudaStream_t handle) {
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  return stream_of(handle).idle() ? cudaSuccess : cudaErrorNotReady;
}

CUDA_FUNCTION cudaError_t cudaDeviceSynchronize() {
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  drain_device();
  return has_failed() ? result(cudaErrorAssert) : cudaSuccess;
}

// Host functions may be Python code. When the process ends, this waits for the functions that are running, and no new
// ones begin, because they would use objects that no longer exist. No one needs the results of the remaining work.
static std::atomic<bool> process_ends = false;
static std::atomic<int> functions_running = 0;

CUDA_FUNCTION void host_gpu_end() {
  process_ends = true;
  const auto last = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (functions_running > 0 && std::chrono::steady_clock::now() < last) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

CUDA_FUNCTION cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  static const int registered = std::atexit(host_gpu_end);  // registered late, so that it runs early
  (void)registered;
  return enqueue(handle, [=] {
    ++functions_running;
    if (!process_ends) function(data);
    --functions_running;
  });
}
