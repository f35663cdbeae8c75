// Functions that are not imitated, and that libraries of torch and Triton need to be there when they are loaded. Each
// ends the process with its name when it is called. Without CUDA's headers, which say what they return.
#include <cstdio>
#include <cstdlib>

#define ABSENT(name)                                                              \
  extern "C" __attribute__((visibility("default"))) void name() {                 \
    std::fputs("host GPU: a call of " #name ", which is not imitated\n", stderr); \
    std::abort();                                                                 \
  }

ABSENT(__cudaInitModule)
ABSENT(cudaDeviceGetDefaultMemPool)
ABSENT(cudaFreeAsync)
ABSENT(cudaFuncSetAttribute)
ABSENT(cudaGetSymbolAddress)
ABSENT(cudaGraphDebugDotPrint)
ABSENT(cudaGraphNodeGetDependencies)
ABSENT(cudaIpcCloseMemHandle)
ABSENT(cudaIpcGetEventHandle)
ABSENT(cudaIpcGetMemHandle)
ABSENT(cudaIpcOpenEventHandle)
ABSENT(cudaIpcOpenMemHandle)
ABSENT(cudaLaunchCooperativeKernel)
ABSENT(cudaLaunchKernel)
ABSENT(cudaLaunchKernelExC)
ABSENT(cudaMallocAsync)
ABSENT(cudaMemcpyToSymbol)
ABSENT(cudaMemPoolGetAttribute)
ABSENT(cudaMemPoolSetAccess)
ABSENT(cudaMemPoolSetAttribute)
ABSENT(cudaMemPoolTrimTo)
ABSENT(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
ABSENT(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
ABSENT(cudaProfilerStart)
ABSENT(cudaProfilerStop)
ABSENT(cudaStreamAddCallback)
ABSENT(cudaStreamCreate)

ABSENT(cuCtxGetLimit)
ABSENT(cuCtxSetLimit)
ABSENT(cuDevicePrimaryCtxRetain)
ABSENT(cuFuncGetAttribute)
ABSENT(cuFuncSetAttribute)
ABSENT(cuFuncSetCacheConfig)
ABSENT(cuModuleGetFunction)
ABSENT(cuModuleLoadData)
