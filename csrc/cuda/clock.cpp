#include "cuda/clock.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/kernels.h"

namespace symm_overlap::cuda {

void check_clock(const at::Tensor& clock) {
  TORCH_CHECK_VALUE(clock.is_cuda() && clock.is_contiguous() && clock.scalar_type() == at::kLong && clock.numel() > 0,
                    "times of a GPU are contiguous int64 on it; got ", clock.toString(), " of ", clock.numel());
}

void pace(const at::Tensor& link, int64_t ns) {
  check_clock(link);
  TORCH_CHECK_VALUE(ns >= 0, "the time for which a link is busy must be 0 ns or more, not ", ns);
  const c10::cuda::CUDAGuard guard(link.device());
  C10_CUDA_CHECK(launch_pace(reinterpret_cast<uint64_t*>(link.data_ptr()), ns, c10::cuda::getCurrentCUDAStream()));
}

void stamp(const at::Tensor& times, int64_t index) {
  check_clock(times);
  TORCH_CHECK_INDEX(index >= 0 && index < times.numel(), "there are ", times.numel(), " times, and no ", index);
  const c10::cuda::CUDAGuard guard(times.device());
  C10_CUDA_CHECK(launch_stamp(times.data_ptr<int64_t>() + index, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace symm_overlap::cuda
