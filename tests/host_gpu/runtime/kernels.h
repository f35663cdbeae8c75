// The function that registers the host forms of kernels; see tests/host_gpu/kernels.
#pragma once

#include <functional>

namespace host_gpu {

// Creates the work of one launch from its grid, its block and its arguments, which are copied.
using Launch = std::function<void()> (*)(unsigned blocks, unsigned threads, void** arguments);

}  // namespace host_gpu

// Registers `launch` for every kernel whose mangled name contains both strings.
extern "C" __attribute__((visibility("default"))) void host_gpu_register(const char* scope, const char* name,
                                                                         host_gpu::Launch launch);
