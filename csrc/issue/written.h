// What a launch that has ended a call has written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace symm_overlap::issue {

struct Written {
  const void* data;
  size_t bytes;

  explicit Written(const at::Tensor& tensor) : data(tensor.const_data_ptr()), bytes(tensor.nbytes()) {}

  // Whether these outputs of the call are that, and no others.
  bool is_all_of(const std::vector<at::Tensor>& outputs) const {
    return outputs.size() == 1 && outputs[0].const_data_ptr() == data && outputs[0].nbytes() == bytes;
  }
};

}  // namespace symm_overlap::issue
