#include "common.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace host_gpu {

namespace {

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<bool> failed = false;

// Finds a function by its name. Python is not linked, because the process may or may not contain it.
template <typename Function>
Function find(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

bool holds_python() {
  static const auto initialised = find<int (*)()>("Py_IsInitialized");
  static const auto check = find<int (*)()>("PyGILState_Check");
  return initialised != nullptr && check != nullptr && initialised() != 0 && check() != 0;
}

}  // namespace

void stop(const char* format, ...) {
  std::fputs("host GPU: ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputs("\n", stderr);
  std::abort();
}

int setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

bool has_failed() {
  return failed;
}

int device_count() {
  static const int count = setting("SYMM_OVERLAP_HOST_GPU_DEVICES", 1);
  return count;
}

int current_device() {
  return device;
}

void set_current_device(int chosen) {
  device = chosen;
}

WithoutPython::WithoutPython() {
  static const auto save = find<void* (*)()>("PyEval_SaveThread");
  if (holds_python()) saved_ = save();
}

WithoutPython::~WithoutPython() {
  static const auto restore = find<void (*)(void*)>("PyEval_RestoreThread");
  if (saved_ != nullptr) restore(saved_);
}

}  // namespace host_gpu

using host_gpu::last_error;

CUDA_FUNCTION void host_gpu_fail() {
  host_gpu::failed = true;
}

CUDA_FUNCTION cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

CUDA_FUNCTION cudaError_t cudaPeekAtLastError() {
  return last_error;
}

CUDA_FUNCTION const char* cudaGetErrorName(cudaError_t error) {
  static thread_local char text[64];
  std::snprintf(text, sizeof text, "cudaError %d", static_cast<int>(error));
  return text;
}

CUDA_FUNCTION const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[64];
  std::snprintf(text, sizeof text, "error %d of the host GPU", static_cast<int>(error));
  return text;
}
