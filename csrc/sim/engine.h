// Runs work on a clock, with streams that run in order, dependencies, and resources that one piece of work holds at a
// time.
#pragma once

#include <cstdint>
#include <vector>

#include "view.h"

namespace symm_overlap::sim {

// All arrays have the same length n unless noted otherwise. symm_overlap/plan/work.py documents them.
struct Work {
  Integers stream;
  Integers after_starts, after;  // (n + 1,) and flat
  Integers holds_starts, holds;  // (n + 1,) and flat
  Doubles body, tail;
  Integers lottery;        // -1: no lots are drawn
  Integers lot_starts;     // (lotteries + 1,)
  Doubles lots;            // flat
  Integers loads, slowed;  // -1: no group
  Doubles slow_down;       // (groups,)

  size_t size() const { return stream.size; }
};

struct Times {
  std::vector<double> starts, ends, reached;
  std::vector<int64_t> causes, order;
};

// Throws std::invalid_argument for arrays that do not fit each other, and for numbers that are not allowed.
void check(const Work& work);

// Returns the times of all work. `order` is shorter than the work if some of it waits forever.
// Throws what `check` throws.
Times run(const Work& work);

}  // namespace symm_overlap::sim
