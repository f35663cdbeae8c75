// What every part of the host GPU uses: how it ends, what it is told by the environment, errors and the current device.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <functional>

// A function of CUDA that this library has instead of CUDA. One that it does not have ends the process when it is
// called: the loader says which symbol is missing.
#define CUDA_FUNCTION extern "C" __attribute__((visibility("default")))

namespace host_gpu {

using Work = std::function<void()>;

// Ends the process with a message. For whatever CUDA leaves undefined, and for what is not imitated here: nothing may
// be ignored in silence, or a test that passes would say nothing.
[[noreturn]] void stop(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The number in an environment variable.
int setting(const char* name, int otherwise);

// The result of a call, kept for cudaGetLastError where it is an error.
cudaError_t result(cudaError_t error);

int device_count();
int current_device();
void set_current_device(int device);

// A thread that waits for a stream must not keep Python's lock: the work on the stream may itself be Python.
class WithoutPython {
 public:
  WithoutPython();
  ~WithoutPython();
  WithoutPython(const WithoutPython&) = delete;

 private:
  void* saved_ = nullptr;
};

}  // namespace host_gpu
