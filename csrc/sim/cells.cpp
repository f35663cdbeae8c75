#include "cells.h"

#include <stdexcept>
#include <string>

namespace symm_overlap::sim {
namespace {

[[noreturn]] void no_schedule(const std::string& reason) {
  throw std::invalid_argument("the integers do not encode a schedule: " + reason);
}

// Checks a cell that is not empty, or a part of a compound.
void require_cell(const Rows& rows, int64_t code, bool is_part) {
  const int64_t kind = code >> (2 * kBits);
  const Cell cell(code);
  if (kind < 0 || kind >= kKinds) no_schedule("there is no kind of action " + std::to_string(kind));
  if (kind == kOverlap) {
    const int64_t parts = static_cast<int64_t>(rows.parts.size);
    if (is_part || cell.microbatch < 0 || cell.microbatch + cell.stage > parts)
      no_schedule("a compound has parts that are not there, or that are compounds");
  } else if (cell.stage >= static_cast<int64_t>(rows.stages()) || cell.microbatch >= rows.microbatches) {
    no_schedule("an action is of a stage or a microbatch that does not exist");
  }
}

}  // namespace

void require_schedule(const Rows& rows) {
  if (!rows.starts.size || rows.starts[0] != 0) no_schedule("starts must begin with 0");
  for (size_t rank = 0; rank < rows.ranks(); ++rank)
    if (rows.starts[rank] > rows.starts[rank + 1]) no_schedule("starts must not descend");
  if (rows.starts[rows.ranks()] != static_cast<int64_t>(rows.cells.size)) no_schedule("starts does not fit cells");
  const int64_t stages = static_cast<int64_t>(rows.stages());
  if (rows.cells.size && !stages) no_schedule("there are cells, but no stages");
  if (stages > kMask || rows.microbatches < 0 || rows.microbatches > kMask)
    no_schedule("there are at most " + std::to_string(kMask) + " stages and microbatches");
  if (rows.pipelines < 1 || stages % rows.pipelines)
    no_schedule(std::to_string(rows.pipelines) + " pipelines cannot share " + std::to_string(stages) + " stages");
  for (size_t stage = 0; stage < rows.stages(); ++stage)
    if (rows.placement[stage] < 0 || rows.placement[stage] >= static_cast<int64_t>(rows.ranks()))
      no_schedule("stage " + std::to_string(stage) + " is on a rank without a row");
  for (size_t cell = 0; cell < rows.cells.size; ++cell)
    if (rows.cells[cell]) require_cell(rows, rows.cells[cell], false);
  for (size_t part = 0; part < rows.parts.size; ++part) require_cell(rows, rows.parts[part], true);
}

}  // namespace symm_overlap::sim
