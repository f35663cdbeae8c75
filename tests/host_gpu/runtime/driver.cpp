// The driver: the lookup of its functions, and its contexts. torch looks up all functions that it may need at once. The
// lookup also succeeds for functions that are not emulated. A call of one of them prints its name and ends the process.
#include <dlfcn.h>

#include <array>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "common.h"

namespace host_gpu {

namespace {

constexpr size_t kMostAbsent = 64;
std::mutex absent_mutex;
std::array<std::string, kMostAbsent> absent_names;
size_t absent_count = 0;

template <size_t kIndex>
void absent() {
  stop("a call of %s, which is not imitated", absent_names[kIndex].c_str());
}

template <size_t... kIndices>
constexpr std::array<void (*)(), kMostAbsent> make_absent(std::index_sequence<kIndices...>) {
  return {&absent<kIndices>...};
}

void* absent_function(const char* name) {
  static constexpr auto functions = make_absent(std::make_index_sequence<kMostAbsent>());
  const std::lock_guard lock(absent_mutex);
  for (size_t i = 0; i < absent_count; ++i) {
    if (absent_names[i] == name) return reinterpret_cast<void*>(functions[i]);
  }
  if (absent_count == kMostAbsent) stop("too many functions of the driver that are not imitated: %s", name);
  absent_names[absent_count] = name;
  return reinterpret_cast<void*>(functions[absent_count++]);
}

// Returns the handle of this library, which also contains the driver's functions.
void* own_library() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&own_library), &info) == 0) stop("it does not find itself");
  return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

void* function_named(const char* name) {
  static void* library = own_library();
  for (const char* version : {"_v2", ""}) {
    if (void* found = dlsym(library, (std::string(name) + version).c_str())) return found;
  }
  return absent_function(name);
}

CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
}

}  // namespace

}  // namespace host_gpu

using namespace host_gpu;

CUDA_FUNCTION cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                           unsigned long long, cudaDriverEntryPointQueryResult* found) {
  *function = function_named(name);
  if (found != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

CUDA_FUNCTION CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuCtxSetCurrent(CUcontext context) {
  if (context != nullptr) set_current_device(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1);
  return CUDA_SUCCESS;
}

CUDA_FUNCTION CUresult cuGetErrorString(CUresult error, const char** text) {
  static thread_local std::string made;
  made = "CUresult " + std::to_string(static_cast<int>(error)) + " of the host GPU";
  *text = made.c_str();
  return CUDA_SUCCESS;
}
