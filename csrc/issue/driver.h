// The interface that carries out the items of a program. There is one implementation for each kind of device, and one
// that only records what it was asked to do.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "issue/compute.h"
#include "issue/flags.h"
#include "issue/kernel.h"

namespace symm_overlap::issue {

// `count` rows of `bytes` bytes. The strides are the bytes from one row to the next, in the target and in the source.
struct Rows {
  int64_t count;
  int64_t bytes;
  int64_t to_stride;
  int64_t from_stride;
};

// Streams and events are identified by numbers. Stream 0 is the caller's. A device without streams ignores the number,
// and only runs programs of one stream. Every function either enqueues the work and returns, or does the work at once.
class Driver {
 public:
  virtual ~Driver() = default;

  // Called before and after a stretch of items that are issued without Python in between. `flush` issues what is still
  // pending; it is not called after an error. `end` does not throw.
  virtual void begin() {}
  virtual void flush() {}
  virtual void end() noexcept {}
  // Called after an error. Joins all enqueued work to the caller's stream, and makes this stream current again.
  virtual void abandon() noexcept {}
  // Makes `stream` the one on which Python computes next, until the next `begin`.
  virtual void enter(int stream) = 0;

  virtual void signal(int stream, const std::vector<int>& peers, int channel) = 0;
  virtual void wait(int stream, const std::vector<int>& peers, int channel) = 0;
  // A barrier of all ranks.
  virtual void barrier(int stream, int channel) = 0;
  virtual void sleep(int stream) = 0;
  virtual void record(int stream, int event) = 0;
  virtual void follow(int stream, int event) = 0;  // the stream waits until the event's latest record is reached

  // Whether the two functions below exist, so that a signal, a wait and the steps after them can be one launch.
  virtual bool has_fused_meetings() const { return false; }
  // A signal to all other ranks and a wait for each of them on a channel, then `sum`, then a signal to all other ranks
  // on `done_channel`, if given. The arguments are the stream, the channel, those of `sum`, and `done_channel`.
  virtual void meet_and_sum(int, int, const std::vector<at::Tensor>&, bool, const at::Tensor&, const at::Tensor&,
                            std::optional<int>) {
    TORCH_CHECK(false, "symm_overlap: this driver cannot merge steps into one launch");
  }
  // A wait for all other ranks, then a copy of each rank's part from its address to its place in `out`. The arguments
  // are the stream, the channel, the addresses by rank, the bytes of a part, and `out`. The parts are in rank order.
  // The last ones may be shorter or empty.
  virtual void await_and_gather(int, int, const std::vector<int64_t>&, int64_t, const at::Tensor&) {
    TORCH_CHECK(false, "symm_overlap: this driver cannot merge steps into one launch");
  }

  // For links that a benchmark emulates. With 0, a copy begins: time in which the link was idle is lost, except for a
  // short moment. Otherwise, the link is busy for that many more nanoseconds, and the stream waits until then. All
  // streams share one link.
  virtual void pace(int, int64_t) { TORCH_CHECK(false, "symm_overlap: this driver emulates no link"); }

  // For plans in which one step is a kernel that waits for flags or raises them: sets the flag of a chunk, after all
  // that the stream has been given so far; lets the stream wait until the kernel has set it; launches the kernel.
  virtual void raise(int, Flags&, int) { TORCH_CHECK(false, "symm_overlap: this driver raises no flags"); }
  virtual void await(int, Flags&, int) { TORCH_CHECK(false, "symm_overlap: this driver awaits no flags"); }
  virtual void launch(int, const Kernel&, const std::vector<at::Tensor>&) {
    TORCH_CHECK(false, "symm_overlap: this driver launches no kernels");
  }

  virtual void copy(int stream, char* to, const char* from, const Rows& rows) = 0;
  virtual void copy_tensor(int stream, const at::Tensor& to, const at::Tensor& from) = 0;
  // Returns a contiguous tensor with the dtype and device of `like`, for use by later items on this stream.
  virtual at::Tensor make(int stream, const at::Tensor& like, at::IntArrayRef sizes) = 0;
  virtual void add(int stream, const at::Tensor& out, const at::Tensor& addend) = 0;  // out += addend
  // See issue/compute.h. A device may compute the same in a quicker way.
  virtual void multiply_scaled(int stream, const Scaled& product, at::Tensor& out) = 0;
  virtual void multiply(int stream, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
                        const std::optional<at::Tensor>& bias) = 0;
  // out = the sum (or mean) of the partials, in their order. If `copy` is defined, it gets the same values.
  virtual void sum(int stream, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
                   const at::Tensor& copy) = 0;
};

}  // namespace symm_overlap::issue
