// Stream memory operations: a stream writes a word, or waits until a word has reached a value.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace host_gpu {

namespace {

std::atomic<int> calls{0};
constexpr unsigned kMost = 256;
constexpr auto kPoll = std::chrono::microseconds(20);

template <typename Word>
std::atomic_ref<Word> word(CUdeviceptr address) {
  return std::atomic_ref<Word>(*reinterpret_cast<Word*>(address));
}

// The comparison is cyclic, as in CUDA.
void wait(const CUstreamBatchMemOpParams& operation) {
  const uint32_t value = static_cast<uint32_t>(operation.waitValue.value);
  while (static_cast<int32_t>(word<uint32_t>(operation.waitValue.address).load() - value) < 0) {
    std::this_thread::sleep_for(kPoll);
  }
}

void perform(const CUstreamBatchMemOpParams& operation) {
  switch (operation.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
      return wait(operation);
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
      return word<uint32_t>(operation.writeValue.address).store(static_cast<uint32_t>(operation.writeValue.value));
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
      return word<uint64_t>(operation.writeValue.address).store(operation.writeValue.value64);
    default:
      stop("memory operation %d is not imitated", static_cast<int>(operation.operation));
  }
}

void check(const CUstreamBatchMemOpParams& operation) {
  Memory memory;
  const auto* address = reinterpret_cast<const void*>(operation.waitValue.address);  // same offset in all kinds
  if (!find_memory(address, &memory)) stop("a memory operation on %p, which CUDA does not know", address);
  check_bounds(address, operation.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64 ? 8 : 4, "a memory operation");
  const unsigned compares = operation.waitValue.flags & ~static_cast<unsigned>(CU_STREAM_WAIT_VALUE_FLUSH);
  if (operation.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 && compares != CU_STREAM_WAIT_VALUE_GEQ) {
    stop("a wait with flags %u is not imitated", operation.waitValue.flags);
  }
}

}  // namespace

}  // namespace host_gpu

using namespace host_gpu;

// Returns how often this process has enqueued memory operations since it was last asked.
CUDA_FUNCTION int host_gpu_memory_operation_calls() {
  return calls.exchange(0);
}

CUDA_FUNCTION CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations,
                                             unsigned) {
  if (stream_of(stream).capture != nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (count > kMost) return CUDA_ERROR_INVALID_VALUE;
  const std::vector<CUstreamBatchMemOpParams> batch(operations, operations + count);
  for (const auto& operation : batch) check(operation);
  ++calls;
  (void)enqueue(stream, [batch] {
    for (const auto& operation : batch) perform(operation);
  });
  return CUDA_SUCCESS;
}
