// The memory written by a launch that has ended a call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace symm_overlap::issue {

struct Written {
  const void* data;
  size_t bytes;

  explicit Written(const at::Tensor& tensor) : data(tensor.const_data_ptr()), bytes(tensor.nbytes()) {}

  // Whether this memory is exactly the outputs of the call.
  bool is_all_of(const std::vector<at::Tensor>& outputs) const {
    return outputs.size() == 1 && outputs[0].const_data_ptr() == data && outputs[0].nbytes() == bytes;
  }
};

}  // namespace symm_overlap::issue
