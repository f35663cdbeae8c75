// For benchmarks: functions on the current stream that emulate the pace of a link, and that record the time at which
// the stream reaches a point.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace symm_overlap::cuda {

// Throws ValueError unless a tensor is a contiguous int64 tensor on a GPU with at least one element.
void check_clock(const at::Tensor& clock);

// See issue::Driver::pace. The first element of `link` is the GPU's time until which the link is busy.
void pace(const at::Tensor& link, int64_t ns);

// times[index] = the GPU's time in nanoseconds.
void stamp(const at::Tensor& times, int64_t index);

}  // namespace symm_overlap::cuda
