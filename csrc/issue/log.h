// A stand-in for a device. It carries out nothing, and records what it was asked to do.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "issue/driver.h"
#include "issue/written.h"

namespace symm_overlap::issue {

// One record: what was asked, on which stream, and the numbers that describe it:
//
//   signal, wait    channel, peers...
//   barrier         channel
//   record, follow  event
//   pace            nanoseconds
//   copy            address to, address from, rows, bytes of a row, bytes from row to row in the target, in the source
//   copy tensor     address to, address from, bytes
//   make            elements
//   add             addresses of out and of the addend; elements of out
//   multiply        addresses of out, a, b; rows, columns, contracted length; whether it adds; bias address, or 0
//   multiply scaled  the same
//   sum             addresses of out and of its copy, or 0; elements; whether it averages; addresses of the partials...
//   meet and sum    channel; the channel signalled afterwards, or -1; then as sum
//   await and gather  channel; address of out; bytes of a part, and of out; by rank, the addresses that are read...
//   raise, await    chunk of the flag
//   kernel          programs; threads of each; addresses of the tensors...
//   poison          addresses of the outputs...
//   sleep, enter, abandon  nothing
struct Entry {
  const char* what;
  int stream;
  std::vector<int64_t> numbers;
};

// Flags that nothing raises or awaits: the driver records both.
class NoFlags final : public Flags {};

class LogDriver final : public Driver {
 public:
  void abandon() noexcept override { note("abandon", 0, {}); }
  void enter(int stream) override { note("enter", stream, {}); }
  void signal(int stream, const std::vector<int>& peers, int channel) override;
  void wait(int stream, const std::vector<int>& peers, int channel) override;
  void barrier(int stream, int channel) override { note("barrier", stream, {channel}); }
  void sleep(int stream) override { note("sleep", stream, {}); }
  void record(int stream, int event) override { note("record", stream, {event}); }
  void follow(int stream, int event) override { note("follow", stream, {event}); }
  void pace(int stream, int64_t ns) override { note("pace", stream, {ns}); }
  void copy(int stream, char* to, const char* from, const Rows& rows) override;
  void copy_tensor(int stream, const at::Tensor& to, const at::Tensor& from) override;
  at::Tensor make(int stream, const at::Tensor& like, at::IntArrayRef sizes) override;
  void add(int stream, const at::Tensor& out, const at::Tensor& addend) override;
  void multiply_scaled(int stream, const Scaled& product, at::Tensor& out) override;
  void multiply(int stream, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
                const std::optional<at::Tensor>& bias) override;
  void sum(int stream, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
           const at::Tensor& copy) override;
  bool has_fused_meetings() const override { return true; }
  void meet_and_sum(int stream, int channel, const std::vector<at::Tensor>& partials, bool average,
                    const at::Tensor& out, const at::Tensor& copy, std::optional<int> done_channel) override;
  void await_and_gather(int stream, int channel, const std::vector<int64_t>& from, int64_t part_bytes,
                        const at::Tensor& out) override;
  void raise(int stream, Flags&, int chunk) override { note("raise", stream, {chunk}); }
  void await(int stream, Flags&, int chunk) override { note("await", stream, {chunk}); }
  void launch(int stream, const Kernel& kernel, const std::vector<at::Tensor>& tensors) override;
  // The end of a call, which is not an item of a program: after a failed wait, the outputs are filled with NaN. Nothing
  // is recorded if another launch has ended the call and has written all of its outputs.
  void poison(const std::vector<at::Tensor>& outputs);

  // Returns everything recorded since the last call of this function.
  std::vector<Entry> take();

 private:
  void note(const char* what, int stream, std::vector<int64_t> numbers) {
    entries_.push_back({what, stream, std::move(numbers)});
  }

  std::vector<Entry> entries_;
  std::optional<Written> ended_;
};

}  // namespace symm_overlap::issue
