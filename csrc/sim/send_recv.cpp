#include "send_recv.h"

#include <functional>
#include <queue>

namespace symm_overlap::sim {
namespace {

struct Lowering {
  const Rows& rows;
  Done done;
  std::vector<std::vector<int64_t>> lowered;
  std::vector<int64_t> next;  // of each rank: its current cell
  std::vector<char> blocked;  // of each rank: whether it waits for an input
  std::priority_queue<size_t, std::vector<size_t>, std::greater<size_t>> now;  // ranks still to visit in this round
  std::vector<size_t> later;                                                   // ranks to visit in the next round

  explicit Lowering(const Rows& rows)
      : rows(rows), done(rows), lowered(rows.ranks()), next(rows.ranks()), blocked(rows.ranks()) {
    for (size_t rank = 0; rank < rows.ranks(); ++rank) {
      next[rank] = rows.starts[rank];
      lowered[rank].reserve(2 * (rows.starts[rank + 1] - rows.starts[rank]));
      if (next[rank] < rows.starts[rank + 1]) later.push_back(rank);
    }
  }

  // Adds a send on `rank` and its receive on the other rank. If the other rank has waited for it, that rank is visited
  // again, in this round if its turn has not come yet.
  void hand_over(size_t rank, const Cell& cell, bool forward) {
    const int64_t stage = forward ? rows.after(cell.stage) : rows.before(cell.stage);
    if (stage < 0) return;
    const size_t peer = rows.placement[stage];
    if (peer == rank) return;
    const Cell send(forward ? kSendForward : kSendBackward, cell.stage, cell.microbatch);
    const Cell recv(forward ? kRecvForward : kRecvBackward, stage, cell.microbatch);
    lowered[rank].push_back(send.code());
    lowered[peer].push_back(recv.code());
    done.add(recv);
    if (blocked[peer]) {
      blocked[peer] = 0;
      if (peer > rank)
        now.push(peer);
      else
        later.push_back(peer);
    }
  }

  void visit(size_t rank) {
    const int64_t code = rows.cells[next[rank]];
    if (!rows.each(code, [&](const Cell& cell) { return done.has_input(cell); })) {
      blocked[rank] = 1;
      return;
    }
    if (code) {
      lowered[rank].push_back(code);
      rows.each(code, [&](const Cell& cell) {
        done.add(cell);
        if (cell.kind == kForward) hand_over(rank, cell, true);
        if (cell.kind == kInput || cell.kind == kBackward) hand_over(rank, cell, false);
        return true;
      });
    }
    if (++next[rank] < rows.starts[rank + 1]) later.push_back(rank);
  }
};

}  // namespace

std::optional<std::vector<std::vector<int64_t>>> add_send_recv(const Rows& rows) {
  for (size_t cell = 0; cell < rows.cells.size; ++cell) {
    const int kind = Cell(rows.cells[cell]).kind % kWait;
    if (kind >= kSendForward && kind <= kRecvBackward) return std::nullopt;
  }
  Lowering run(rows);
  while (!run.later.empty()) {
    for (size_t rank : run.later) run.now.push(rank);
    run.later.clear();
    while (!run.now.empty()) {
      const size_t rank = run.now.top();
      run.now.pop();
      run.visit(rank);
    }
  }
  for (size_t rank = 0; rank < rows.ranks(); ++rank)
    if (run.next[rank] < rows.starts[rank + 1]) return std::nullopt;
  return std::move(run.lowered);
}

}  // namespace symm_overlap::sim
