// From rows of Python's actions to integers.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "cells.h"

namespace symm_overlap::sim {

struct Encoded {
  std::vector<int64_t> cells, starts, parts;
};

// `rows` as a Schedule has them: a tuple of tuples of None and (stage, kind, microbatch, parts). `numbers` has the
// number of each kind. Throws pybind11::value_error for an action that cannot be in this place.
Encoded encode(const pybind11::tuple& rows, const std::vector<int64_t>& placement, int64_t microbatches,
               const pybind11::dict& numbers);

}  // namespace symm_overlap::sim
