// Python bindings of the simulators. They need no torch and decide nothing: they pass arrays. Arguments are buffers of
// 64-bit integers or doubles. Results are bytes, which Python casts without a copy.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cells.h"
#include "encode.h"
#include "engine.h"
#include "pipeline_work.h"
#include "send_recv.h"
#include "unit_time.h"

namespace py = pybind11;
namespace sim = symm_overlap::sim;

namespace {

// An array of Python, valid as long as this object exists.
template <typename T>
struct Array {
  py::buffer_info info;

  Array(const py::tuple& arrays, size_t index) : info(arrays[index].cast<py::buffer>().request()) {
    if (info.ndim != 1 || info.itemsize != sizeof(T) || (info.size > 1 && info.strides[0] != sizeof(T)))
      throw py::type_error("a contiguous buffer of 64-bit numbers was expected");
  }
  operator sim::View<T>() const { return {static_cast<const T*>(info.ptr), static_cast<size_t>(info.size)}; }
};

template <typename T>
py::bytes bytes(const std::vector<T>& values) {
  return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// A schedule of Python, (cells, starts, parts, placement, microbatches, pipelines), valid as long as this exists.
struct Schedule {
  Array<int64_t> cells, starts, parts, placement;
  sim::Rows rows;

  explicit Schedule(const py::tuple& encoded)
      : cells(encoded, 0),
        starts(encoded, 1),
        parts(encoded, 2),
        placement(encoded, 3),
        rows{cells, starts, parts, placement, encoded[4].cast<int64_t>(), encoded[5].cast<int64_t>()} {
    sim::require_schedule(rows);
  }
};

py::tuple run(const py::tuple& arrays) {
  using Integers = Array<int64_t>;
  using Doubles = Array<double>;
  const Integers stream(arrays, 0), after_starts(arrays, 1), after(arrays, 2), holds_starts(arrays, 3),
      holds(arrays, 4);
  const Doubles body(arrays, 5), tail(arrays, 6);
  const Integers lottery(arrays, 7), lot_starts(arrays, 8);
  const Doubles lots(arrays, 9);
  const Integers loads(arrays, 10), slowed(arrays, 11);
  const Doubles slow_down(arrays, 12);
  const sim::Times times = sim::run({stream, after_starts, after, holds_starts, holds, body, tail, lottery, lot_starts,
                                     lots, loads, slowed, slow_down});
  return py::make_tuple(bytes(times.starts), bytes(times.ends), bytes(times.reached), bytes(times.causes),
                        bytes(times.order));
}

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
  m.def("unit_time", [](const py::tuple& encoded) {
    const Schedule given(encoded);
    const sim::UnitTime found = sim::unit_time(given.rows);
    return py::make_tuple(bytes(found.steps), found.length, found.complete);
  });
  m.def("pipeline_work", [](const py::tuple& encoded, const py::tuple& durations, double overlap,
                            bool one_receive_stream) {
    const Schedule given(encoded);
    const Array<double> body(durations, 0), tail(durations, 1);
    const sim::PipelineWork work = sim::pipeline_work(given.rows, body, tail, overlap, one_receive_stream);
    return py::make_tuple(bytes(work.stream), bytes(work.after_starts), bytes(work.after), bytes(work.holds_starts),
                          bytes(work.holds), bytes(work.body), bytes(work.tail), bytes(work.loads), bytes(work.slowed));
  });
  m.def("run", &run);
}
