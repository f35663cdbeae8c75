#include "engine.h"

#include <algorithm>
#include <queue>
#include <stdexcept>
#include <tuple>

namespace symm_overlap::sim {
namespace {

constexpr double kTie = 1e-9;  // times this close are treated as equal
constexpr int64_t kNone = -1;

struct Event {
  double time;
  int64_t number;
  bool done;        // true: the work is done; false: its body is over and it releases its resources
  int64_t version;  // of work whose end has moved: an event with an older version is ignored

  bool operator>(const Event& other) const {
    return std::tie(time, number, done) > std::tie(other.time, other.number, other.done);
  }
};

// Work that waits for a resource: the time since when, its lot and its number. The least entry is served first.
using Entry = std::tuple<double, double, int64_t>;

template <typename T>
using LeastFirst = std::priority_queue<T, std::vector<T>, std::greater<T>>;

size_t count_of(const Integers& values) {
  int64_t highest = kNone;
  for (size_t index = 0; index < values.size; ++index) highest = std::max(highest, values[index]);
  return static_cast<size_t>(highest + 1);
}

// For each piece of work, the work that waits for it: lists in one array.
struct Followers {
  std::vector<int64_t> starts, flat;

  Followers(const Work& work, const std::vector<int64_t>& next) : starts(work.size() + 1, 0) {
    const auto count = [&](int64_t earlier) {
      if (earlier >= 0) ++starts[earlier + 1];
    };
    for (size_t index = 0; index < work.after.size; ++index) count(work.after[index]);
    for (size_t number = 0; number < work.size(); ++number)
      if (next[number] >= 0) ++starts[number + 1];
    for (size_t number = 0; number < work.size(); ++number) starts[number + 1] += starts[number];
    flat.resize(starts.back());
    std::vector<int64_t> free(starts.begin(), starts.end() - 1);
    for (size_t number = 0; number < work.size(); ++number)
      for (int64_t index = work.after_starts[number]; index < work.after_starts[number + 1]; ++index)
        if (work.after[index] >= 0) flat[free[work.after[index]]++] = static_cast<int64_t>(number);
    for (size_t number = 0; number < work.size(); ++number)
      if (next[number] >= 0) flat[free[number]++] = next[number];
  }
};

class Engine {
 public:
  explicit Engine(const Work& work)
      : work_(work),
        obstacles_(work.size(), 0),
        lots_drawn_(work.lot_starts.size - 1, 0),
        in_use_(count_of(work.holds), 0),
        queues_(in_use_.size()),
        waiting_for_(in_use_.size()),
        waits_for_(in_use_.size(), kNone),
        is_candidate_(in_use_.size(), 0),
        released_by_(in_use_.size(), kNone),
        loaded_(work.slow_down.size, 0),
        running_(work.slow_down.size),
        left_(work.size(), 0.0),
        since_(work.size(), 0.0),
        version_(work.size(), 0) {
    times_.starts.resize(work.size(), 0.0);
    times_.ends.resize(work.size(), 0.0);
    times_.reached.resize(work.size(), 0.0);
    times_.causes.resize(work.size(), kNone);
    times_.order.reserve(work.size());
    next_.resize(work.size(), kNone);
    std::vector<int64_t> last(count_of(work.stream), kNone);
    for (size_t number = 0; number < work.size(); ++number) {
      obstacles_[number] += work.after_starts[number + 1] - work.after_starts[number];
      int64_t& before = last[work.stream[number]];
      if (before >= 0) {
        next_[before] = static_cast<int64_t>(number);
        ++obstacles_[number];
      }
      before = static_cast<int64_t>(number);
    }
  }

  Times run() {
    const Followers followers(work_, next_);
    followers_ = &followers;
    for (size_t number = 0; number < work_.size(); ++number)
      if (!obstacles_[number]) ready(static_cast<int64_t>(number), 0.0);
    serve(0.0);
    while (!heap_.empty()) {
      const double now = heap_.top().time;
      while (!heap_.empty() && heap_.top().time <= now + kTie) {  // all that ends now, before any work starts
        const Event event = heap_.top();
        heap_.pop();
        if (event.version != version_[event.number]) continue;
        if (event.done)
          done(event.number, now);
        else
          give_up(event.number, now);
      }
      serve(now);
    }
    return std::move(times_);
  }

 private:
  bool holds_any(int64_t number) const { return work_.holds_starts[number] < work_.holds_starts[number + 1]; }

  void ready(int64_t number, double now) {
    if (!holds_any(number)) {
      start(number, now);
      return;
    }
    double lot = 0.0;
    if (const int64_t lottery = work_.lottery[number]; lottery >= 0) {
      const int64_t drawn = work_.lot_starts[lottery] + lots_drawn_[lottery]++;
      if (drawn >= work_.lot_starts[lottery + 1]) throw std::invalid_argument("a lottery has too few lots");
      lot = work_.lots[drawn];
    }
    const int64_t first = work_.holds[work_.holds_starts[number]];
    queues_[first].emplace(now, lot, number);
    if (std::get<2>(queues_[first].top()) == number) add_candidate(first);
  }

  void add_candidate(int64_t resource) {
    waits_for_[resource] = kNone;
    if (is_candidate_[resource]) return;
    is_candidate_[resource] = 1;
    candidates_.push_back(resource);
  }

