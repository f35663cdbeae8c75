// A pipeline schedule as integers, one for each cell, row after row. symm_overlap/pipeline/simulation/encoded.py
// documents the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "view.h"

namespace symm_overlap::sim {

// In the same order as KINDS in symm_overlap/pipeline/simulation/encoded.py. A WAIT_ action is kWait plus the kind
// it waits for.
enum Kind : int {
  kEmpty,
  kForward,
  kInput,
  kWeight,
  kBackward,
  kUnshard,
  kReshard,
  kReduceGrad,
  kSendForward,
  kRecvForward,
  kSendBackward,
  kRecvBackward,
  kOverlap,
  kWait = 16,
  kKinds = 32,
};

constexpr int kBits = 24;  // the bits of a stage and of a microbatch
constexpr int64_t kMask = (int64_t{1} << kBits) - 1;

// The content of one cell. For a compound, `stage` is the number of its parts and `microbatch` the index of the first
// part.
struct Cell {
  int kind;
  int64_t stage;
  int64_t microbatch;  // -1: none

  explicit Cell(int64_t code)
      : kind(static_cast<int>(code >> (2 * kBits))), stage(code & kMask), microbatch(((code >> kBits) & kMask) - 1) {}
  Cell(int kind, int64_t stage, int64_t microbatch) : kind(kind), stage(stage), microbatch(microbatch) {}

  int64_t code() const { return (int64_t{kind} << (2 * kBits)) | ((microbatch + 1) << kBits) | stage; }
};

// A schedule: row r is cells[starts[r]] to cells[starts[r + 1]].
struct Rows {
  Integers cells;
  Integers starts;
  Integers parts;
  Integers placement;  // the rank of each stage
  int64_t microbatches;
  int64_t pipelines;  // the stages are divided into this many equal ranges, and each range is a pipeline

  size_t ranks() const { return starts.size - 1; }
  size_t stages() const { return placement.size; }

  // `before` is the stage that a stage gets its input from, -1 for the first stage of a pipeline. `after` is the stage
  // that it gets its gradient from, -1 for the last stage.
  int64_t before(int64_t stage) const { return stage % length() ? stage - 1 : -1; }
  int64_t after(int64_t stage) const { return (stage + 1) % length() ? stage + 1 : -1; }

  // Calls visit(Cell) for the action of a cell, or for each part of a compound. Stops and returns false as soon as a
  // visit returns false.
  template <typename Visit>
  bool each(int64_t code, Visit visit) const {
    const Cell cell(code);
    if (cell.kind != kOverlap) return visit(cell);
    for (int64_t part = cell.microbatch; part < cell.microbatch + cell.stage; ++part)
      if (!visit(Cell(parts[part]))) return false;
    return true;
  }

 private:
  int64_t length() const { return static_cast<int64_t>(stages()) / pipelines; }
};

// Throws std::invalid_argument if the integers are not a schedule, so that nothing else has to check an index.
void require_schedule(const Rows& rows);

// Which actions are done, and whether an action has its input. An action runs on the rank of its stage, so a look-up
// needs no rank.
class Done {
 public:
  explicit Done(const Rows& rows)
      : rows_(rows), microbatches_(rows.microbatches + 1), done_(kKinds * rows.stages() * microbatches_) {}

  bool has(int kind, int64_t stage, int64_t microbatch) const { return done_[at(kind, stage, microbatch)]; }
  void add(const Cell& cell) { done_[at(cell.kind, cell.stage, cell.microbatch)] = 1; }

  // Whether a forward or a backward has its input: from a receive, or from the neighbouring stage on the same rank.
  bool has_input(const Cell& cell) const {
    const int64_t microbatch = cell.microbatch;
    if (cell.kind == kForward) {
      const int64_t before = rows_.before(cell.stage);
      return before < 0 || has(kRecvForward, cell.stage, microbatch) ||
             (rows_.placement[before] == rows_.placement[cell.stage] && has(kForward, before, microbatch));
    }
    if (cell.kind == kInput || cell.kind == kBackward) {
      const int64_t after = rows_.after(cell.stage);
      return after < 0 || has(kRecvBackward, cell.stage, microbatch) ||
             (rows_.placement[after] == rows_.placement[cell.stage] &&
              (has(kInput, after, microbatch) || has(kBackward, after, microbatch)));
    }
    return true;
  }

 private:
  size_t at(int kind, int64_t stage, int64_t microbatch) const {
    return (kind * rows_.stages() + stage) * microbatches_ + microbatch + 1;
  }

  const Rows& rows_;
  size_t microbatches_;
  std::vector<char> done_;
};

}  // namespace symm_overlap::sim
