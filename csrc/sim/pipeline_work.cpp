#include "pipeline_work.h"

#include <stdexcept>

namespace symm_overlap::sim {
namespace {

// The streams of a rank: its own streams, and then one stream for the receives from each rank.
enum Stream : int64_t { kCompute, kSend, kGather, kReduce, kRecv };

bool receives(int kind) {
  return kind == kRecvForward || kind == kRecvBackward;
}

bool computes(int kind) {
  return kind >= kForward && kind <= kBackward;
}

class Builder {
 public:
  Builder(const Rows& rows, const Doubles& body, const Doubles& tail, double overlap, bool one_receive_stream)
      : rows_(rows),
        body_(body),
        tail_(tail),
        overlap_(overlap),
        one_receive_stream_(one_receive_stream),
        first_(kKinds * rows.stages() * (rows.microbatches + 1), -1),
        unshard_(rows.stages(), -1),
        backward_(rows.stages(), -1) {
    if (body.size != kKinds * rows.stages() || tail.size != body.size)
      throw std::invalid_argument("body and tail must have a duration for each kind and stage");
    for (size_t number = 0; number < rows.cells.size; ++number)
      rows.each(rows.cells[number], [&](const Cell& cell) {
        int64_t& first = first_[at(cell.kind, cell.stage, cell.microbatch)];
        if (first < 0) first = static_cast<int64_t>(number);
        return true;
      });
  }

  PipelineWork build() {
    const size_t count = rows_.cells.size;
    for (auto* values : {&work_.stream, &work_.loads, &work_.slowed}) values->reserve(count);
    for (auto* values : {&work_.body, &work_.tail}) values->reserve(count);
    work_.after.reserve(2 * count);
    work_.after_starts.push_back(0);
    work_.holds_starts.push_back(0);
    for (size_t rank = 0; rank < rows_.ranks(); ++rank) {
      reshard_ = -1;
      for (int64_t number = rows_.starts[rank]; number < rows_.starts[rank + 1]; ++number)
        add(static_cast<int64_t>(rank), number);
    }
    return std::move(work_);
  }

 private:
  size_t at(int kind, int64_t stage, int64_t microbatch) const {
    return (kind * rows_.stages() + stage) * (rows_.microbatches + 1) + microbatch + 1;
  }
  int64_t first(int kind, int64_t stage, int64_t microbatch) const { return first_[at(kind, stage, microbatch)]; }

  void add(int64_t rank, int64_t number) {
    const int64_t code = rows_.cells[number];
    const int kind = Cell(code).kind;
    double body = 0.0, tail = 0.0;
    rows_.each(code, [&](const Cell& cell) {
      const size_t place = cell.kind * rows_.stages() + cell.stage;
      body += body_[place];
      if (kind != kOverlap) tail = tail_[place];
      depend(cell);
      return true;
    });
    const int64_t stream = stream_of(Cell(code));
    work_.stream.push_back(rank * (kRecv + static_cast<int64_t>(rows_.ranks())) + stream);
    work_.body.push_back(kind == kOverlap ? overlap_ * body : body);
    work_.tail.push_back(tail);
    const bool moves = stream == kSend || stream == kGather || stream == kReduce;
    if (moves) work_.holds.push_back(rank);  // its copy engine
    work_.loads.push_back(moves ? rank : -1);
    work_.slowed.push_back(computes(kind) || kind == kOverlap ? rank : -1);
    work_.after_starts.push_back(static_cast<int64_t>(work_.after.size()));
    work_.holds_starts.push_back(static_cast<int64_t>(work_.holds.size()));
    rows_.each(code, [&](const Cell& cell) {
      if (cell.kind == kUnshard) unshard_[cell.stage] = number;
      if (cell.kind == kReshard) reshard_ = number;
      if (cell.kind == kWeight || cell.kind == kBackward) backward_[cell.stage] = number;
      return true;
    });
  }

  int64_t stream_of(const Cell& cell) const {
    if (cell.kind == kSendForward || cell.kind == kSendBackward) return kSend;
    if (cell.kind == kUnshard) return kGather;
    if (cell.kind == kReduceGrad) return kReduce;
    if (!receives(cell.kind)) return kCompute;
    const int64_t sender = sender_of(cell);
    return sender < 0 || one_receive_stream_ ? kRecv : kRecv + rows_.placement[sender];
  }

  // The stage that sends the data of a receive; -1 if there is none.
  int64_t sender_of(const Cell& recv) const {
    return recv.kind == kRecvForward ? rows_.before(recv.stage) : rows_.after(recv.stage);
  }

  void depend(const Cell& cell) {
    const int64_t microbatch = cell.microbatch;
    if (cell.kind == kForward) {
      input(cell, rows_.before(cell.stage), kRecvForward, kForward, kForward);
    } else if (cell.kind == kInput || cell.kind == kBackward) {
      input(cell, rows_.after(cell.stage), kRecvBackward, kInput, kBackward);
    } else if (cell.kind == kSendForward) {
      work_.after.push_back(first(kForward, cell.stage, microbatch));
    } else if (cell.kind == kSendBackward) {
      either(first(kInput, cell.stage, microbatch), first(kBackward, cell.stage, microbatch));
    } else if (receives(cell.kind)) {
      const int send = cell.kind == kRecvForward ? kSendForward : kSendBackward;
      const int64_t sender = sender_of(cell);
      work_.after.push_back(sender < 0 ? -1 : first(send, sender, microbatch));
    } else if (cell.kind == kUnshard) {
      if (reshard_ >= 0) work_.after.push_back(reshard_);
    } else if (cell.kind == kReduceGrad) {
      if (backward_[cell.stage] >= 0) work_.after.push_back(backward_[cell.stage]);
    } else if (cell.kind >= kWait) {
      work_.after.push_back(first(cell.kind - kWait, cell.stage, microbatch));
    }
    if (computes(cell.kind) && unshard_[cell.stage] >= 0) work_.after.push_back(unshard_[cell.stage]);
  }

  // A forward or a backward follows its receive, or the neighbouring stage that computes its input on the same rank.
  void input(const Cell& cell, int64_t neighbour, int recv, int made, int also_made) {
    if (neighbour < 0) return;
    if (rows_.placement[neighbour] == rows_.placement[cell.stage])
      either(first(made, neighbour, cell.microbatch), first(also_made, neighbour, cell.microbatch));
    else
      work_.after.push_back(first(recv, cell.stage, cell.microbatch));
  }

  void either(int64_t one, int64_t other) { work_.after.push_back(one < 0 ? other : one); }

  const Rows& rows_;
  const Doubles& body_;
  const Doubles& tail_;
  const double overlap_;
  const bool one_receive_stream_;
  std::vector<int64_t> first_;     // the number of each action, -1 if the schedule does not have it
  std::vector<int64_t> unshard_;   // of each stage: the latest so far
  std::vector<int64_t> backward_;  // of each stage: the latest so far that computes gradients of parameters
  int64_t reshard_ = -1;           // of the rank: the latest so far
  PipelineWork work_;
};

}  // namespace

PipelineWork pipeline_work(const Rows& rows, const Doubles& body, const Doubles& tail, double overlap,
                           bool one_receive_stream) {
  return Builder(rows, body, tail, overlap, one_receive_stream).build();
}

}  // namespace symm_overlap::sim
