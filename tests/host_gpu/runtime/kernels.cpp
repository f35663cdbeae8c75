// Kernels: their registration by nvcc's host code when a library is loaded, and their launches. A kernel runs in its
// host form, which g++ compiled from the same source. A launch of a kernel without a host form ends the process.
#include "kernels.h"

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "graphs.h"

namespace host_gpu {

namespace {

struct Form {
  std::string scope;
  std::string name;
  Launch launch;
};

struct Kernel {
  std::string name;
  Launch launch = nullptr;
  bool loaded = false;
};

struct Kernels {
  std::mutex mutex;
  std::map<const void*, Kernel> all;  // by the address of the host function that represents the kernel
  std::vector<Form> forms;
};

Kernels& kernels() {
  static auto* made = new Kernels;
  return *made;
}

void give_form(Kernel& kernel, const Form& form) {
  const bool fits =
      kernel.name.find(form.scope) != std::string::npos && kernel.name.find(form.name) != std::string::npos;
  if (fits) kernel.launch = form.launch;
}

Kernel* find_kernel(const void* function) {
  const std::lock_guard lock(kernels().mutex);
  const auto at = kernels().all.find(function);
  return at == kernels().all.end() ? nullptr : &at->second;
}

// CUDA loads a kernel's code when it is first used, and may wait until nothing runs on the device. Here, loading always
// waits.
void load(Kernel& kernel) {
  if (kernel.loaded) return;
  kernel.loaded = true;
  drain_device();
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, cudaStream_t handle) {
  Kernel* kernel = find_kernel(function);
  if (kernel == nullptr) return result(cudaErrorInvalidDeviceFunction);
  if (grid.x == 0 || block.x == 0 || block.x > 1024) return result(cudaErrorInvalidConfiguration);
  if (kernel->launch == nullptr) stop("a launch of %s, which has no host form", kernel->name.c_str());
  if (grid.y * grid.z * block.y * block.z != 1) stop("%s: grids of several dimensions", kernel->name.c_str());
  Stream& stream = stream_of(handle);
  if (stream.capture != nullptr && !kernel->loaded) {
    stop("%s is captured before its code was loaded", kernel->name.c_str());
  }
  load(*kernel);
  return enqueue(handle, kernel->launch(grid.x, block.x, arguments));
}

}  // namespace

}  // namespace host_gpu

using namespace host_gpu;

void host_gpu_register(const char* scope, const char* name, Launch launch) {
  const std::lock_guard lock(kernels().mutex);
  kernels().forms.push_back({scope, name, launch});
  for (auto& [function, kernel] : kernels().all) give_form(kernel, kernels().forms.back());
}

CUDA_FUNCTION void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}

CUDA_FUNCTION void __cudaRegisterFatBinaryEnd(void**) {}

CUDA_FUNCTION void __cudaUnregisterFatBinary(void**) {}

CUDA_FUNCTION void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*,
                                          dim3*, dim3*, int*) {
  const std::lock_guard lock(kernels().mutex);
  Kernel kernel;
  kernel.name = name;
  for (const Form& form : kernels().forms) give_form(kernel, form);
  kernels().all[function] = kernel;
}

// Device variables are registered and otherwise ignored. No code that runs here reads one, and the function that
// returns the address of a variable is not emulated.
CUDA_FUNCTION void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

// A launch in nvcc's host code pushes the configuration in <<<...>>>. The kernel's host function pops it.
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local std::vector<Configuration> configurations;

CUDA_FUNCTION unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

CUDA_FUNCTION cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t,
                                             cudaStream_t stream) {
  return launch(kernel, grid, block, arguments, stream);
}

CUDA_FUNCTION cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  Kernel* kernel = find_kernel(function);
  if (kernel == nullptr) return result(cudaErrorInvalidDeviceFunction);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  load(*kernel);
  return cudaSuccess;
}
