#include "issue/program.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string>
#include <utility>

namespace symm_overlap::issue {

namespace {

char* address(const Place& place, const Tensors& tensors) {
  if (place.tensor < 0) {
    return reinterpret_cast<char*>(place.at);
  }
  return static_cast<char*>(tensors.at(place.tensor).mutable_data_ptr()) + place.at;
}

struct Find {
  const Tensors& tensors;

  at::Tensor operator()(const at::Tensor& fixed) const { return fixed; }
  at::Tensor operator()(const Whole& whole) const { return tensors.at(whole.tensor); }
  at::Tensor operator()(const Slice& slice) const {
    return tensors.at(slice.tensor).narrow(slice.dim, slice.start, slice.length);
  }
  at::Tensor operator()(const Part& part) const {
    const at::Tensor& base = tensors.at(part.tensor);
    return base.as_strided(part.sizes, part.strides, base.storage_offset() + part.offset);
  }
};

struct Issue {
  Driver& driver;
  Tensors& tensors;
  int stream;

  at::Tensor find(const Operand& operand) const { return std::visit(Find{tensors}, operand); }
  std::optional<at::Tensor> find(const std::optional<Operand>& operand) const {
    return operand ? std::optional(find(*operand)) : std::nullopt;
  }

  std::vector<at::Tensor> find(const std::vector<Operand>& operands) const {
    std::vector<at::Tensor> found;
    found.reserve(operands.size());
    for (const Operand& operand : operands) found.push_back(find(operand));
    return found;
  }

  void operator()(const Signal& item) const { driver.signal(stream, item.peers, item.channel); }
  void operator()(const Wait& item) const { driver.wait(stream, item.peers, item.channel); }
  void operator()(const Barrier& item) const { driver.barrier(stream, item.channel); }
  void operator()(const Sleep&) const { driver.sleep(stream); }
  void operator()(const Record& item) const { driver.record(stream, item.event); }
  void operator()(const Follow& item) const { driver.follow(stream, item.event); }
  void operator()(const Enter&) const { driver.enter(stream); }
  void operator()(const Pace& item) const { driver.pace(stream, item.ns); }
  void operator()(const Copy& item) const {
    char *const to = address(item.to, tensors), *const from = address(item.from, tensors);
    if (to != from) {  // the caller may have put the data where the plan copies it
      driver.copy(stream, to, from, item.rows);
    }
  }
  void operator()(const CopyTensor& item) const { driver.copy_tensor(stream, find(item.to), find(item.from)); }
  void operator()(const Make& item) const {
    if (tensors.size() <= static_cast<size_t>(item.tensor)) {
      tensors.resize(item.tensor + 1);
    }
    tensors[item.tensor].reset();  // the old tensor's memory may be reused for the new one
    tensors[item.tensor] = driver.make(stream, item.like, item.sizes);
  }
  void operator()(const Add& item) const { driver.add(stream, find(item.out), find(item.addend)); }
  void operator()(const MultiplyScaled& item) const {
    at::Tensor out = find(item.out);
    const Scaled product{find(item.a),    find(item.scale_a),      find(item.b), find(item.scale_b),
                         find(item.bias), find(item.result_scale), item.fast,    item.in_float32};
    driver.multiply_scaled(stream, product, out);
  }
  void operator()(const Multiply& item) const {
    at::Tensor out = find(item.out);
    driver.multiply(stream, find(item.a), find(item.b), out, item.add, find(item.bias));
  }
  void operator()(const Sum& item) const {
    const at::Tensor out = find(item.out);
    if (out.numel() == 0) {
      return;
    }
    driver.sum(stream, find(item.partials), item.average, out, item.copy ? find(*item.copy) : at::Tensor());
  }
  void operator()(const MeetAndSum& item) const {
    const auto& [partials, average, out, copy] = item.sum;
    driver.meet_and_sum(stream, item.channel, find(partials), average, find(out), copy ? find(*copy) : at::Tensor(),
                        item.done_channel);
  }
  void operator()(const AwaitAndGather& item) const {
    driver.await_and_gather(stream, item.channel, item.from, item.part_bytes, find(item.out));
  }
  void operator()(const Raise& item) const { driver.raise(stream, *item.flags, item.chunk); }
  void operator()(const Await& item) const { driver.await(stream, *item.flags, item.chunk); }
  void operator()(const Launch& item) const { driver.launch(stream, item.kernel, find(item.tensors)); }
};

class Between {
 public:
  explicit Between(Driver& driver) : driver_(driver) { driver_.begin(); }
  ~Between() { driver_.end(); }
  Between(const Between&) = delete;
  Between& operator=(const Between&) = delete;

 private:
  Driver& driver_;
};

// The range of the step that is being issued, for profilers. It costs next to nothing if none of them records.
class Range {
 public:
  explicit Range(const std::vector<std::string>& steps) : steps_(steps), recorded_(at::hasCallbacks()) {}

  void enter(int step) {
    if (!recorded_ || step == step_) {
      return;
    }
    range_.reset();
    step_ = step;
    if (step >= 0) {
      range_.emplace(at::RecordScope::USER_SCOPE);
      if (range_->isActive()) {
        range_->before(std::string_view(steps_[step]));
      }
    }
  }

 private:
  const std::vector<std::string>& steps_;
  const bool recorded_;
  int step_ = -1;
  std::optional<at::RecordFunction> range_;
};

}  // namespace

void Program::name(size_t begin, std::string step) {
  TORCH_CHECK_INDEX(begin <= items_.size(), "symm_overlap: a program of ", items_.size(), " items has no item ", begin);
  for (size_t item = begin; item < items_.size(); ++item) {
    items_[item].step = static_cast<int>(steps_.size());
  }
  steps_.push_back(std::move(step));
}

void Program::run(Driver& driver, Tensors tensors, size_t begin, size_t end) {
  TORCH_CHECK_INDEX(begin <= end && end <= items_.size(), "symm_overlap: a program of ", items_.size(),
                    " items has no items ", begin, " to ", end);
  const Between between(driver);
  Range range(steps_);
  for (at_ = begin; at_ < end; ++at_) {
    range.enter(items_[at_].step);
    std::visit(Issue{driver, tensors, items_[at_].stream}, items_[at_].what);
  }
  range.enter(-1);
  at_ = end == begin ? end : end - 1;  // if the flush fails
  driver.flush();
}

}  // namespace symm_overlap::issue
