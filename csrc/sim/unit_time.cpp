#include "unit_time.h"

#include <algorithm>

namespace symm_overlap::sim {
namespace {

bool is_recv(int kind) {
  return kind == kRecvForward || kind == kRecvBackward;
}

// The stage that sends: the stage of a send itself, or the stage whose data a receive gets; -1 if there is none.
int64_t sender(const Rows& rows, const Cell& cell) {
  if (cell.kind == kRecvForward) return rows.before(cell.stage);
  if (cell.kind == kRecvBackward) return rows.after(cell.stage);
  return cell.stage;
}

// Sends have numbers. This is the number of a send itself, or of the send that belongs to a receive. kNoSend if no
// stage could send it.
constexpr size_t kNoSend = static_cast<size_t>(-1);

size_t number_of_send(const Rows& rows, const Cell& cell) {
  const bool forward = cell.kind == kSendForward || cell.kind == kRecvForward;
  const int64_t stages = static_cast<int64_t>(rows.stages());
  const int64_t stage = sender(rows, cell);
  if (stage < 0) return kNoSend;
  return ((forward ? 0 : stages) + stage) * (rows.microbatches + 1) + cell.microbatch + 1;
}

// Whether everything that an action needs from its own rank is done.
bool ready_here(const Done& done, const Cell& cell) {
  if (cell.kind == kSendForward) return done.has(kForward, cell.stage, cell.microbatch);
  if (cell.kind == kSendBackward)
    return done.has(kInput, cell.stage, cell.microbatch) || done.has(kBackward, cell.stage, cell.microbatch);
  if (cell.kind >= kWait) return done.has(cell.kind - kWait, cell.stage, cell.microbatch);
  return done.has_input(cell);
}

struct Run {
  const Rows& rows;
  Done done;
  std::vector<int64_t> steps;
  std::vector<int64_t> next;  // of each rank: its current cell

  explicit Run(const Rows& rows) : rows(rows), done(rows), steps(rows.cells.size, -1), next(rows.ranks()) {
    for (size_t rank = 0; rank < rows.ranks(); ++rank) {
      next[rank] = rows.starts[rank];
      skip(rank);
    }
  }

  void skip(size_t rank) {
    while (!over(rank) && !rows.cells[next[rank]]) ++next[rank];
  }
  bool over(size_t rank) const { return next[rank] == rows.starts[rank + 1]; }

  void take(size_t rank, int64_t step) {
    const int64_t code = rows.cells[next[rank]];
    rows.each(code, [&](const Cell& cell) {
      done.add(cell);
      return true;
    });
    steps[next[rank]++] = step;
    skip(rank);
  }
};

// Every action except a receive depends only on earlier actions of its own rank. So a rank runs until it reaches a
// receive whose send has not run yet, and continues when that send has run.
void run_ahead(Run& run) {
  const Rows& rows = run.rows;
  const size_t sends = 2 * rows.stages() * (rows.microbatches + 1);
  std::vector<int64_t> sent(sends, -1);         // the step of each send
  std::vector<int64_t> waiting(sends, -1);      // the rank that waits for a send
  std::vector<int64_t> clock(rows.ranks(), 0);  // the next free step of each rank
  std::vector<size_t> runnable;
  for (size_t rank = rows.ranks(); rank-- > 0;) runnable.push_back(rank);
  while (!runnable.empty()) {
    const size_t rank = runnable.back();
    runnable.pop_back();
    while (!run.over(rank)) {
      const int64_t code = rows.cells[run.next[rank]];
      int64_t step = clock[rank];
      const bool ready = rows.each(code, [&](const Cell& cell) {
        if (!is_recv(cell.kind)) return ready_here(run.done, cell);
        const size_t send = number_of_send(rows, cell);
        if (send == kNoSend) return false;
        if (sent[send] < 0) {
          waiting[send] = static_cast<int64_t>(rank);
          return false;
        }
        step = std::max(step, sent[send]);
        return true;
      });
      if (!ready) break;
      rows.each(code, [&](const Cell& cell) {
        if (cell.kind != kSendForward && cell.kind != kSendBackward) return true;
        const size_t send = number_of_send(rows, cell);
        if (sent[send] >= 0) return true;
        sent[send] = step;
        if (waiting[send] >= 0) runnable.push_back(static_cast<size_t>(waiting[send]));
        return true;
      });
      run.take(rank, step);
      clock[rank] = step + 1;
    }
  }
}

}  // namespace

UnitTime unit_time(const Rows& rows) {
  Run run(rows);
  run_ahead(run);
  UnitTime result{std::move(run.steps), 0, true};
  for (int64_t step : result.steps) result.length = std::max(result.length, step + 1);
  for (size_t rank = 0; rank < rows.ranks(); ++rank) result.complete &= run.over(rank);
  return result;
}

}  // namespace symm_overlap::sim
