// Functions that are not emulated, but that must exist so that the libraries of torch and Triton can be loaded. A call
// of one of them prints its name and ends the process. CUDA's headers are not included, as they declare other types.
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
