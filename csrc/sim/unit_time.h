// Runs a schedule in which every action takes one step.
#pragma once

#include <vector>

#include "cells.h"

namespace symm_overlap::sim {

struct UnitTime {
  std::vector<int64_t> steps;  // of each cell; -1 for an empty cell and for a cell that is never reached
  int64_t length;              // the number of steps
  bool complete;               // whether every action is reached
};

// See symm_overlap/pipeline/simulation/unit_time.py.
UnitTime unit_time(const Rows& rows);

}  // namespace symm_overlap::sim
