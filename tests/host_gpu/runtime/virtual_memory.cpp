// Memory that processes share, on which torch's symmetric memory is built. Physical memory is an anonymous file whose
// descriptor is sent to other processes, and mapping the memory maps the file.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>

#include "memory.h"
#include "streams.h"

namespace host_gpu {

namespace {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr int kNoFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

struct Physical {
  int file;
  std::atomic<int> users{1};
};

std::mutex mutex;
std::map<CUdeviceptr, Physical*> mapped;

Physical* physical_of(CUmemGenericAllocationHandle handle) {
  return reinterpret_cast<Physical*>(handle);
}

CUmemGenericAllocationHandle handle_of(int file) {
  return reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{file});
}

void* pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

}  // namespace

}  // namespace host_gpu

using namespace host_gpu;

CUDA_FUNCTION CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                                     CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                                   unsigned long long) {
  if (bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  const int file = memfd_create("host_gpu", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = handle_of(file);
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Physical* physical = physical_of(handle);
  if (--physical->users == 0) {
    close(physical->file);
    delete physical;
  }
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuMemExportToShareableHandle(void* file, CUmemGenericAllocationHandle handle,
                                                    CUmemAllocationHandleType type, unsigned long long) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  *static_cast<int*>(file) = fcntl(physical_of(handle)->file, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* given,
                                                      CUmemAllocationHandleType) {
  const int file = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(given)), F_DUPFD_CLOEXEC, 0);
  if (file < 0) return CUDA_ERROR_INVALID_VALUE;
  *handle = handle_of(file);
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr,
                                           unsigned long long) {
  void* start = mmap(nullptr, bytes + kGranularity, PROT_NONE, kNoFlags, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = (reinterpret_cast<CUdeviceptr>(start) + kGranularity - 1) / kGranularity * kGranularity;
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  munmap(pointer(address), bytes);
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                                unsigned long long) {
  Physical* physical = physical_of(handle);
  void* start = mmap(pointer(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->file,
                     static_cast<off_t>(offset));
  if (start == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  ++physical->users;
  add_memory(start, bytes, Kind::kDevice);
  const std::lock_guard lock(mutex);
  mapped[address] = physical;
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  drain_device();
  if (!remove_memory(pointer(address), Kind::kDevice)) return CUDA_ERROR_INVALID_VALUE;
  mmap(pointer(address), bytes, PROT_NONE, kNoFlags | MAP_FIXED, -1, 0);
  Physical* physical = nullptr;
  {
    const std::lock_guard lock(mutex);
    physical = mapped.at(address);
    mapped.erase(address);
  }
  return cuMemRelease(reinterpret_cast<CUmemGenericAllocationHandle>(physical));
}

CUDA_FUNCTION CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  const std::lock_guard lock(mutex);
  const auto at = mapped.find(reinterpret_cast<CUdeviceptr>(address));
  if (at == mapped.end()) return CUDA_ERROR_INVALID_VALUE;
  ++at->second->users;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(at->second);
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* bytes, CUdeviceptr address) {
  Memory memory;
  if (!find_memory(pointer(address), &memory)) return CUDA_ERROR_INVALID_VALUE;
  if (start != nullptr) *start = reinterpret_cast<CUdeviceptr>(memory.start);
  if (bytes != nullptr) *bytes = memory.size;
  return CUDA_SUCCESS;
}
