// Python bindings. Pointers and numbers in, no policy: that lives in symm_overlap/.
#include <torch/extension.h>

#include "cpu/allocator.h"
#include "cpu/deadline.h"
#include "cpu/reduce.h"
#include "cpu/shared_object.h"
#ifdef SYMM_OVERLAP_WITH_CUDA
#include "cuda/bindings.h"
#endif

namespace cpu = symm_overlap::cpu;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  cpu::register_cpu_allocator();

  m.def("shm_dir", &cpu::shm_dir);
  m.def("thread_timeout_ms", &cpu::thread_timeout_ms);
  m.def("set_thread_timeout_ms", &cpu::set_thread_timeout_ms);
  m.def("timeout_ms_or_default", &cpu::timeout_ms_or_default);
  m.def("reduce", &cpu::reduce, py::call_guard<py::gil_scoped_release>());
  // Whether this tensor's memory was already rendezvoused in this group; local, no communication.
  m.def("has_rendezvoused", [](const at::Tensor& tensor, const std::string& group_name) {
    return cpu::cpu_allocator().find(tensor.storage().mutable_data(), group_name).get() != nullptr;
  });
#ifdef SYMM_OVERLAP_WITH_CUDA
  symm_overlap::cuda::register_cuda(m);
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
}
