#include "cuda/launch.h"

#include <c10/util/Exception.h>
#include <cuda.h>

#include <variant>

namespace symm_overlap::cuda {

namespace {

// Looked up at run time and not linked, because the module is also imported on machines without a driver.
void* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  TORCH_CHECK(error == cudaSuccess && result == cudaDriverEntryPointSuccess,
              "symm_overlap: the CUDA driver has no function ", name, "; it must support CUDA 12");
  return found;
}

void check(CUresult result, const char* name) {
  TORCH_CHECK(result == CUDA_SUCCESS, "symm_overlap: ", name, " failed with CUresult ", result);
}

// As the launcher of Triton calls it: the copy unit fetches 128 bytes into the second-level cache, and elements beyond
// the edges of the matrix are 0.
CUtensorMap tensor_map(const issue::Matrix& matrix, void* address) {
  static const auto encode =
      reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(driver_function("cuTensorMapEncodeTiled"));
  CUtensorMap map;
  const cuuint32_t steps[] = {1, 1};
  const cuuint64_t sizes[] = {matrix.sizes[0], matrix.sizes[1]}, stride = matrix.stride;
  check(encode(&map, static_cast<CUtensorMapDataType>(matrix.element_type), 2, address, sizes, &stride,
               matrix.box.data(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(matrix.swizzle),
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  return map;
}

// Room for the value of one parameter, whatever its type. The driver knows how many bytes of it the kernel takes.
union Value {
  CUtensorMap map;
  void* address;
  int64_t number;
};

}  // namespace

void launch_kernel(const issue::Kernel& kernel, const std::vector<at::Tensor>& tensors, cudaStream_t stream) {
  static const auto launch = reinterpret_cast<decltype(&cuLaunchKernelEx)>(driver_function("cuLaunchKernelEx"));
  std::vector<Value> values(kernel.parameters.size());
  std::vector<void*> pointers;
  pointers.reserve(values.size());
  const auto address = [&](int tensor) { return const_cast<void*>(tensors.at(tensor).const_data_ptr()); };
  for (Value& value : values) {
    const issue::Parameter& parameter = kernel.parameters[pointers.size()];
    if (const auto* matrix = std::get_if<issue::Matrix>(&parameter)) {
      value.map = tensor_map(*matrix, address(matrix->tensor));
    } else if (const auto* pointer = std::get_if<issue::Address>(&parameter)) {
      value.address = address(pointer->tensor);
    } else {
      value.number = std::get<issue::Number>(parameter).value;
    }
    pointers.push_back(&value);
  }
  CUlaunchConfig shape{};
  shape.gridDimX = kernel.programs;
  shape.blockDimX = kernel.threads;
  shape.gridDimY = shape.gridDimZ = shape.blockDimY = shape.blockDimZ = 1;
  shape.sharedMemBytes = kernel.shared_bytes;
  shape.hStream = stream;
  check(launch(&shape, reinterpret_cast<CUfunction>(kernel.function), pointers.data(), nullptr), "cuLaunchKernelEx");
}

}  // namespace symm_overlap::cuda
