#include "cuda/bindings.h"

#include <c10/cuda/CUDAStream.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "cpu/without_gil.h"
#include "cuda/clock.h"
#include "cuda/driver.h"
#include "cuda/emulated_link.h"
#include "cuda/flags.h"
#include "cuda/kernels.h"
#include "cuda/lane_host.h"
#include "cuda/memory_operations.h"
#include "cuda/pinned_blocks.h"
#include "cuda/stream.h"

namespace symm_overlap::cuda {

namespace py = pybind11;

namespace {

// A signal or a wait whose memory operations are enqueued at once.
template <void (LaneHost::*kMethod)(const std::vector<int>&, int, PendingOperations&)>
void at_once(LaneHost& lane, const std::vector<int>& peers, int channel) {
  PendingOperations pending;
  (lane.*kMethod)(peers, channel, pending);
  pending.enqueue(c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(lane.device())));
}

}  // namespace

void register_cuda(py::module_& module) {
  py::class_<FailureRecord>(module, "FailureRecord")
      .def_property_readonly("peer_failed", [](const FailureRecord& r) { return r.reason == kPeerFailed; })
      .def_property_readonly("gave_up", [](const FailureRecord& r) { return r.reason == kGaveUp; })
      .def_property_readonly("peer_died", [](const FailureRecord& r) { return r.reason == kPeerDied; })
      .def_property_readonly("mismatch", [](const FailureRecord& r) { return r.reason == kMismatch; })
      .def_property_readonly("found_call",
                             [](const FailureRecord& r) { return r.found == kNoCall ? int64_t{-1} : r.found; })
      .def_readonly("op", &FailureRecord::op)
      .def_readonly("call", &FailureRecord::call)
      .def_readonly("peer", &FailureRecord::peer)
      .def_readonly("channel", &FailureRecord::channel)
      .def_readonly("expected", &FailureRecord::expected)
      .def_readonly("found", &FailureRecord::found);

  // A launch blocks while the GPU's queue is full, and the kernels in it may wait for work that another thread has yet
  // to launch. So every function that launches releases the GIL, and so does one that loads kernels or allocates pinned
  // memory, which may wait for the GPU too.
  using NoGil = py::call_guard<cpu::WithoutGil>;
  py::class_<LaneHost>(module, "CudaLane")
      .def(py::init<const at::Tensor&, const at::Tensor&, int, int, int, const std::string&,
                    const std::vector<at::Tensor>&>(),
           py::arg("control"), py::arg("peers"), py::arg("rank"), py::arg("world"), py::arg("channels"),
           py::arg("group_name") = "", py::arg("hosts") = std::vector<at::Tensor>{}, NoGil())
      .def("begin", &LaneHost::begin, py::arg("op"), py::arg("call"), py::arg("timeout_ns"), py::arg("call_hash") = 0,
           py::arg("number") = 0, py::arg("by_kernels") = false, NoGil())
      .def("signal", at_once<&LaneHost::signal>, py::arg("peers"), py::arg("channel"), NoGil())
      .def("wait", at_once<&LaneHost::wait>, py::arg("peers"), py::arg("channel"), NoGil())
      .def("barrier", &LaneHost::barrier, py::arg("channel"), NoGil())
      .def("barrier_around_replays", &LaneHost::barrier_around_replays, py::arg("channel"), NoGil())
      .def("sleep", &LaneHost::sleep, py::arg("cycles"), NoGil())
      .def("end", &LaneHost::end, py::arg("outputs"), py::arg("flags") = nullptr, NoGil())
      .def("give_up", &LaneHost::give_up, py::arg("op"), py::arg("call"), NoGil())
      .def("failure", &LaneHost::failure)
      .def_static(
          "slot",
          [](int world, int channels, int source, int channel) {
            return ControlBlock{world, channels}.slot(source, channel);
          },
          py::arg("world"), py::arg("channels"), py::arg("source"), py::arg("channel"))
      .def_static("control_words", &LaneHost::control_words, py::arg("world"), py::arg("channels"));
  py::class_<EmulatedLink, std::shared_ptr<EmulatedLink>>(module, "EmulatedLink")
      .def(py::init<const at::Tensor&, const at::Tensor&, const at::Tensor&, double, double>(), py::arg("clock"),
           py::arg("host"), py::arg("device"), py::arg("inward"), py::arg("outward"))
      .def("cross", &EmulatedLink::cross_on_current, py::arg("nbytes"), py::arg("from_peer"), NoGil())
      .def_readwrite("exact", &EmulatedLink::exact);
  py::class_<CudaDriver, issue::Driver>(module, "CudaDriver")
      .def(py::init<LaneHost&, int64_t>(), py::arg("lane"), py::arg("sleep_cycles"), py::keep_alive<1, 2>())
      .def("number_of", &CudaDriver::number_of, py::arg("handle"))
      .def("emulate_link", &CudaDriver::emulate_link, py::arg("link"), py::arg("peers"))
      .def("reserve_events", &CudaDriver::reserve_events, py::arg("count"));
  py::class_<CudaFlags, issue::Flags, std::shared_ptr<CudaFlags>>(module, "CudaFlags")
      .def(py::init<const at::Tensor&, const at::Tensor&, bool>(), py::arg("status"), py::arg("record"),
           py::arg("in_memory"), NoGil())
      .def("use", &CudaFlags::use, py::arg("words"))
      .def("begin", &CudaFlags::begin, py::arg("caller"))
      .def("up", py::overload_cast<int>(&CudaFlags::raise), py::arg("chunk"), NoGil())
      .def("wait", py::overload_cast<int>(&CudaFlags::await), py::arg("chunk"), NoGil())
      .def("give_up", &CudaFlags::give_up, NoGil());
  module.def("pace", &pace, py::arg("link"), py::arg("ns"), NoGil());
  module.def("stamp", &stamp, py::arg("times"), py::arg("index"), NoGil());
  module.attr("max_partials") = kMaxPartials;
  module.def("has_memory_operations", &has_memory_operations, py::arg("device"), NoGil());
  module.def("pinning_refused", &pinning_refused, py::arg("device"), NoGil());
  module.def("capturing", &capturing, py::arg("device"));
  module.def("may_free", &may_free, py::arg("device"), NoGil());
  module.def("new_cuda_stream", &new_stream, py::arg("device"), py::arg("high_priority"));
}

}  // namespace symm_overlap::cuda
