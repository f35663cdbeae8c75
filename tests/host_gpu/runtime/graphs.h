// Graphs, and the captures that create them.
#pragma once

#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "streams.h"

namespace host_gpu {

struct Node {
  Work work;
  std::vector<int> after;  // the nodes that must be done before this one
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
  // Lets a stream wait for nodes of this capture. The stream is then captured, too.
  cudaError_t join(Stream& stream, const std::vector<int>& nodes);
};

// True if CUDA forbids a call now because a stream is being captured. This makes the capture invalid.
bool forbidden_in_capture(const char* function);

}  // namespace host_gpu
