#include "cpu/script.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "cpu/copy.h"
#include "cpu/matmul.h"
#include "cpu/reduce.h"
#include "cpu/without_gil.h"

namespace symm_overlap::cpu {

namespace {

// To give the GIL away and take it back costs a microsecond.
constexpr int64_t kLong = int64_t{64} << 10;           // bytes of a copy
constexpr int64_t kManyProducts = int64_t{128} << 10;  // multiplications of a matmul

char* address(const Place& place, const std::vector<at::Tensor>& tensors) {
  if (place.tensor < 0) {
    return reinterpret_cast<char*>(place.at);
  }
  return static_cast<char*>(tensors.at(place.tensor).mutable_data_ptr()) + place.at;
}

const at::Tensor& tensor(const Operand& operand, const std::vector<at::Tensor>& tensors) {
  const auto* const fixed = std::get_if<at::Tensor>(&operand);
  return fixed != nullptr ? *fixed : tensors.at(std::get<int>(operand));
}

}  // namespace

void Script::copy(Place to, Place from, Rows rows) {
  steps_.push_back({Kind::kCopy, 0, 0, to, from, rows});
}

void Script::signal(int peer, int channel) {
  steps_.push_back({Kind::kSignal, peer, channel});
}

void Script::wait(int peer, int channel) {
  steps_.push_back({Kind::kWait, peer, channel});
}

void Script::copy_tensor(Operand to, Operand from) {
  steps_.push_back({Kind::kCopyTensor, 0, 0, {}, {}, {}, {std::move(from), std::move(to)}});
}

void Script::multiply(Operand a, Operand b, Operand out, bool add) {
  steps_.push_back({Kind::kMultiply, 0, 0, {}, {}, {}, {std::move(a), std::move(b), std::move(out)}, add});
}

void Script::sum(std::vector<Operand> partials, Operand out, bool average) {
  partials.push_back(std::move(out));
  steps_.push_back({Kind::kSum, 0, 0, {}, {}, {}, std::move(partials), average});
}

void Script::run(CpuLane& lane, const std::vector<at::Tensor>& tensors, size_t begin, size_t end) {
  TORCH_CHECK_INDEX(begin <= end && end <= steps_.size(), "symm_overlap: a script of ", steps_.size(),
                    " steps has no steps ", begin, " to ", end);
  for (at_ = begin; at_ < end; ++at_) {
    const Step& step = steps_[at_];
    switch (step.kind) {
      case Kind::kCopy:
        copy(step, tensors);
        break;
      case Kind::kSignal:
        lane.signal(step.peer, step.channel);
        break;
      case Kind::kWait:
        lane.wait(step.peer, step.channel);
        break;
      case Kind::kCopyTensor:
        issue_copy_tensor(step, tensors);
        break;
      case Kind::kMultiply:
        issue_multiply(step, tensors);
        break;
      case Kind::kSum:
        issue_sum(step, tensors);
        break;
    }
  }
}

void Script::copy(const Step& step, const std::vector<at::Tensor>& tensors) {
  RECORD_FUNCTION("symm_overlap::copy", std::vector<c10::IValue>());
  char* const to = address(step.to, tensors);
  const char* const from = address(step.from, tensors);
  std::optional<WithoutGil> without_gil;
  if (step.rows.count * step.rows.bytes >= kLong) {
    without_gil.emplace();
  }
  for (int64_t row = 0; row < step.rows.count; ++row) {
    copy_bytes(to + row * step.rows.to_stride, from + row * step.rows.from_stride, step.rows.bytes);
  }
}

void Script::issue_copy_tensor(const Step& step, const std::vector<at::Tensor>& tensors) {
  const at::Tensor& to = tensor(step.operands[1], tensors);
  std::optional<WithoutGil> without_gil;
  if (static_cast<int64_t>(to.nbytes()) >= kLong) {
    without_gil.emplace();
  }
  cpu::copy(to, tensor(step.operands[0], tensors));
}

void Script::issue_multiply(const Step& step, const std::vector<at::Tensor>& tensors) {
  const at::Tensor& a = tensor(step.operands[0], tensors);
  at::Tensor out = tensor(step.operands[2], tensors);
  std::optional<WithoutGil> without_gil;
  if (out.numel() * a.size(-1) >= kManyProducts) {
    without_gil.emplace();
  }
  cpu::multiply(a, tensor(step.operands[1], tensors), out, step.flag);
}

void Script::issue_sum(const Step& step, const std::vector<at::Tensor>& tensors) {
  const at::Tensor& out = tensor(step.operands.back(), tensors);
  if (out.numel() == 0) {
    return;
  }
  std::vector<at::Tensor> partials;
  partials.reserve(step.operands.size() - 1);
  for (size_t rank = 0; rank + 1 < step.operands.size(); ++rank) {
    partials.push_back(tensor(step.operands[rank], tensors));
  }
  std::optional<WithoutGil> without_gil;
  if (static_cast<int64_t>(partials.size() * out.nbytes()) >= kLong) {
    without_gil.emplace();
  }
  reduce(partials, out, step.flag);
}

}  // namespace symm_overlap::cpu
