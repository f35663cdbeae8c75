// Encodes rows of Python's actions as integers.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "cells.h"

namespace symm_overlap::sim {

struct Encoded {
  std::vector<int64_t> cells, starts, parts;
};

// `rows` are the rows of a Schedule: a tuple of tuples of None and (stage, kind, microbatch, parts). `numbers` has the
// number of each kind. Throws pybind11::value_error for an action that is not valid in its place.
Encoded encode(const pybind11::tuple& rows, const std::vector<int64_t>& placement, int64_t microbatches,
               const pybind11::dict& numbers);

}  // namespace symm_overlap::sim
