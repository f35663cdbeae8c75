#include "cuda/emulated_link.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "cuda/clock.h"

namespace symm_overlap::cuda {

EmulatedLink::EmulatedLink(const at::Tensor& clock, const at::Tensor& host, const at::Tensor& device, double in,
                           double out)
    : clock_(clock), host_(host), device_(device), in_(in), out_(out) {
  check_clock(clock);
  TORCH_CHECK_VALUE(in >= 0 && out >= 0, "a link copies 0 or more bytes for each byte, not ", in, " and ", out);
  TORCH_CHECK_VALUE(host.is_cpu() && device.device() == clock.device() && host.is_contiguous() &&
                        device.is_contiguous() && host.nbytes() > 0 && device.nbytes() > 0,
                    "a link needs contiguous memory on the host and on the GPU of its clock");
}

cudaError_t EmulatedLink::cross(size_t bytes, bool from_peer, cudaStream_t stream) const {
  auto left = static_cast<size_t>(static_cast<double>(bytes) * (from_peer ? in_ : out_));
  const size_t most = std::min(host_.nbytes(), device_.nbytes());
  cudaError_t error = cudaSuccess;
  while (left > 0 && error == cudaSuccess) {
    const size_t size = std::min(left, most);
    error = from_peer
                ? cudaMemcpyAsync(device_.mutable_data_ptr(), host_.const_data_ptr(), size, cudaMemcpyDefault, stream)
                : cudaMemcpyAsync(host_.mutable_data_ptr(), device_.const_data_ptr(), size, cudaMemcpyDefault, stream);
    left -= size;
  }
  return error;
}

void EmulatedLink::cross_on_current(size_t bytes, bool from_peer) const {
  const c10::cuda::CUDAGuard guard(clock_.device());
  C10_CUDA_CHECK(cross(bytes, from_peer, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace symm_overlap::cuda
