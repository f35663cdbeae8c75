// Python bindings. They pass pointers and numbers and decide nothing: all policy is in symm_overlap/.
#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "common/different_call.h"
#include "cpu/allocator.h"
#include "cpu/arguments.h"
#include "cpu/copy.h"
#include "cpu/counted.h"
#include "cpu/deadline.h"
#include "cpu/driver.h"
#include "cpu/lane.h"
#include "cpu/matmul.h"
#include "cpu/meeting.h"
#include "cpu/output_memory.h"
#include "cpu/reduce.h"
#include "cpu/rendezvous.h"
#include "cpu/shared_object.h"
#include "cpu/without_gil.h"
#include "issue/bindings.h"
#include "issue/compute.h"
#ifdef SYMM_OVERLAP_WITH_CUDA
#include "cuda/bindings.h"
#endif

namespace cpu = symm_overlap::cpu;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  cpu::register_cpu_allocator();
  cpu::onednn_is_quicker();  // tests oneDNN now, while no dispatch mode of torch can interfere

  m.def("argument_key", &cpu::argument_key);
  m.def("call_key", &cpu::call_key);
  m.def("kernel_key", &cpu::kernel_key);
  m.def("layout_key", &cpu::layout_key);
  m.def("profiled", &at::hasCallbacks);
  m.def("shm_dir", &cpu::shm_dir);
  m.attr("timeout_variable") = cpu::new_timeout_variable();
  m.def("process_timeout_ms", &cpu::process_timeout_ms);
  m.def("timeout_ms_or_default", &cpu::timeout_ms_or_default);
  m.def("counting_writes_to", &cpu::counting_writes_to);
  m.def("new_output", &cpu::new_output);
  m.attr("large_output_bytes") = cpu::kLarge;
  m.def("kept_output_bytes", &cpu::kept_output_bytes);
  m.def("release_kept_outputs", &cpu::release_kept_outputs);
  // These take tensors by reference: to release a copy of a tensor that Python also holds, torch acquires the GIL.
  m.def("copy", &cpu::copy, py::call_guard<cpu::WithoutGil>());
  m.def("multiply", &cpu::multiply, py::arg("a"), py::arg("b"), py::arg("out"), py::arg("add") = false,
        py::arg("bias") = std::nullopt, py::call_guard<cpu::WithoutGil>());
  m.def("multiply_by_torch", &symm_overlap::issue::multiply, py::arg("a"), py::arg("b"), py::arg("out"),
        py::arg("add") = false, py::arg("bias") = std::nullopt, py::call_guard<cpu::WithoutGil>());
  m.def(
      "multiply_scaled",
      [](const at::Tensor& a, const at::Tensor& scale_a, const at::Tensor& b, const at::Tensor& scale_b,
         const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& result_scale, bool fast,
         bool in_float32, at::Tensor& out) {
        symm_overlap::issue::multiply_scaled({a, scale_a, b, scale_b, bias, result_scale, fast, in_float32}, out);
      },
      py::call_guard<cpu::WithoutGil>());
  m.def("onednn_is_quicker", &cpu::onednn_is_quicker);
  m.def("prefer_onednn", &cpu::prefer_onednn);
  m.def("reduce", &cpu::reduce, py::call_guard<cpu::WithoutGil>());
  // The waits release the GIL themselves, but only if a signal is late.
  py::class_<cpu::CpuLane>(m, "CpuLane")
      .def(py::init<const at::Tensor&, const std::string&>(), py::arg("workspace"), py::arg("group_name"))
      .def("begin", &cpu::CpuLane::begin, py::arg("timeout_ms"), py::arg("call_hash") = 0, py::arg("number") = 0)
      .def("signal", &cpu::CpuLane::signal, py::arg("peer"), py::arg("channel"))
      .def("wait", &cpu::CpuLane::wait, py::arg("peer"), py::arg("channel"))
      .def("barrier", &cpu::CpuLane::barrier, py::arg("channel"))
      .def("give_up", &cpu::CpuLane::give_up)
      .def("why_gone", &cpu::CpuLane::why_gone, py::arg("peer"));
  symm_overlap::issue::register_issue(m);
  py::class_<cpu::CpuDriver, symm_overlap::issue::Driver>(m, "CpuDriver")
      .def(py::init<cpu::CpuLane&>(), py::arg("lane"), py::keep_alive<1, 2>());
  m.def("different_call", &symm_overlap::different_call, py::arg("peer"), py::arg("theirs"), py::arg("ours"));
  // The number of the rendezvous that this tensor's memory had in this group, which is the same on every rank. 0 if it
  // had none. Does not communicate.
  m.def("rendezvous_number", [](const at::Tensor& tensor, const std::string& group_name) {
    if (!tensor.storage().device().is_cpu()) {
      return int64_t{0};  // a tensor without data whose device is nominally a CPU
    }
    const auto memory = cpu::cpu_allocator().find(tensor.storage().mutable_data(), group_name);
    return memory ? memory->number() : int64_t{0};
  });
  // Why nothing more will come from a rank with which this rank shares no memory yet. Empty if something may still
  // come.
  m.def("death_of", [](const std::string& group_name, int rank) {
    const cpu::WithoutGil without_gil;  // another thread may be waiting in the store, which this has to read
    return cpu::death_of(*c10d::resolve_process_group(group_name), group_name, rank);
  });
  // Like torch's rendezvous, but matched with rendezvous of the same tag only. After it, torch's own call returns the
  // handle without communication.
  m.def("rendezvous", [](const at::Tensor& tensor, const std::string& group_name, const std::string& tag) {
    cpu::cpu_allocator().rendezvous_tagged(tensor.storage().mutable_data(), group_name, tag);
  });
  m.def("refuse_rendezvous", [](const std::string& group_name, const std::string& tag, const std::string& reason) {
    const cpu::WithoutGil without_gil;
    cpu::refuse_rendezvous(*c10d::resolve_process_group(group_name), group_name, tag, reason);
  });
  // Returns the text `mine` of every rank of the group, by rank. Collective among calls with the same purpose and tag.
  m.def(
      "exchange",
      [](const std::string& group_name, const std::string& purpose, const std::string& mine, const std::string& tag) {
        const cpu::WithoutGil without_gil;
        const auto group = c10d::resolve_process_group(group_name);
        cpu::Meeting meeting(*group, group_name, purpose, tag, [&] { without_gil.check_signals(); });
        std::vector<std::string> said;
        meeting.attempt([&] { said = meeting.exchange("said", mine); });
        return said;
      },
      py::arg(), py::arg(), py::arg(), py::arg("tag") = "");
#ifdef SYMM_OVERLAP_WITH_CUDA
  symm_overlap::cuda::register_cuda(m);
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
}
