// What the host forms of kernels are registered by; see tests/host_gpu/kernels.
#pragma once

#include <functional>

namespace host_gpu {

// Makes the work of one launch out of its grid, its block and its arguments, which it copies.
using Launch = std::function<void()> (*)(unsigned blocks, unsigned threads, void** arguments);

}  // namespace host_gpu

// Every kernel whose mangled name contains both strings is launched so.
extern "C" __attribute__((visibility("default"))) void host_gpu_register(const char* scope, const char* name,
                                                                         host_gpu::Launch launch);
