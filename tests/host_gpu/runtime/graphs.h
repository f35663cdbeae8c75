// Graphs, and the captures that make them.
#pragma once

#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "streams.h"

namespace host_gpu {

struct Node {
  Work work;
  std::vector<int> after;  // the nodes that come before this one
};

using Graph = std::vector<Node>;

struct Capture {
  Capture(unsigned long long id, cudaStreamCaptureMode mode, Stream& origin) : id(id), mode(mode), origin(&origin) {}

  const unsigned long long id;
  const cudaStreamCaptureMode mode;
  Stream* const origin;
  const std::thread::id thread = std::this_thread::get_id();
  Graph graph;
  std::set<Stream*> streams;
  bool invalid = false;

  cudaError_t add(Stream& stream, Work work);
  // A stream that waits for an event of this capture is captured too.
  cudaError_t join(Stream& stream, const std::vector<int>& nodes);
};

// Whether CUDA forbids a call now because some stream is being captured. The capture is invalid then.
bool forbidden_in_capture(const char* function);

}  // namespace host_gpu
