// For benchmarks, on the current stream: the pace of an emulated link, and the time at which the stream comes to a
// place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace symm_overlap::cuda {

// Throws ValueError unless a tensor is made of int64 on a GPU, is contiguous and has at least one.
void check_clock(const at::Tensor& clock);

// See issue::Driver::pace. The first number of `link` is the GPU's time until which the link is busy.
void pace(const at::Tensor& link, int64_t ns);

// times[index] = the GPU's time in nanoseconds.
void stamp(const at::Tensor& times, int64_t index);

}  // namespace symm_overlap::cuda
