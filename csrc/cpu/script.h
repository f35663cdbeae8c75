// The steps of a plan between two that need Python: copies, signals, waits, matmuls and sums, issued one after another
// without it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <variant>
#include <vector>

#include "cpu/lane.h"

namespace symm_overlap::cpu {

// Where one side of a copy lies: so many bytes from the start of a tensor of the call, or, with tensor -1, an address
// that is the same in every call, such as one in the workspace.
struct Place {
  int tensor;
  int64_t at;
};

// Rows of so many bytes, each so many bytes behind the one before.
struct Rows {
  int64_t count;
  int64_t bytes;
  int64_t to_stride;
  int64_t from_stride;
};

// A whole tensor that a step computes with: one of the call's, by its index, or one that is the same in every call,
// such as a view of the workspace.
using Operand = std::variant<at::Tensor, int>;

class Script {
 public:
  // Append a step.
  void copy(Place to, Place from, Rows rows);
  void signal(int peer, int channel);
  void wait(int peer, int channel);
  void copy_tensor(Operand to, Operand from);                          // see cpu/copy.h
  void multiply(Operand a, Operand b, Operand out, bool add);          // see cpu/matmul.h
  void sum(std::vector<Operand> partials, Operand out, bool average);  // see cpu/reduce.h
  size_t size() const { return steps_.size(); }

  // Runs steps `begin` to `end`, with the tensors of this call. Throws what CpuLane::wait throws; `at` then says in
  // which step.
  void run(CpuLane& lane, const std::vector<at::Tensor>& tensors, size_t begin, size_t end);
  size_t at() const { return at_; }

 private:
  enum class Kind { kCopy, kSignal, kWait, kCopyTensor, kMultiply, kSum };
  struct Step {
    Kind kind;
    int peer = 0;
    int channel = 0;
    Place to = {};
    Place from = {};
    Rows rows = {};
    std::vector<Operand> operands = {};  // the last one is written
    bool flag = false;                   // add, or average
  };
  static void copy(const Step& step, const std::vector<at::Tensor>& tensors);
  static void issue_copy_tensor(const Step& step, const std::vector<at::Tensor>& tensors);
  static void issue_multiply(const Step& step, const std::vector<at::Tensor>& tensors);
  static void issue_sum(const Step& step, const std::vector<at::Tensor>& tensors);

  std::vector<Step> steps_;
  size_t at_ = 0;
};

}  // namespace symm_overlap::cpu
