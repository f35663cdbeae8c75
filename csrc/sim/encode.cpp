#include "encode.h"

#include <unordered_map>

namespace py = pybind11;

namespace symm_overlap::sim {
namespace {

struct Encoder {
  const std::vector<int64_t>& placement;
  int64_t microbatches;
  const py::dict& numbers;
  std::unordered_map<PyObject*, int> known;  // the numbers of the strings that have been seen, by address
  Encoded encoded;

  [[noreturn]] void refuse(const std::string& reason, py::handle action, size_t rank, size_t cell) {
    throw py::value_error("row " + std::to_string(rank + 1) + " (rank " + std::to_string(rank) + "), cell " +
                          std::to_string(cell + 1) + ": " + std::string(py::str(action)) + ": " + reason);
  }

  int number(PyObject* kind) {
    const auto found = known.find(kind);
    if (found != known.end()) return found->second;
    PyObject* value = PyDict_GetItemWithError(numbers.ptr(), kind);
    if (!value) {
      if (PyErr_Occurred()) throw py::error_already_set();
      return kEmpty;
    }
    return known[kind] = static_cast<int>(PyLong_AsLong(value));
  }

  int64_t code(PyObject* action, size_t rank, size_t cell, bool is_part) {
    if (!PyTuple_Check(action) || PyTuple_GET_SIZE(action) != 4) refuse("an action was expected", action, rank, cell);
    const int kind = number(PyTuple_GET_ITEM(action, 1));
    if (kind == kEmpty) refuse("this kind of action is not known", py::repr(action), rank, cell);
    PyObject* parts = PyTuple_GET_ITEM(action, 3);
    if (kind == kOverlap) {
      if (is_part || !PyTuple_Check(parts) || !PyTuple_GET_SIZE(parts))
        refuse("a compound must have at least one part, and no part may be a compound", action, rank, cell);
      std::vector<int64_t> codes;
      for (Py_ssize_t part = 0; part < PyTuple_GET_SIZE(parts); ++part)
        codes.push_back(code(PyTuple_GET_ITEM(parts, part), rank, cell, true));
      const Cell compound(kOverlap, static_cast<int64_t>(codes.size()), static_cast<int64_t>(encoded.parts.size()));
      encoded.parts.insert(encoded.parts.end(), codes.begin(), codes.end());
      return compound.code();
    }
    const int64_t stage = integer(PyTuple_GET_ITEM(action, 0));
    PyObject* given = PyTuple_GET_ITEM(action, 2);
    const int64_t microbatch = given == Py_None ? -1 : integer(given);
    if (stage < 0 || stage >= static_cast<int64_t>(placement.size()))
      refuse("the schedule has stages 0 to " + std::to_string(static_cast<int64_t>(placement.size()) - 1), action, rank,
             cell);
    if (given != Py_None && (microbatch < 0 || microbatch >= microbatches))
      refuse("the schedule has microbatches 0 to " + std::to_string(microbatches - 1), action, rank, cell);
    if (placement[stage] != static_cast<int64_t>(rank))
      refuse("stage " + std::to_string(stage) + " is on rank " + std::to_string(placement[stage]), action, rank, cell);
    return Cell(kind, stage, microbatch).code();
  }

  static int64_t integer(PyObject* value) {
    const int64_t number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
    return number;
  }
};

}  // namespace

Encoded encode(const py::tuple& rows, const std::vector<int64_t>& placement, int64_t microbatches,
               const py::dict& numbers) {
  if (microbatches > kMask || static_cast<int64_t>(placement.size()) > kMask)
    throw py::value_error("a schedule has at most " + std::to_string(kMask) + " microbatches and stages, not " +
                          std::to_string(microbatches) + " and " + std::to_string(placement.size()));
  Encoder encoder{placement, microbatches, numbers, {}, {}};
  Encoded& encoded = encoder.encoded;
  encoded.starts.push_back(0);
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    PyObject* row = PyTuple_GET_ITEM(rows.ptr(), static_cast<Py_ssize_t>(rank));
    if (!PyTuple_Check(row)) throw py::type_error("a row of a schedule must be a tuple of actions");
    for (Py_ssize_t cell = 0; cell < PyTuple_GET_SIZE(row); ++cell) {
      PyObject* action = PyTuple_GET_ITEM(row, cell);
      encoded.cells.push_back(action == Py_None ? 0 : encoder.code(action, rank, static_cast<size_t>(cell), false));
    }
    encoded.starts.push_back(static_cast<int64_t>(encoded.cells.size()));
  }
  return std::move(encoded);
}

}  // namespace symm_overlap::sim
