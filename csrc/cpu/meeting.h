// The ranks of a group meet in its store: every rank posts a text in each round and reads everyone's. However a meeting
// ends for one rank, the others learn it: a rank that cannot go on says why, one that died is noticed, one that never
// comes meets a deadline.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <string>
#include <vector>

#include "cpu/group_store.h"

namespace symm_overlap::cpu {

std::string boot_id();  // of this host: pids and mappings mean nothing on another one

// "(pid N) is dead" once the process of a rank has ended, as far as is known: it tells its pid when it comes to a
// meeting. Else empty.
std::string death_of(c10d::ProcessGroup& group, const std::string& group_name, int rank);
// As part of something else: an error of `store` names the purpose of that.
std::string death_of(c10d::ProcessGroup& group, const std::string& group_name, int rank, GroupStore& store);

class Meeting {
 public:
  // Meetings of one group for one `purpose`, which errors name, and `tag` follow one another, in the same order on
  // every rank: the n-th of one rank is the n-th of the others. All others are independent. `idle` runs now and then
  // during a wait, and ends it by throwing.
  Meeting(c10d::ProcessGroup& group, const std::string& group_name, const std::string& purpose, const std::string& tag,
          std::function<void()> idle);

  // Which of the meetings of its kind this is, from 1 on: the same number on every rank.
  int64_t number() const { return number_; }

  // What every rank posted in this round, by rank. Throws DistBackendError when that cannot be.
  std::vector<std::string> exchange(const std::string& round, const std::string& mine);

  // Ends the meeting for everyone: ranks that wait, or come later, throw with this reason.
  void abort(const std::string& reason) noexcept;
  // Throws if another rank has.
  void check_aborted();

  // Runs a part of the meeting in which this rank may fail alone; if it does, the others learn it.
  template <typename Part>
  void attempt(Part&& part) {
    try {
      part();
    } catch (const c10::Error& error) {
      rethrow_aborted();  // a peer that gave up has freed what we were about to map: its reason is the better one
      abort(error.what_without_backtrace());
      throw;
    } catch (const std::exception& error) {
      const std::string what = error.what();
      abort(what.substr(0, what.find('\n')));  // of a KeyboardInterrupt without its traceback
      throw;
    }
  }

 private:
  // check_aborted, after an error that stays the better one if the store does not answer.
  void rethrow_aborted();
  void introduce();
  void wait_for(const std::string& round, int rank);
  void look_for_dead(const std::string& round, int first, double waited_s);
  std::string key(const std::string& round, int rank) const;

  c10d::ProcessGroup& group_;
  GroupStore store_;
  int rank_;
  int world_size_;
  std::string group_name_;
  std::function<void()> idle_;
  int64_t number_ = 0;
  std::string prefix_;
};

}  // namespace symm_overlap::cpu
