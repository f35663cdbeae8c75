// Turns a schedule with its sends and receives into work for the clock.
#pragma once

#include <vector>

#include "cells.h"

namespace symm_overlap::sim {

// The arrays of `Work` that differ from cell to cell. Each cell is a piece of work, with the index of the cell.
struct PipelineWork {
  std::vector<int64_t> stream, after_starts, after, holds_starts, holds, loads, slowed;
  std::vector<double> body, tail;
};

// `body` and `tail` have the value for an action of kind k of stage s at index k * stages + s. A compound takes
// `overlap` times the sum of the bodies of its parts. See symm_overlap/pipeline/simulation/work.py.
PipelineWork pipeline_work(const Rows& rows, const Doubles& body, const Doubles& tail, double overlap,
                           bool one_receive_stream);

}  // namespace symm_overlap::sim
