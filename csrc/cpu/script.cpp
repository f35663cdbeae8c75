#include "cpu/script.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <optional>

#include "cpu/copy.h"
#include "cpu/without_gil.h"

namespace symm_overlap::cpu {

namespace {

constexpr int64_t kLong = int64_t{64} << 10;  // bytes; to give the GIL away and take it back costs a microsecond

char* address(const Place& place, const std::vector<at::Tensor>& tensors) {
  if (place.tensor < 0) {
    return reinterpret_cast<char*>(place.at);
  }
  return static_cast<char*>(tensors.at(place.tensor).mutable_data_ptr()) + place.at;
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

}  // namespace symm_overlap::cpu
