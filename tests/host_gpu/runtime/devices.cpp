// The devices and their attributes. They have the attributes of an H200, except for a small number of multiprocessors.
#include <cstdio>
#include <cstring>

#include "common.h"
#include "memory.h"

namespace host_gpu {

namespace {

constexpr int kVersion = 13000;
constexpr int kThreads = 1024;  // in a block
constexpr int kWarp = 32;
constexpr int kSharedMemory = 49152;
constexpr int kL2Bytes = 62914560;

// The number is small because a persistent kernel has a program for each, and an interpreter must run all of them.
int multiprocessors() {
  static const int count = setting("SYMM_OVERLAP_HOST_GPU_MULTIPROCESSORS", 4);
  return count;
}

// Returns 0 for attributes that are not listed: the device does not have the feature.
int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
      return kThreads;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return kSharedMemory;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 232448;
    case cudaDevAttrWarpSize:
      return kWarp;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrMemoryClockRate:
      return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 6144;
    case cudaDevAttrMultiProcessorCount:
      return multiprocessors();
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2 * kThreads;
    case cudaDevAttrL2CacheSize:
      return kL2Bytes;
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    case cudaDevAttrAsyncEngineCount:
      return 3;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanFlushRemoteWrites:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
      return 1;
    default:
      return 0;
  }
}

}  // namespace

}  // namespace host_gpu

using namespace host_gpu;

CUDA_FUNCTION cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return result(cudaErrorInvalidDevice);
  set_current_device(device);
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}

CUDA_FUNCTION CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = attribute(which);
  return CUDA_SUCCESS;
}

CUDA_FUNCTION cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::memset(properties, 0, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "NVIDIA H200 (host GPU)");
  properties->totalGlobalMem = total_memory();
  properties->sharedMemPerBlock = kSharedMemory;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->warpSize = kWarp;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = kThreads;
  properties->maxThreadsPerMultiProcessor = 2 * kThreads;
  properties->major = attribute(cudaDevAttrComputeCapabilityMajor);
  properties->multiProcessorCount = multiprocessors();
  properties->l2CacheSize = kL2Bytes;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->unifiedAddressing = properties->concurrentKernels = properties->canMapHostMemory = 1;
  properties->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount);
  properties->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  properties->pciBusID = 1 + device;
  for (int i = 0; i < 16; ++i) properties->uuid.bytes[i] = static_cast<char>(i + device);
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", 1 + device);
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
