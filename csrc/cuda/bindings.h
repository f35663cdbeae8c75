// The Python bindings of csrc/cuda, besides the torch ops of ops.cpp: among others _C.CudaLane and _C.new_cuda_stream.
#pragma once

#include <pybind11/pybind11.h>

namespace symm_overlap::cuda {

void register_cuda(pybind11::module_& module);

}  // namespace symm_overlap::cuda
