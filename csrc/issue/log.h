// The stand-in for a device: it carries nothing out, and writes down what it was asked for.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "issue/driver.h"

namespace symm_overlap::issue {

// What was asked, on which stream, and the numbers that describe it:
//
//   signal, wait    channel, peers...
//   barrier         channel
//   record, follow  event
//   pace            nanoseconds
//   copy            address to, address from, rows, bytes of a row, bytes from row to row there and here
//   copy tensor     address to, address from, bytes
//   multiply        addresses of out, a and b; rows, columns, contracted; whether it adds
//   sum             addresses of out and of its copy, or 0; elements; whether it averages; addresses of the partials...
//   poison          addresses of the outputs...
//   sleep, enter, abandon  nothing
struct Entry {
  const char* what;
  int stream;
  std::vector<int64_t> numbers;
};

class LogDriver final : public Driver {
 public:
  void abandon() noexcept override { add("abandon", 0, {}); }
  void enter(int stream) override { add("enter", stream, {}); }
  void signal(int stream, const std::vector<int>& peers, int channel) override;
  void wait(int stream, const std::vector<int>& peers, int channel) override;
  void barrier(int stream, int channel) override { add("barrier", stream, {channel}); }
  void sleep(int stream) override { add("sleep", stream, {}); }
  void record(int stream, int event) override { add("record", stream, {event}); }
  void follow(int stream, int event) override { add("follow", stream, {event}); }
  void pace(int stream, int64_t ns) override { add("pace", stream, {ns}); }
  void copy(int stream, char* to, const char* from, const Rows& rows) override;
  void copy_tensor(int stream, const at::Tensor& to, const at::Tensor& from) override;
  void multiply(int stream, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add) override;
  void sum(int stream, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
           const at::Tensor& copy) override;
  // The end of a call, which is no item of a program: the outputs of a failed wait are filled with NaN.
  void poison(const std::vector<at::Tensor>& outputs);

  // Everything since the last time that this was asked.
  std::vector<Entry> take();

 private:
  void add(const char* what, int stream, std::vector<int64_t> numbers) {
    entries_.push_back({what, stream, std::move(numbers)});
  }

  std::vector<Entry> entries_;
};

}  // namespace symm_overlap::issue
