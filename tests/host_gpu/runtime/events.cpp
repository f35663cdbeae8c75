// Events, by which other streams and the host see how far a stream has run.
#include <chrono>

#include "graphs.h"

namespace host_gpu {

namespace {

using Clock = std::chrono::steady_clock;

// One recording of an event. It may outlive the event, and the event may be recorded again before it is reached.
class Record {
 public:
  void reach() {
    {
      const std::lock_guard lock(mutex_);
      reached_ = true;
      when_ = Clock::now();
    }
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }

  bool reached() {
    const std::lock_guard lock(mutex_);
    return reached_;
  }

  Clock::time_point when() const { return when_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  Clock::time_point when_;
};

struct Event {
  explicit Event(unsigned flags) : flags(flags) {}

  const unsigned flags;
  std::mutex mutex;
  std::shared_ptr<Record> record;    // the last one outside of captures; null counts as reached
  std::shared_ptr<Capture> capture;  // the capture of the last recording, if it was in one
  std::vector<int> nodes;            // the nodes of that capture that come before the event

  bool reached() const { return record == nullptr || record->reached(); }
};

Event& event_of(cudaEvent_t handle) {
  return *reinterpret_cast<Event*>(handle);
}

}  // namespace

}  // namespace host_gpu

using namespace host_gpu;

CUDA_FUNCTION cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  *handle = reinterpret_cast<cudaEvent_t>(new Event(flags));
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

CUDA_FUNCTION cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete &event_of(handle);
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  Event& event = event_of(handle);
  Stream& stream = stream_of(on);
  const std::lock_guard lock(event.mutex);
  event.capture = stream.capture;
  if (stream.capture != nullptr) {
    event.nodes = stream.ends;
    event.record = nullptr;
    return cudaSuccess;
  }
  event.record = std::make_shared<Record>();
  return enqueue(on, [record = event.record] { record->reach(); });
}

CUDA_FUNCTION cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned flags) {
  if (flags != cudaEventRecordDefault) stop("external events are not imitated");
  return cudaEventRecord(handle, on);
}

CUDA_FUNCTION cudaError_t cudaEventQuery(cudaEvent_t handle) {
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  Event& event = event_of(handle);
  const std::lock_guard lock(event.mutex);
  if (event.capture != nullptr) return result(cudaErrorCapturedEvent);
  return event.reached() ? cudaSuccess : cudaErrorNotReady;
}

CUDA_FUNCTION cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  Event& event = event_of(handle);
  std::shared_ptr<Record> record;
  {
    const std::lock_guard lock(event.mutex);
    if (event.capture != nullptr) return result(cudaErrorCapturedEvent);
    record = event.record;
  }
  const WithoutPython released;
  if (record != nullptr) record->wait();
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  Event &first = event_of(from), &second = event_of(to);
  const bool timed = ((first.flags | second.flags) & cudaEventDisableTiming) == 0;
  if (!timed || first.record == nullptr || second.record == nullptr) return result(cudaErrorInvalidResourceHandle);
  if (!first.reached() || !second.reached()) return result(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(second.record->when() - first.record->when()).count();
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned flags) {
  if (flags != cudaEventWaitDefault) stop("external events are not imitated");
  Stream& stream = stream_of(handle);
  Event& event = event_of(awaited);
  const std::lock_guard lock(event.mutex);
  if (event.capture != nullptr) return event.capture->join(stream, event.nodes);
  if (stream.capture != nullptr) {  // a graph cannot wait for an event outside of its capture
    stream.capture->invalid = true;
    return result(cudaErrorStreamCaptureIsolation);
  }
  if (event.record == nullptr) return cudaSuccess;
  return enqueue(handle, [record = event.record] { record->wait(); });
}
