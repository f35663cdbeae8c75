// Allocation of device memory and of pinned memory.
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "graphs.h"

namespace host_gpu {

namespace {

constexpr size_t kTotal = size_t{8} << 30;
constexpr size_t kFilled = size_t{1} << 20;
constexpr int kGarbage = 0xA5;

struct Table {
  std::mutex mutex;
  std::map<uintptr_t, Memory> all;  // by start address
  size_t used = 0;                  // bytes of the device that cudaMalloc has allocated
};

Table& table() {
  static auto* made = new Table;
  return *made;
}

size_t mapped_size(size_t bytes) {
  return std::max<size_t>(bytes, 1);
}

void* map(size_t bytes) {
  void* start =
      mmap(nullptr, mapped_size(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? nullptr : start;
}

// Waits for the whole device before it frees memory, as CUDA does.
cudaError_t free(void* start, Kind kind) {
  drain_device();
  Memory memory;
  if (!find_memory(start, &memory) || !remove_memory(start, kind)) return cudaErrorInvalidValue;
  munmap(start, mapped_size(memory.size));
  return cudaSuccess;
}

}  // namespace

void add_memory(void* start, size_t size, Kind kind) {
  const std::lock_guard lock(table().mutex);
  table().all[reinterpret_cast<uintptr_t>(start)] = {static_cast<char*>(start), size, current_device(), kind};
}

bool remove_memory(void* start, Kind kind) {
  const std::lock_guard lock(table().mutex);
  const auto at = table().all.find(reinterpret_cast<uintptr_t>(start));
  if (at == table().all.end() || at->second.kind != kind) return false;
  table().all.erase(at);
  return true;
}

bool find_memory(const void* address, Memory* found) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(table().mutex);
  auto behind = table().all.upper_bound(at);
  if (behind == table().all.begin()) return false;
  const Memory& memory = std::prev(behind)->second;
  if (at >= reinterpret_cast<uintptr_t>(memory.start) + mapped_size(memory.size)) return false;
  *found = memory;
  return true;
}

void check_bounds(const void* address, size_t bytes, const char* access) {
  Memory memory;
  if (!find_memory(address, &memory)) return;
  const auto offset = static_cast<size_t>(static_cast<const char*>(address) - memory.start);
  if (offset + bytes <= memory.size) return;
  stop("%s of %zu bytes from byte %zu of memory of %zu bytes", access, bytes, offset, memory.size);
}

size_t total_memory() {
  return kTotal;
}

}  // namespace host_gpu

using namespace host_gpu;

CUDA_FUNCTION cudaError_t cudaMalloc(void** made, size_t bytes) {
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  {
    const std::lock_guard lock(table().mutex);
    if (table().used + bytes > kTotal) return result(cudaErrorMemoryAllocation);
    table().used += bytes;
  }
  *made = map(bytes);
  if (*made == nullptr) return result(cudaErrorMemoryAllocation);
  add_memory(*made, bytes, Kind::kDevice);
  std::memset(*made, kGarbage, std::min(bytes, kFilled));  // new memory of a GPU is not zero
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaFree(void* start) {
  if (start == nullptr) return cudaSuccess;
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  Memory memory;
  const bool known = find_memory(start, &memory);
  const cudaError_t error = free(start, Kind::kDevice);
  if (known && error == cudaSuccess) {
    const std::lock_guard lock(table().mutex);
    table().used -= memory.size;
  }
  return result(error);
}

CUDA_FUNCTION cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard lock(table().mutex);
  *total = kTotal;
  *free = kTotal - table().used;
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaHostAlloc(void** made, size_t bytes, unsigned) {
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  *made = map(bytes);
  if (*made == nullptr) return result(cudaErrorMemoryAllocation);
  add_memory(*made, bytes, Kind::kHost);
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaFreeHost(void* start) {
  if (start == nullptr) return cudaSuccess;
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  return result(free(start, Kind::kHost));
}

CUDA_FUNCTION cudaError_t cudaHostRegister(void* start, size_t bytes, unsigned) {
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  // Some machines reject this, and the project must work without it. The variable lets tests emulate such a machine.
  static const bool refused = setting("SYMM_OVERLAP_HOST_GPU_NO_REGISTER", 0) != 0;
  if (refused) return result(cudaErrorNotSupported);
  Memory memory;
  if (find_memory(start, &memory)) return result(cudaErrorHostMemoryAlreadyRegistered);
  add_memory(start, bytes, Kind::kRegistered);
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaHostUnregister(void* start) {
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  drain_device();
  return remove_memory(start, Kind::kRegistered) ? cudaSuccess : result(cudaErrorHostMemoryNotRegistered);
}

CUDA_FUNCTION cudaError_t cudaHostGetDevicePointer(void** pointer, void* address, unsigned) {
  Memory memory;
  if (!find_memory(address, &memory) || memory.kind == Kind::kDevice) return result(cudaErrorInvalidValue);
  *pointer = address;
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->hostPointer = const_cast<void*>(address);
  Memory memory;
  if (!find_memory(address, &memory)) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    return cudaSuccess;
  }
  const bool on_device = memory.kind == Kind::kDevice;
  attributes->type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = memory.device;
  attributes->devicePointer = const_cast<void*>(address);
  if (on_device) attributes->hostPointer = nullptr;
  return cudaSuccess;
}
