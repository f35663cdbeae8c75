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

std::vector<int64_t> meeting(const std::vector<int>& peers, int channel) {
  std::vector<int64_t> numbers{channel};
  numbers.insert(numbers.end(), peers.begin(), peers.end());
  return numbers;
}

}  // namespace

void LogDriver::signal(int stream, const std::vector<int>& peers, int channel) {
  add("signal", stream, meeting(peers, channel));
}

void LogDriver::wait(int stream, const std::vector<int>& peers, int channel) {
  add("wait", stream, meeting(peers, channel));
}

void LogDriver::copy(int stream, char* to, const char* from, const Rows& rows) {
  add("copy", stream, {number(to), number(from), rows.count, rows.bytes, rows.to_stride, rows.from_stride});
}

void LogDriver::copy_tensor(int stream, const at::Tensor& to, const at::Tensor& from) {
  add("copy tensor", stream, {address(to), address(from), static_cast<int64_t>(to.nbytes())});
}

void LogDriver::multiply(int stream, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool accumulate) {
  add("multiply", stream, {address(out), address(a), address(b), out.size(0), out.size(1), a.size(1), accumulate});
}

void LogDriver::sum(int stream, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
                    const at::Tensor& copy) {
  std::vector<int64_t> numbers{address(out), copy.defined() ? address(copy) : 0, out.numel(), average};
  for (const at::Tensor& partial : partials) {
    numbers.push_back(address(partial));
  }
  add("sum", stream, std::move(numbers));
}

void LogDriver::poison(const std::vector<at::Tensor>& outputs) {
  std::vector<int64_t> numbers;
  for (const at::Tensor& output : outputs) {
    numbers.push_back(address(output));
  }
  add("poison", 0, std::move(numbers));
}

std::vector<Entry> LogDriver::take() {
  return std::exchange(entries_, {});
}

}  // namespace symm_overlap::issue
