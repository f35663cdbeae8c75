#include "cuda/pinned_blocks.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstring>
#include <utility>

#include "cpu/shared_object.h"

namespace symm_overlap::cuda {

namespace {

uint32_t* as_gpu_addresses(void* memory) {
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, memory, 0));
  return static_cast<uint32_t*>(address);
}

void pin(void* memory, size_t bytes) {
  const cudaError_t error = cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  TORCH_CHECK(error == cudaSuccess, "shared memory cannot be pinned for the GPU: ", cudaGetErrorString(error));
}

}  // namespace

std::string pinning_refused(int device) {
  try {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    const auto memory = cpu::SharedObject::create(sizeof(uint32_t), "memory to try pinning");
    pin(memory.data(), memory.bytes());
    (void)cudaHostUnregister(memory.data());
    return "";
  } catch (const c10::Error& error) {
    (void)cudaGetLastError();  // cleared, so that no later CUDA call reports it
    return error.what_without_backtrace();
  }
}

PinnedBlocks::PinnedBlocks(const ControlBlock& block, int rank) : on_host_(block.world), on_device_(block.world) {
  void* memory = nullptr;
  const size_t bytes = block.words() * sizeof(uint32_t);
  C10_CUDA_CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(memory, 0, bytes);
  on_host_[rank] = static_cast<uint32_t*>(memory);
  on_device_[rank] = as_gpu_addresses(memory);
}

PinnedBlocks::PinnedBlocks(c10::intrusive_ptr<cpu::CpuSymmetricMemory> shared) : shared_(std::move(shared)) {
  try {
    for (void* memory : shared_->get_buffer_ptrs()) {
      pin(memory, shared_->get_buffer_size());
      on_host_.push_back(static_cast<uint32_t*>(memory));
      on_device_.push_back(as_gpu_addresses(memory));
    }
  } catch (...) {
    unpin();
    throw;
  }
}

PinnedBlocks::PinnedBlocks(std::vector<at::Tensor> pinned) : pinned_(std::move(pinned)) {
  for (const at::Tensor& block : pinned_) {
    on_host_.push_back(static_cast<uint32_t*>(block.mutable_data_ptr()));
    on_device_.push_back(as_gpu_addresses(on_host_.back()));
  }
}

PinnedBlocks::~PinnedBlocks() {
  unpin();
}

// Errors are ignored: at exit the driver and its memory may already be gone.
void PinnedBlocks::unpin() noexcept {
  for (uint32_t* memory : on_host_) {
    if (memory == nullptr || !pinned_.empty()) continue;
    (void)(shared() ? cudaHostUnregister(memory) : cudaFreeHost(memory));
  }
  (void)cudaGetLastError();
}

}  // namespace symm_overlap::cuda
