// A plan compiled to a flat list of items. They are issued one after another without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "issue/driver.h"

namespace symm_overlap::issue {

// The tensors of one call. Their addresses may differ in the next call.
using Tensors = std::vector<at::Tensor>;

// The place of one side of a copy: `at` bytes from the start of a tensor of the call. With tensor -1, `at` is an
// address that is the same in every call, such as one in the workspace.
struct Place {
  int tensor;
  int64_t at;
};

// The operands of steps.
struct Whole {  // a tensor of the call
  int tensor;
};
struct Slice {  // tensor.narrow(dim, start, length), whatever the strides of this call's tensor
  int tensor;
  int64_t dim;
  int64_t start;
  int64_t length;
};
struct Part {  // a view of a contiguous tensor of the call, `offset` elements from its start
  int tensor;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;
};
// An at::Tensor is the same in every call, such as a view of the workspace.
using Operand = std::variant<at::Tensor, Whole, Slice, Part>;

struct Signal {
  std::vector<int> peers;
  int channel;
};
struct Wait {
  std::vector<int> peers;
  int channel;
};
struct Barrier {
  int channel;
};
struct Sleep {};
struct Record {
  int event;
};
struct Follow {
  int event;
};
struct Enter {};
struct Pace {
  int64_t ns;
};
struct Copy {
  Place to;
  Place from;
  Rows rows;
};
struct CopyTensor {
  Operand to;
  Operand from;
};
struct Make {  // from here on, new memory is this tensor of the call, until it is made again or the run ends
  int tensor;
  at::Tensor like;
  std::vector<int64_t> sizes;
};
struct Add {
  Operand out;
  Operand addend;
};
struct Multiply {
  Operand a;
  Operand b;
  Operand out;
  bool add;
  std::optional<Operand> bias;
};
struct MultiplyScaled {
  Operand a;
  Operand scale_a;
  Operand b;
  Operand scale_b;
  std::optional<Operand> bias;
  std::optional<Operand> result_scale;
  bool fast;
  bool in_float32;
  Operand out;
};
struct Sum {
  std::vector<Operand> partials;
  bool average;
  Operand out;
  std::optional<Operand> copy;
};

struct MeetAndSum {
  int channel;
  Sum sum;
  std::optional<int> done_channel;
};
struct AwaitAndGather {
  int channel;
  std::vector<int64_t> from;
  int64_t part_bytes;
  Operand out;
};

struct Raise {
  std::shared_ptr<Flags> flags;
  int chunk;
};
struct Await {
  std::shared_ptr<Flags> flags;
  int chunk;
};
struct Launch {
  Kernel kernel;
  std::vector<Operand> tensors;
};

// A call of a member of Driver, with its arguments.
struct Item {
  int stream;
  std::variant<Signal, Wait, Barrier, Sleep, Record, Follow, Enter, Pace, Copy, CopyTensor, Make, Add, Multiply,
               MultiplyScaled, Sum, MeetAndSum, AwaitAndGather, Raise, Await, Launch>
      what;
  int step = -1;  // the name of the step that it belongs to; see Program::name
};

class Program {
 public:
  void add(Item item) { items_.push_back(std::move(item)); }
  size_t size() const { return items_.size(); }
  // Names the items from `begin` on. While a profiler records, a range of this name is around them.
  void name(size_t begin, std::string step);

  // Issues the items from `begin` up to `end`, with the tensors of this call. Throws what the driver throws. `at` then
  // returns the index of the item that failed.
  void run(Driver& driver, Tensors tensors, size_t begin, size_t end);
  size_t at() const { return at_; }

 private:
  std::vector<Item> items_;
  std::vector<std::string> steps_;
  size_t at_ = 0;
};

}  // namespace symm_overlap::issue
