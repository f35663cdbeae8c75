#include "cuda/memory_operations.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda.h>

#include <algorithm>
#include <cstdlib>

namespace symm_overlap::cuda {

namespace {

using BatchMemOp = CUresult (*)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);

constexpr size_t kMostInABatch = 255;
constexpr int kQueues = 8;  // hardware queues that streams share by default; see CUDA_DEVICE_MAX_CONNECTIONS

// Looked up at run time and not linked, because the module is also imported on machines without a driver. Null if the
// driver has no such function.
BatchMemOp batch_mem_op() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    // Version 12 of the interface: the second version of these operations, which is not disabled by default.
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 12000, cudaEnableDefault, &result);
    (void)cudaGetLastError();
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<BatchMemOp>(found)
                                                                         : nullptr;
  }();
  return function;
}

// A write has a fence at system scope before it. This is the default.
CUstreamBatchMemOpParams parameters(const MemoryOperation& operation, uint32_t* block, bool flush) {
  const auto address = reinterpret_cast<CUdeviceptr>(block + operation.word);
  CUstreamBatchMemOpParams made{};
  if (operation.kind == MemoryOperation::kWait32) {
    made.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    made.waitValue.address = address;
    made.waitValue.value = static_cast<uint32_t>(operation.value);
    // Cyclic: (int32_t)(word - value) >= 0.
    made.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ | (flush ? CU_STREAM_WAIT_VALUE_FLUSH : 0u);
  } else if (operation.kind == MemoryOperation::kWrite64) {
    made.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    made.writeValue.address = address;
    made.writeValue.value64 = operation.value;
  } else {
    made.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    made.writeValue.address = address;
    made.writeValue.value = static_cast<uint32_t>(operation.value);
  }
  return made;
}

CUresult try_enqueue(std::vector<CUstreamBatchMemOpParams>& operations, cudaStream_t stream) {
  for (size_t first = 0; first < operations.size(); first += kMostInABatch) {
    const auto count = static_cast<unsigned int>(std::min(kMostInABatch, operations.size() - first));
    const CUresult result = batch_mem_op()(stream, count, operations.data() + first, 0);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

// A wait by a memory operation blocks its whole queue, and so the other streams in this queue. A waiting kernel does
// not. Plans are issued in an order in which this is no deadlock, but with few queues little would overlap.
bool has_enough_queues() {
  const char* set = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return set == nullptr || std::atoi(set) >= kQueues;
}

cudaError_t ask_for_flush(int device, int* can) {
  return cudaDeviceGetAttribute(can, cudaDevAttrCanFlushRemoteWrites, device);
}

bool works_on(uint32_t* word, bool flush) {
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return false;
  // The wait is for a value that was just written, so that this ends or fails, whatever the operations do.
  std::vector<CUstreamBatchMemOpParams> operations{
      parameters({MemoryOperation::kWrite64, 0, 0, uint64_t{1} << 32}, word, flush),
      parameters({MemoryOperation::kWrite32, 0, 0, 1}, word, flush),
      parameters({MemoryOperation::kWait32, 0, 0, 0xFFFFFFFFu}, word, flush)};
  const bool done = try_enqueue(operations, stream) == CUDA_SUCCESS && cudaStreamSynchronize(stream) == cudaSuccess;
  (void)cudaStreamDestroy(stream);
  return done && word[0] == 1 && word[1] == 1;
}

}  // namespace

bool can_flush(int device) {
  int can = 0;
  C10_CUDA_CHECK(ask_for_flush(device, &can));
  return can != 0;
}

bool has_memory_operations(int device) {
  if (batch_mem_op() == nullptr || !has_enough_queues()) return false;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  void* memory = nullptr;
  int flush = 0;
  bool works = false;
  if (ask_for_flush(device, &flush) == cudaSuccess &&
      cudaHostAlloc(&memory, 2 * sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable) == cudaSuccess) {
    static_cast<uint64_t*>(memory)[0] = 0;
    void* word = nullptr;
    works = cudaHostGetDevicePointer(&word, memory, 0) == cudaSuccess && word == memory &&
            works_on(static_cast<uint32_t*>(word), flush != 0);
    (void)cudaFreeHost(memory);
  }
  (void)cudaGetLastError();  // whatever failed, kernels will wait instead
  return works;
}

void PendingOperations::add(const MemoryOperations& operations, const std::vector<uint32_t*>& blocks, bool flush) {
  for (const MemoryOperation& each : operations) operations_.push_back(parameters(each, blocks[each.rank], flush));
}

void PendingOperations::enqueue(cudaStream_t stream) {
  if (operations_.empty()) return;
  const CUresult result = try_enqueue(operations_, stream);
  operations_.clear();
  TORCH_CHECK(result == CUDA_SUCCESS, "symm_overlap: cuStreamBatchMemOp failed with CUresult ", result);
}

}  // namespace symm_overlap::cuda
