// For benchmarks: a link to peers that are only memory of the same GPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace symm_overlap::cuda {

// Copies between GPUs are made by a copy engine, beside all kernels. Copies within a GPU are not: CUDA makes them by a
// kernel, even if it is asked to let them overlap with other work (cudaMemcpyBatchAsync). On an H200, no block of that
// kernel found room beside a matmul of the library, so copies waited until a matmul ended, and the next matmul waited
// for the copies. But copies from and to host memory are made by copy engines, and share one link. So a copy across the
// emulated link is a copy of fewer bytes from or to host memory, which takes as long. It moves no data of the caller,
// and it reads and writes less of the GPU's memory than a copy across a real link would.
class EmulatedLink {
 public:
  // `clock`: one int64 of 0 on the GPU, see issue::Driver::pace. `host` and `device`: memory that copies read and
  // write, of any contents. `in` and `out`: the bytes that are copied from and to the host for each byte of a copy; 0:
  // the link has no pace, and copies are what they are.
  EmulatedLink(const at::Tensor& clock, const at::Tensor& host, const at::Tensor& device, double in, double out);

  const at::Tensor& clock() const { return clock_; }
  // Whether copies take the time that they take across the link. Otherwise they move their data.
  bool paces_copies() const { return in_ > 0 && !exact; }
  // Takes as long as a copy of that many bytes from a peer, or to a peer.
  cudaError_t cross(size_t bytes, bool from_peer, cudaStream_t stream) const;
  // The same on the current stream.
  void cross_on_current(size_t bytes, bool from_peer) const;

  bool exact = false;

 private:
  at::Tensor clock_, host_, device_;
  double in_, out_;
};

}  // namespace symm_overlap::cuda
