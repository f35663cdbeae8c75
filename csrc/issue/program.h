// A plan compiled to a flat list of items, which are issued one after another without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "issue/driver.h"

namespace symm_overlap::issue {

// The tensors of one call: they may lie elsewhere in the next.
using Tensors = std::vector<at::Tensor>;

// Where one side of a copy lies: so many bytes from the start of a tensor of the call, or, with tensor -1, an address
// that is the same in every call, such as one in the workspace.
struct Place {
  int tensor;
  int64_t at;
};

// What a step computes with.
struct Whole {  // a tensor of the call
  int tensor;
};
struct Slice {  // tensor.narrow(dim, start, length), whatever the strides of this call's tensor
  int tensor;
  int64_t dim;
  int64_t start;
  int64_t length;
};
struct Part {  // so many elements behind the start of a tensor of the call, which is contiguous
  int tensor;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;
};
// A tensor is the same in every call, such as a view of the workspace.
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
struct Make {  // from here on this is a tensor of the call: new memory, until it is made again or the run ends
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
  std::optional<int> told;
};
struct AwaitAndGather {
  int channel;
  std::vector<int64_t> from;
  int64_t part_bytes;
  Operand out;
};

// The members of a Driver, and what they are called with.
struct Item {
  int stream;
  std::variant<Signal, Wait, Barrier, Sleep, Record, Follow, Enter, Pace, Copy, CopyTensor, Make, Add, Multiply,
               MultiplyScaled, Sum, MeetAndSum, AwaitAndGather>
      what;
};

class Program {
 public:
  void add(Item item) { items_.push_back(std::move(item)); }
  size_t size() const { return items_.size(); }

  // Issues items `begin` to `end`, with the tensors of this call. Throws what the driver throws; `at` then says at
  // which item.
  void run(Driver& driver, Tensors tensors, size_t begin, size_t end);
  size_t at() const { return at_; }

 private:
  std::vector<Item> items_;
  size_t at_ = 0;
};

}  // namespace symm_overlap::issue
