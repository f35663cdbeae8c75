#include "cuda/flags.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/memory_operations.h"

namespace symm_overlap::cuda {

namespace {

void check_words(const at::Tensor& words, int64_t least, const char* what) {
  TORCH_CHECK_VALUE(words.is_contiguous() && words.scalar_type() == at::kInt && words.numel() >= least, "the ", what,
                    " must be at least ", least, " contiguous int32; got ", words.toString(), " of ", words.numel());
}

uint32_t* on_device(const at::Tensor& pinned) {
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, pinned.data_ptr(), 0));
  return static_cast<uint32_t*>(address);
}

}  // namespace

CudaFlags::CudaFlags(const at::Tensor& status, const at::Tensor& record, bool in_memory)
    : status_(status), record_(record), in_memory_(in_memory) {
  check_words(status, kFlagLine, "status line");
  check_words(record, kRecordWords, "record");
  TORCH_CHECK_VALUE(status.is_cuda() && record.is_cpu(), "the status line is in GPU memory and the record in pinned ",
                    "memory; got ", status.toString(), " and ", record.toString());
  const c10::cuda::CUDAGuard guard(status.device());
  C10_CUDA_CHECK(load_flag_kernels());
  record_on_device_ = on_device(record);
}

void CudaFlags::use(const at::Tensor& words) {
  check_words(words, 0, "flags");
  TORCH_CHECK_VALUE(words.device() == status_.device(), "the flags must be on ", status_.device(), " like the status");
  words_ = words;
  count_ = words.numel() / kFlagLine;
}

uint32_t* CudaFlags::flag(int chunk) const {
  TORCH_CHECK_INDEX(chunk >= 0 && chunk < count_, "symm_overlap: there are ", count_, " flags, and no ", chunk);
  return static_cast<uint32_t*>(words_.data_ptr()) + static_cast<size_t>(chunk) * kFlagLine;
}

void CudaFlags::begin(int64_t caller) {
  caller_ = static_cast<uint32_t>(caller);
  ++epoch_;
}

void CudaFlags::raise(int chunk, PendingOperations& pending) {
  uint32_t* const word = flag(chunk);
  if (in_memory_) return pending.add({{MemoryOperation::kWrite32, 0, 0, epoch_}}, {word}, false);
  const c10::cuda::CUDAGuard guard(status_.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  pending.enqueue(stream);
  C10_CUDA_CHECK(launch_raise_flag(word, status(), stream));
}

// There is no deadline: a kernel of this rank that computes chunks does not wait for other ranks, so it always ends.
void CudaFlags::await(int chunk, PendingOperations& pending) {
  uint32_t* const word = flag(chunk);
  if (in_memory_) return pending.add({{MemoryOperation::kWait32, 0, 0, epoch_}}, {word}, false);
  const c10::cuda::CUDAGuard guard(status_.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  pending.enqueue(stream);
  C10_CUDA_CHECK(launch_await_flag(word, status(), stream));
}

void CudaFlags::raise(int chunk) {
  PendingOperations pending;
  raise(chunk, pending);
  pending.enqueue(c10::cuda::getCurrentCUDAStream(status_.device().index()));
}

void CudaFlags::await(int chunk) {
  PendingOperations pending;
  await(chunk, pending);
  pending.enqueue(c10::cuda::getCurrentCUDAStream(status_.device().index()));
}

UsedFlags CudaFlags::used() const {
  return {status(), record_on_device_, caller_, 1};
}

void CudaFlags::give_up() {
  const c10::cuda::CUDAGuard guard(status_.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (!in_memory_) {
    C10_CUDA_CHECK(launch_give_up_flags(status(), stream));
    return;
  }
  // The status first: what goes on because its flag is up then finds that the call has failed.
  MemoryOperations operations{{MemoryOperation::kWrite32, 0, 0, kFlagsAbandoned}};
  for (int64_t chunk = 0; chunk < count_; ++chunk) {
    operations.push_back({MemoryOperation::kWrite32, 1, static_cast<size_t>(chunk) * kFlagLine, epoch_});
  }
  PendingOperations pending;
  pending.add(operations, {status(), static_cast<uint32_t*>(words_.data_ptr())}, false);
  pending.enqueue(stream);
}

}  // namespace symm_overlap::cuda
