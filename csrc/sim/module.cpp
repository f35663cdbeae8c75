// Python bindings of the simulators. They need no torch, and no policy is in them: arrays in, arrays out. Arrays come
// as buffers of 64-bit integers or doubles, and go as bytes, which Python casts without a copy.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cells.h"
#include "encode.h"
#include "send_recv.h"
#include "unit_time.h"

namespace py = pybind11;
namespace sim = symm_overlap::sim;

namespace {

sim::Span span(const py::buffer_info& info) {
  if (info.ndim != 1 || info.itemsize != 8 || (info.size > 1 && info.strides[0] != 8))
    throw py::type_error("a contiguous buffer of 64-bit integers was expected");
  return {static_cast<const int64_t*>(info.ptr), static_cast<size_t>(info.size)};
}

template <typename T>
py::bytes bytes(const std::vector<T>& values) {
  return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// A schedule as Python has it, (cells, starts, parts, placement, microbatches, pipelines), for as long as this lives.
struct Schedule {
  py::buffer_info cells, starts, parts, placement;
  sim::Rows rows;

  explicit Schedule(const py::tuple& encoded)
      : cells(encoded[0].cast<py::buffer>().request()),
        starts(encoded[1].cast<py::buffer>().request()),
        parts(encoded[2].cast<py::buffer>().request()),
        placement(encoded[3].cast<py::buffer>().request()),
        rows{span(cells),
             span(starts),
             span(parts),
             span(placement),
             encoded[4].cast<int64_t>(),
             encoded[5].cast<int64_t>()} {}
};

}  // namespace

PYBIND11_MODULE(_sim, m) {
  m.def("encode", [](const py::tuple& rows, const std::vector<int64_t>& placement, int64_t microbatches,
                     const py::dict& numbers) {
    const sim::Encoded encoded = sim::encode(rows, placement, microbatches, numbers);
    return py::make_tuple(bytes(encoded.cells), bytes(encoded.starts), bytes(encoded.parts));
  });
  m.def("add_send_recv", [](const py::tuple& encoded) -> py::object {
    const Schedule given(encoded);
    const auto lowered = sim::add_send_recv(given.rows);
    if (!lowered) return py::none();
    std::vector<int64_t> flat, starts{0};
    for (const auto& row : *lowered) {
      flat.insert(flat.end(), row.begin(), row.end());
      starts.push_back(static_cast<int64_t>(flat.size()));
    }
    return py::make_tuple(bytes(flat), bytes(starts));
  });
  m.def("unit_time", [](const py::tuple& encoded, bool peek) {
    const Schedule given(encoded);
    const sim::UnitTime found = sim::unit_time(given.rows, peek);
    return py::make_tuple(bytes(found.steps), found.length, found.complete);
  });
}
