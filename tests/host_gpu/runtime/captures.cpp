// Stream capture. Work on a captured stream becomes nodes of a graph. A node depends on the previous node of its stream
// and on the events that the stream waited for.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "graphs.h"

namespace host_gpu {

namespace {

std::mutex captures_mutex;
std::vector<std::shared_ptr<Capture>> captures;
unsigned long long captures_made = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

bool is_under_way(const Capture* capture) {
  const std::lock_guard lock(captures_mutex);
  return std::any_of(captures.begin(), captures.end(), [=](const auto& other) { return other.get() == capture; });
}

// True if the stream where the capture began waits for all work of the other streams.
bool all_joined(const Capture& capture) {
  std::vector<bool> reached(capture.graph.size());
  std::vector<int> open = capture.origin->ends;
  while (!open.empty()) {
    const int node = open.back();
    open.pop_back();
    if (reached[node]) continue;
    reached[node] = true;
    for (const int before : capture.graph[node].after) open.push_back(before);
  }
  for (const Stream* stream : capture.streams) {
    for (const int node : stream->ends) {
      if (!reached[node]) return false;
    }
  }
  return true;
}

}  // namespace

cudaError_t Capture::add(Stream& stream, Work work) {
  if (invalid) return result(cudaErrorStreamCaptureInvalidated);
  graph.push_back({std::move(work), stream.ends});
  stream.ends = {static_cast<int>(graph.size()) - 1};
  return cudaSuccess;
}

cudaError_t Capture::join(Stream& stream, const std::vector<int>& nodes) {
  if (invalid) return result(cudaErrorStreamCaptureInvalidated);
  if (!is_under_way(this)) return result(cudaErrorInvalidValue);
  if (stream.capture == nullptr) {
    stream.capture = origin->capture;
    stream.ends.clear();
    streams.insert(&stream);
  } else if (stream.capture.get() != this) {
    invalid = stream.capture->invalid = true;
    return result(cudaErrorStreamCaptureMerge);
  }
  for (const int node : nodes) {
    if (std::find(stream.ends.begin(), stream.ends.end(), node) == stream.ends.end()) stream.ends.push_back(node);
  }
  return cudaSuccess;
}

bool forbidden_in_capture(const char* function) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  const std::lock_guard lock(captures_mutex);
  for (const auto& capture : captures) {
    const bool mine = capture->mode != cudaStreamCaptureModeRelaxed && capture->thread == std::this_thread::get_id();
    const bool everybodys = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (!mine && !everybodys) continue;
    capture->invalid = true;
    std::fprintf(stderr, "host GPU: %s during a capture, which it makes invalid\n", function);
    return true;
  }
  return false;
}

}  // namespace host_gpu

using namespace host_gpu;

CUDA_FUNCTION cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  if (handle == nullptr) return result(cudaErrorStreamCaptureUnsupported);
  Stream& stream = stream_of(handle);
  if (stream.capture != nullptr) return result(cudaErrorIllegalState);
  const std::lock_guard lock(captures_mutex);
  auto capture = std::make_shared<Capture>(++captures_made, mode, stream);
  capture->streams.insert(&stream);
  stream.ends.clear();
  stream.capture = capture;
  captures.push_back(capture);
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Stream& stream = stream_of(handle);
  const auto capture = stream.capture;
  *graph = nullptr;
  if (capture == nullptr || capture->origin != &stream) return result(cudaErrorIllegalState);
  const bool joined = all_joined(*capture);
  for (Stream* other : capture->streams) {
    other->capture = nullptr;
    other->ends.clear();
  }
  {
    const std::lock_guard lock(captures_mutex);
    captures.erase(std::find(captures.begin(), captures.end(), capture));
  }
  if (capture->invalid) return result(cudaErrorStreamCaptureInvalidated);
  if (!joined) return result(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(capture->graph));
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const auto capture = stream_of(handle).capture;
  *status = capture == nullptr ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return has_failed() ? result(cudaErrorAssert) : cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                                   unsigned long long* id, cudaGraph_t* graph,
                                                   const cudaGraphNode_t** dependencies,
                                                   const cudaGraphEdgeData** edges, size_t* count) {
  const auto capture = stream_of(handle).capture;
  // Handles of single nodes are not emulated. torch needs them only for its option to free memory early in a capture.
  if (dependencies != nullptr && capture != nullptr) stop("the dependencies of a capture are not imitated");
  (void)cudaStreamIsCapturing(handle, status);
  if (id != nullptr) *id = capture == nullptr ? 0 : capture->id;
  if (graph != nullptr) *graph = capture == nullptr ? nullptr : reinterpret_cast<cudaGraph_t>(&capture->graph);
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}
