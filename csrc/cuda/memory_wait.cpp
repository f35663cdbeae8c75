#include "cuda/memory_wait.h"

#include <c10/cuda/CUDAException.h>
#include <cuda.h>

namespace symm_overlap::cuda {

namespace {

using BatchMemOp = CUresult (*)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);

// Not linked, but asked for: the module is imported where there is no driver too. Null where there is no such function.
BatchMemOp batch_mem_op() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    // Version 12 of the interface: the second one of these operations, which every device has.
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 12000, cudaEnableDefault, &result);
    (void)cudaGetLastError();
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<BatchMemOp>(found)
                                                                         : nullptr;
  }();
  return function;
}

CUresult enqueue(const std::vector<AwaitedWord>& words, cudaStream_t stream) {
  std::vector<CUstreamBatchMemOpParams> operations(words.size());
  for (size_t i = 0; i < words.size(); ++i) {
    operations[i].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    operations[i].waitValue.address = reinterpret_cast<CUdeviceptr>(words[i].word);
    operations[i].waitValue.value = words[i].epoch;
    operations[i].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;  // cyclic: (int32_t)(word - epoch) >= 0
  }
  return batch_mem_op()(stream, static_cast<unsigned int>(operations.size()), operations.data(), 0);
}

}  // namespace

bool can_wait_in_memory(uint32_t* zero, cudaStream_t stream) {
  return batch_mem_op() != nullptr && enqueue({{zero, 0}}, stream) == CUDA_SUCCESS;
}

void wait_in_memory(const std::vector<AwaitedWord>& words, cudaStream_t stream) {
  const CUresult result = enqueue(words, stream);
  TORCH_CHECK(result == CUDA_SUCCESS, "symm_overlap: cuStreamBatchMemOp failed with CUresult ", result);
}

}  // namespace symm_overlap::cuda
