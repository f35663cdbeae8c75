#include "issue/log.h"

#include <utility>

namespace symm_overlap::issue {

namespace {

int64_t number(const void* address) {
  return reinterpret_cast<int64_t>(address);
}

int64_t address(const at::Tensor& tensor) {
  return number(tensor.const_data_ptr());
}

std::vector<int64_t> product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool add,
                             const std::optional<at::Tensor>& bias) {
  return {address(out), address(a), address(b), out.size(0), out.size(1), a.size(1), add, bias ? address(*bias) : 0};
}

std::vector<int64_t> added(std::vector<int64_t> numbers, const std::vector<at::Tensor>& partials, bool average,
                           const at::Tensor& out, const at::Tensor& copy) {
  numbers.insert(numbers.end(), {address(out), copy.defined() ? address(copy) : 0, out.numel(), average});
  for (const at::Tensor& partial : partials) numbers.push_back(address(partial));
  return numbers;
}

std::vector<int64_t> meeting(const std::vector<int>& peers, int channel) {
  std::vector<int64_t> numbers{channel};
  numbers.insert(numbers.end(), peers.begin(), peers.end());
  return numbers;
}

}  // namespace

void LogDriver::signal(int stream, const std::vector<int>& peers, int channel) {
  note("signal", stream, meeting(peers, channel));
}

void LogDriver::wait(int stream, const std::vector<int>& peers, int channel) {
  note("wait", stream, meeting(peers, channel));
}

void LogDriver::copy(int stream, char* to, const char* from, const Rows& rows) {
  note("copy", stream, {number(to), number(from), rows.count, rows.bytes, rows.to_stride, rows.from_stride});
}

void LogDriver::copy_tensor(int stream, const at::Tensor& to, const at::Tensor& from) {
  note("copy tensor", stream, {address(to), address(from), static_cast<int64_t>(to.nbytes())});
}

at::Tensor LogDriver::make(int stream, const at::Tensor& like, at::IntArrayRef sizes) {
  at::Tensor made = like.new_empty(sizes);
  note("make", stream, {made.numel()});
  return made;
}

void LogDriver::launch(int stream, const Kernel& kernel, const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> numbers{kernel.programs, kernel.threads};
  for (const at::Tensor& tensor : tensors) numbers.push_back(address(tensor));
  note("kernel", stream, std::move(numbers));
}

void LogDriver::add(int stream, const at::Tensor& out, const at::Tensor& addend) {
  note("add", stream, {address(out), address(addend), out.numel()});
}

void LogDriver::multiply(int stream, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
                         const std::optional<at::Tensor>& bias) {
  note("multiply", stream, product(a, b, out, add, bias));
}

void LogDriver::multiply_scaled(int stream, const Scaled& scaled, at::Tensor& out) {
  note("multiply scaled", stream, product(scaled.a, scaled.b, out, false, scaled.bias));
}

void LogDriver::sum(int stream, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
                    const at::Tensor& copy) {
  note("sum", stream, added({}, partials, average, out, copy));
}

void LogDriver::meet_and_sum(int stream, int channel, const std::vector<at::Tensor>& partials, bool average,
                             const at::Tensor& out, const at::Tensor& copy, std::optional<int> done_channel) {
  note("meet and sum", stream, added({channel, done_channel.value_or(-1)}, partials, average, out, copy));
  if (!done_channel) ended_.emplace(out);
}

void LogDriver::await_and_gather(int stream, int channel, const std::vector<int64_t>& from, int64_t part_bytes,
                                 const at::Tensor& out) {
  std::vector<int64_t> numbers{channel, address(out), part_bytes, static_cast<int64_t>(out.nbytes())};
  numbers.insert(numbers.end(), from.begin(), from.end());
  note("await and gather", stream, std::move(numbers));
  ended_.emplace(out);
}

void LogDriver::poison(const std::vector<at::Tensor>& outputs) {
  const auto ended = std::exchange(ended_, std::nullopt);
  if (ended && ended->is_all_of(outputs)) return;
  std::vector<int64_t> numbers;
  for (const at::Tensor& output : outputs) {
    numbers.push_back(address(output));
  }
  note("poison", 0, std::move(numbers));
}

std::vector<Entry> LogDriver::take() {
  return std::exchange(entries_, {});
}

}  // namespace symm_overlap::issue
