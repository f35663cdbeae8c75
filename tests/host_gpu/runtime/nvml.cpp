// The library that monitors GPUs (libnvidia-ml.so.1). torch uses it to count GPUs and to find their links. There are no
// links.
#include <cstdlib>

#define NVML_FUNCTION extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;

}  // namespace

NVML_FUNCTION int nvmlInit() {
  return kSuccess;
}

NVML_FUNCTION int nvmlInit_v2() {
  return kSuccess;
}

NVML_FUNCTION int nvmlDeviceGetCount_v2(unsigned* count) {
  const char* value = std::getenv("SYMM_OVERLAP_HOST_GPU_DEVICES");
  *count = value == nullptr ? 1 : static_cast<unsigned>(std::atoi(value));
  return kSuccess;
}

NVML_FUNCTION int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  static char any;
  *device = &any;
  return kSuccess;
}

NVML_FUNCTION int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, unsigned*) {
  return kNotSupported;
}

NVML_FUNCTION int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) {
  return kNotSupported;
}

NVML_FUNCTION int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}

NVML_FUNCTION int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}

// Leaves the information unset, which means that there is no fabric.
NVML_FUNCTION int nvmlDeviceGetGpuFabricInfoV(void*, void*) {
  return kSuccess;
}