  // The head of the queue `first` waits for `resource`. The queue is not checked again until the resource is released.
  void wait(int64_t first, int64_t resource) {
    waits_for_[first] = resource;
    waiting_for_[resource].push_back(first);
  }

  // Starts all work that can start, the oldest first. No work starts ahead of older work with the same first resource.
  // Only queues that got another head, or whose head waited for a resource that was released, are checked.
  void serve(double now) {
    heads_.clear();
    for (int64_t resource : candidates_) {
      is_candidate_[resource] = 0;
      if (!queues_[resource].empty()) heads_.emplace_back(queues_[resource].top(), resource);
    }
    candidates_.clear();
    std::sort(heads_.begin(), heads_.end());
    for (const auto& [entry, first] : heads_) {
      const int64_t number = std::get<2>(entry);
      int64_t busy = kNone;
      for (int64_t index = work_.holds_starts[number]; index < work_.holds_starts[number + 1] && busy < 0; ++index)
        if (in_use_[work_.holds[index]]) busy = work_.holds[index];
      if (busy >= 0) {
        wait(first, busy);
        continue;
      }
      for (int64_t index = work_.holds_starts[number]; index < work_.holds_starts[number + 1]; ++index)
        in_use_[work_.holds[index]] = 1;
      queues_[first].pop();
      if (std::get<0>(entry) < now && released_by_[first] >= 0) times_.causes[number] = released_by_[first];
      if (!queues_[first].empty()) wait(first, first);
      start(number, now);
    }
  }

  void start(int64_t number, double now) {
    times_.order.push_back(number);
    times_.starts[number] = now;
    double body = work_.body[number];
    if (const int64_t group = work_.slowed[number]; group >= 0) {
      running_[group].push_back(number);
      left_[number] = body;
      since_[number] = now;
      if (loaded_[group]) body *= work_.slow_down[group];
    }
    times_.ends[number] = now + body + work_.tail[number];
    heap_.push({times_.ends[number], number, true, version_[number]});
    const int64_t group = work_.loads[number];
    if (holds_any(number) || group >= 0) heap_.push({now + body, number, false, version_[number]});
    if (group >= 0 && loaded_[group]++ == 0) change_pace(group, now);
  }

  // The body is over: the work releases its resources.
  void give_up(int64_t number, double now) {
    for (int64_t index = work_.holds_starts[number]; index < work_.holds_starts[number + 1]; ++index) {
      const int64_t resource = work_.holds[index];
      in_use_[resource] = 0;
      for (int64_t first : waiting_for_[resource]) {
        if (waits_for_[first] != resource) continue;  // the head no longer waits for this resource
        released_by_[first] = number;
        add_candidate(first);
      }
      waiting_for_[resource].clear();
    }
    if (const int64_t group = work_.loads[number]; group >= 0 && --loaded_[group] == 0) change_pace(group, now);
  }

  // The first work that loads a group has started, or the last has ended. The group's running work changes its pace.
  void change_pace(int64_t group, double now) {
    const double before = loaded_[group] ? 1.0 : work_.slow_down[group];
    const double after = loaded_[group] ? work_.slow_down[group] : 1.0;
    if (before == after) return;
    for (int64_t number : running_[group]) {
      left_[number] = std::max(0.0, left_[number] - (now - since_[number]) / before);
      since_[number] = now;
      times_.ends[number] = now + left_[number] * after;
      heap_.push({times_.ends[number], number, true, ++version_[number]});
    }
  }

  void done(int64_t number, double now) {
    if (const int64_t group = work_.slowed[number]; group >= 0)
      running_[group].erase(std::find(running_[group].begin(), running_[group].end(), number));
    if (next_[number] >= 0) times_.reached[next_[number]] = now;
    for (int64_t index = followers_->starts[number]; index < followers_->starts[number + 1]; ++index) {
      const int64_t later = followers_->flat[index];
      times_.causes[later] = number;
      if (--obstacles_[later] == 0) ready(later, now);
    }
  }

  const Work& work_;
  const Followers* followers_ = nullptr;
  Times times_;
  std::vector<int64_t> next_;  // the next work in the same stream
  std::vector<int64_t> obstacles_;
  std::vector<int64_t> lots_drawn_;
  std::vector<char> in_use_;
  std::vector<LeastFirst<Entry>> queues_;          // by the first resource that an entry needs
  std::vector<std::vector<int64_t>> waiting_for_;  // of each resource: queues whose head waits, or waited, for it
  std::vector<int64_t> waits_for_;                 // of each queue: the resource that its head waits for
  std::vector<char> is_candidate_;
  std::vector<int64_t> candidates_;  // queues whose head may be able to start
  std::vector<int64_t> released_by_;
  std::vector<std::pair<Entry, int64_t>> heads_;
  std::vector<int64_t> loaded_;                // of each group: how many pieces of work load it now
  std::vector<std::vector<int64_t>> running_;  // of each group: the running work that it can slow
  std::vector<double> left_, since_;           // of this work: how much of its body was left, and at which time
  std::vector<int64_t> version_;
  LeastFirst<Event> heap_;
};

}  // namespace

Times run(const Work& work) {
  check(work);
  return Engine(work).run();
}

}  // namespace symm_overlap::sim
