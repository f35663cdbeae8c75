// Streams. Each stream is a thread with a queue of work.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "common.h"

namespace host_gpu {

struct Capture;

class Stream {
 public:
  Stream(int device, int priority) : device(device), priority(priority) {}

  const int device;
  const int priority;

  // While the stream is captured: the capture, and the nodes that come before the next one. Only one thread at a time
  // captures a stream, as CUDA requires.
  std::shared_ptr<Capture> capture;
  std::vector<int> ends;

  void push(Work work);
  // Returns once all work that was pushed so far is done.
  void drain();
  bool idle();
  // The thread ends when the queue is empty.
  void close();
  bool closed();
  // The main function of the stream's thread.
  void run();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool busy_ = false;
  bool closed_ = false;
};

// Returns the stream of a handle. A null handle is the default stream of the current device.
Stream& stream_of(cudaStream_t handle);

// Appends work to a stream, or to the graph of its capture if the stream is being captured.
cudaError_t enqueue(cudaStream_t handle, Work work);

// Waits until nothing runs on the current device.
void drain_device();

}  // namespace host_gpu
