#include "cpu/driver.h"

#include <ATen/record_function.h>

#include <optional>
#include <utility>

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

std::optional<WithoutGil> released_if(bool large) {
  return large ? std::optional<WithoutGil>(std::in_place) : std::optional<WithoutGil>();
}

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
  const auto without_gil = released_if(rows.count * rows.bytes >= kLong);
  for (int64_t row = 0; row < rows.count; ++row) {
    copy_bytes(to + row * rows.to_stride, from + row * rows.from_stride, rows.bytes);
  }
}

void CpuDriver::copy_tensor(int, const at::Tensor& to, const at::Tensor& from) {
  const auto without_gil = released_if(static_cast<int64_t>(to.nbytes()) >= kLong);
  cpu::copy(to, from);
}

at::Tensor CpuDriver::make(int, const at::Tensor& like, at::IntArrayRef sizes) {
  return new_output(like, sizes);
}

void CpuDriver::add(int, const at::Tensor& out, const at::Tensor& addend) {
  const auto without_gil = released_if(static_cast<int64_t>(out.nbytes()) >= kLong);
  out.add_(addend);
}

void CpuDriver::multiply_scaled(int, const issue::Scaled& product, at::Tensor& out) {
  const auto without_gil = released_if(out.numel() * product.a.size(1) >= kManyProducts);
  issue::multiply_scaled(product, out);
}

void CpuDriver::multiply(int, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
                         const std::optional<at::Tensor>& bias) {
  const auto without_gil = released_if(out.numel() * a.size(-1) >= kManyProducts);
  cpu::multiply(a, b, out, add, bias);
}

void CpuDriver::sum(int, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
                    const at::Tensor& copy) {
  const auto without_gil = released_if(static_cast<int64_t>(partials.size() * out.nbytes()) >= kLong);
  reduce(partials, out, average);
  if (copy.defined()) {
    copy.copy_(out);
  }
}

}  // namespace symm_overlap::cpu
