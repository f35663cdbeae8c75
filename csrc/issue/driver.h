// What carries out the items of a program: one implementation for each kind of device, and one that only takes notes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "issue/compute.h"

namespace symm_overlap::issue {

// Rows of so many bytes, each so many bytes behind the one before.
struct Rows {
  int64_t count;
  int64_t bytes;
  int64_t to_stride;
  int64_t from_stride;
};

// Streams and events go by numbers, and stream 0 is the caller's. A device without streams ignores the number: it is
// only given programs of one stream. Every function enqueues and returns, or does it here and now.
class Driver {
 public:
  virtual ~Driver() = default;

  // Around the items that are issued without Python in between. `end` does not throw.
  virtual void begin() {}
  virtual void end() noexcept {}
  // After an error: the caller's stream follows what others have been given, and is current again.
  virtual void abandon() noexcept {}
  // What Python computes next belongs to this stream, until the next `begin`.
  virtual void enter(int stream) = 0;

  virtual void signal(int stream, const std::vector<int>& peers, int channel) = 0;
  virtual void wait(int stream, const std::vector<int>& peers, int channel) = 0;
  // Of all ranks.
  virtual void barrier(int stream, int channel) = 0;
  virtual void sleep(int stream) = 0;
  virtual void record(int stream, int event) = 0;
  virtual void follow(int stream, int event) = 0;  // the stream goes on once the event's latest record is reached

  // Whether the two functions below are there: where a signal, a wait and what follows them can be one launch.
  virtual bool merges() const { return false; }
  // A signal to all other ranks, a wait for each of them, then `sum`; then a signal to all on channel `told`, if given.
  virtual void meet_and_sum(int, int, const std::vector<at::Tensor>&, bool, const at::Tensor&, const at::Tensor&,
                            std::optional<int>) {
    TORCH_CHECK(false, "symm_overlap: this driver does not merge");
  }
  // A wait for all other ranks, then a copy of what each has `from` where it says into its part of `out`: parts of so
  // many bytes, in rank order, of which the last ones may be short or empty.
  virtual void await_and_gather(int, int, const std::vector<int64_t>&, int64_t, const at::Tensor&) {
    TORCH_CHECK(false, "symm_overlap: this driver does not merge");
  }

  // For links that a benchmark emulates. 0: a copy begins; time for which the link was idle, but for a moment, is gone.
  // Else the stream goes on once the link has been busy for so many nanoseconds more. All streams share one link.
  virtual void pace(int, int64_t) { TORCH_CHECK(false, "symm_overlap: this driver emulates no link"); }

  virtual void copy(int stream, char* to, const char* from, const Rows& rows) = 0;
  virtual void copy_tensor(int stream, const at::Tensor& to, const at::Tensor& from) = 0;
  // A contiguous tensor with the dtype and device of `like`, for what follows on this stream.
  virtual at::Tensor make(int stream, const at::Tensor& like, at::IntArrayRef sizes) = 0;
  virtual void add(int stream, const at::Tensor& out, const at::Tensor& addend) = 0;  // out += addend
  // See issue/compute.h. A device may know a quicker way to the same.
  virtual void multiply_scaled(int stream, const Scaled& product, at::Tensor& out) = 0;
  virtual void multiply(int stream, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add) = 0;
  // out = the sum (or mean) of the partials, in their order; `copy` gets the same values, where it is defined.
  virtual void sum(int stream, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
                   const at::Tensor& copy) = 0;
};

}  // namespace symm_overlap::issue
