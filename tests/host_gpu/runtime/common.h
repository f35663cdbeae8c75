// Functions that all parts of the host GPU use: fatal errors, environment variables, results and the current device.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <functional>

// Marks a function that replaces CUDA's. If this library lacks a function, a call of it ends the process, and the
// loader prints the missing symbol.
#define CUDA_FUNCTION extern "C" __attribute__((visibility("default")))

namespace host_gpu {

using Work = std::function<void()>;

// Prints a message and ends the process. For behaviour that CUDA leaves undefined, and for features that are not
// emulated. They must not be ignored silently, because then a passing test would prove nothing.
[[noreturn]] void stop(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Returns the number in an environment variable, or `otherwise` if the variable is not set.
int setting(const char* name, int otherwise);

// Returns the result of a call. An error is also kept for cudaGetLastError.
cudaError_t result(cudaError_t error);

// True once a kernel's assertion has failed. From then on, calls that ask about streams return its error.
bool has_failed();

int device_count();
int current_device();
void set_current_device(int device);

// Releases Python's lock. A thread that waits for a stream must not hold it, because the stream may run Python code.
class WithoutPython {
 public:
  WithoutPython();
  ~WithoutPython();
  WithoutPython(const WithoutPython&) = delete;

 private:
  void* saved_ = nullptr;
};

}  // namespace host_gpu
