#include "cpu/driver.h"

#include <ATen/record_function.h>

#include <optional>

#include "cpu/copy.h"
#include "cpu/matmul.h"
#include "cpu/output_memory.h"
#include "cpu/reduce.h"
#include "cpu/without_gil.h"

namespace symm_overlap::cpu {

namespace {

// From these sizes on, an operation releases the GIL. To release and acquire it again costs a microsecond.
constexpr int64_t kLong = int64_t{64} << 10;           // bytes of a copy
constexpr int64_t kManyProducts = int64_t{128} << 10;  // multiplications of a matmul

}  // namespace

void CpuDriver::signal(int, const std::vector<int>& peers, int channel) {
  for (const int peer : peers) {
    lane_.signal(peer, channel);
  }
}

void CpuDriver::wait(int, const std::vector<int>& peers, int channel) {
  for (const int peer : peers) {
    lane_.wait(peer, channel);
  }
}

void CpuDriver::copy(int, char* to, const char* from, const issue::Rows& rows) {
  RECORD_FUNCTION("symm_overlap::copy", std::vector<c10::IValue>());
  std::optional<WithoutGil> without_gil;
  if (rows.count * rows.bytes >= kLong) {
    without_gil.emplace();
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    copy_bytes(to + row * rows.to_stride, from + row * rows.from_stride, rows.bytes);
  }
}

void CpuDriver::copy_tensor(int, const at::Tensor& to, const at::Tensor& from) {
  std::optional<WithoutGil> without_gil;
  if (static_cast<int64_t>(to.nbytes()) >= kLong) {
    without_gil.emplace();
  }
  cpu::copy(to, from);
}

at::Tensor CpuDriver::make(int, const at::Tensor& like, at::IntArrayRef sizes) {
  return new_output(like, sizes);
}

void CpuDriver::add(int, const at::Tensor& out, const at::Tensor& addend) {
  std::optional<WithoutGil> without_gil;
  if (static_cast<int64_t>(out.nbytes()) >= kLong) {
    without_gil.emplace();
  }
  out.add_(addend);
}

void CpuDriver::multiply_scaled(int, const issue::Scaled& product, at::Tensor& out) {
  std::optional<WithoutGil> without_gil;
  if (out.numel() * product.a.size(1) >= kManyProducts) {
    without_gil.emplace();
  }
  issue::multiply_scaled(product, out);
}

void CpuDriver::multiply(int, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
                         const std::optional<at::Tensor>& bias) {
  std::optional<WithoutGil> without_gil;
  if (out.numel() * a.size(-1) >= kManyProducts) {
    without_gil.emplace();
  }
  cpu::multiply(a, b, out, add, bias);
}

void CpuDriver::sum(int, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
                    const at::Tensor& copy) {
  std::optional<WithoutGil> without_gil;
  if (static_cast<int64_t>(partials.size() * out.nbytes()) >= kLong) {
    without_gil.emplace();
  }
  reduce(partials, out, average);
  if (copy.defined()) {
    copy.copy_(out);
  }
}

}  // namespace symm_overlap::cpu
