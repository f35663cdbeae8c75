// What the clock requires of the arrays of work, so that it checks no index and meets no NaN.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "engine.h"

namespace symm_overlap::sim {
namespace {

constexpr size_t kMost = size_t{1} << 24;  // limit of the numbers of streams and resources, which index tables

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

void require_below(const Integers& values, int64_t least, size_t limit, const char* what) {
  for (size_t index = 0; index < values.size; ++index)
    require(values[index] >= least && values[index] < static_cast<int64_t>(limit), what);
}

void require_starts(const Integers& starts, size_t count, size_t flat, const char* what) {
  require(starts.size == count + 1 && starts[0] == 0 && starts[count] == static_cast<int64_t>(flat), what);
  for (size_t index = 0; index < count; ++index) require(starts[index] <= starts[index + 1], what);
}

// NaN compares as false, so a clock that meets it would never go on. No time exceeds the sum of all durations, so if
// the sum is finite, all times are.
void require_durations(const Work& work) {
  double slowest = 1.0, sum = 0.0;
  for (size_t group = 0; group < work.slow_down.size; ++group) {
    require(std::isfinite(work.slow_down[group]) && work.slow_down[group] >= 1.0,
            "a slow-down must be finite and at least 1");
    slowest = std::max(slowest, work.slow_down[group]);
  }
  for (size_t number = 0; number < work.size(); ++number) {
    require(work.body[number] >= 0.0 && work.tail[number] >= 0.0, "a duration must be a number that is at least 0");
    sum += slowest * work.body[number] + work.tail[number];
  }
  require(std::isfinite(sum), "the durations add up to more than a float can hold: give them in larger units");
  for (size_t lot = 0; lot < work.lots.size; ++lot) require(std::isfinite(work.lots[lot]), "a lot must be finite");
}

}  // namespace

void check(const Work& work) {
  const size_t n = work.size();
  for (const auto* array : {&work.lottery, &work.loads, &work.slowed})
    require(array->size == n, "an array does not have one entry for each piece of work");
  require(work.body.size == n && work.tail.size == n, "an array does not have one entry for each piece of work");
  require(work.lot_starts.size > 0, "lot_starts must begin with 0");
  require_starts(work.after_starts, n, work.after.size, "after_starts does not fit after");
  require_starts(work.holds_starts, n, work.holds.size, "holds_starts does not fit holds");
  require_starts(work.lot_starts, work.lot_starts.size - 1, work.lots.size, "lot_starts does not fit lots");
  require_below(work.stream, 0, kMost, "a stream must be a number of 0 or more");
  require_below(work.holds, 0, kMost, "a resource must be a number of 0 or more");
  require_below(work.after, -1, n, "work is after work that does not exist");
  require_below(work.lottery, -1, work.lot_starts.size - 1, "there is no such lottery");
  require_below(work.loads, -1, work.slow_down.size, "there is no such group");
  require_below(work.slowed, -1, work.slow_down.size, "there is no such group");
  for (size_t number = 0; number < n; ++number)
    require(work.slowed[number] < 0 || (work.tail[number] == 0.0 && work.loads[number] < 0 &&
                                        work.holds_starts[number] == work.holds_starts[number + 1]),
            "work that is slowed must hold no resource, load no group and have no tail");
  require_durations(work);
}

}  // namespace symm_overlap::sim
