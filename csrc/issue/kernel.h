// A kernel that another compiler has compiled and loaded, and how its parameters follow from the tensors of a launch.
#pragma once

#include <array>
#include <cstdint>
#include <variant>
#include <vector>

namespace symm_overlap::issue {

// The address of a tensor of the launch.
struct Address {
  int tensor;
};

// The same in every launch. A parameter of fewer bytes than a Number has gets the first ones.
struct Number {
  int64_t value;
};

// A tensor map, by which the copy unit of a multiprocessor (TMA) loads boxes of a matrix. The numbers are those of the
// driver's cuTensorMapEncodeTiled: the length of a row comes first, and the stride is in bytes.
struct Matrix {
  int tensor;
  int element_type;
  int swizzle;
  std::array<uint64_t, 2> sizes;
  uint64_t stride;
  std::array<uint32_t, 2> box;
};

using Parameter = std::variant<Address, Number, Matrix>;

struct Kernel {
  uint64_t function;  // the driver's handle
  unsigned int programs;
  unsigned int threads;  // of one program
  unsigned int shared_bytes;
  std::vector<Parameter> parameters;
};

}  // namespace symm_overlap::issue
