// The protocol of csrc/common as Python sees it: memory/ sizes control blocks with it, and the tests check it without a
// GPU.
#pragma once

#include <pybind11/pybind11.h>

#include "common/control_block.h"
#include "common/epoch.h"

namespace symm_overlap {

inline void register_common(pybind11::module_& module) {
  namespace py = pybind11;
  module.def("epoch_reached", &epoch_reached, py::arg("found"), py::arg("expected"));
  py::class_<ControlBlock>(module, "ControlBlock")
      .def(py::init([](int world, int channels) { return ControlBlock{world, channels}; }), py::arg("world"),
           py::arg("channels"))
      .def("slot", &ControlBlock::slot, py::arg("source"), py::arg("channel"))
      .def("told", &ControlBlock::told)
      .def("failed", &ControlBlock::failed)
      .def("sent", &ControlBlock::sent, py::arg("destination"), py::arg("channel"))
      .def("awaited", &ControlBlock::awaited, py::arg("source"), py::arg("channel"))
      .def("words", &ControlBlock::words);
}

}  // namespace symm_overlap
