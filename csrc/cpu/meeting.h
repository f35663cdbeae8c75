// The ranks of a group meet in its store. In each round, every rank posts a text and reads the texts of all ranks. All
// ranks notice if the meeting fails for one of them: a rank that cannot continue posts the reason, the death of a rank
// is detected, and the wait for a rank that never comes ends at the deadline.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <string>
#include <vector>

#include "cpu/group_store.h"

namespace symm_overlap::cpu {

std::string boot_id();  // identifies this host: pids and mappings are not valid on another host

// Returns "(pid N) is dead" if the process of a rank is known to have ended. Otherwise returns an empty string. A rank
// posts its pid when it joins a meeting, so nothing is known about a rank that has joined none.
std::string death_of(c10d::ProcessGroup& group, const std::string& group_name, int rank);
// The same with an existing store. Errors of the store then name the purpose of `store`.
std::string death_of(c10d::ProcessGroup& group, const std::string& group_name, int rank, GroupStore& store);

class Meeting {
 public:
  // Meetings of one group with the same `purpose` and `tag` follow one another, in the same order on every rank: the
  // n-th meeting of one rank is the n-th of the others. Meetings with another purpose or tag are independent. Errors
  // name `purpose`. `idle` runs now and then during a wait, and can end it by throwing.
  Meeting(c10d::ProcessGroup& group, const std::string& group_name, const std::string& purpose, const std::string& tag,
          std::function<void()> idle);

  // The number of this meeting among those with the same purpose and tag, from 1 on. It is the same on every rank.
  int64_t number() const { return number_; }

  // Posts `mine` and returns what every rank posted in this round, by rank. Throws DistBackendError if a rank posts
  // nothing.
  std::vector<std::string> exchange(const std::string& round, const std::string& mine);

  // Ends the meeting for all ranks: ranks that wait, or come later, throw an error with this reason.
  void abort(const std::string& reason) noexcept;
  // Throws if another rank has aborted the meeting.
  void check_aborted();

  // Runs a part of the meeting in which this rank may fail alone. If it fails, the other ranks are notified.
  template <typename Part>
  void attempt(Part&& part) {
    try {
      part();
    } catch (const c10::Error& error) {
      rethrow_aborted();  // if a peer aborted, it has freed the memory we were mapping: its reason is the real one
      abort(error.what_without_backtrace());
      throw;
    } catch (const std::exception& error) {
      const std::string what = error.what();
      abort(what.substr(0, what.find('\n')));  // leaves out the traceback of a KeyboardInterrupt
      throw;
    }
  }

 private:
  // Like check_aborted, but returns if the store does not answer, so that the caller's own error is reported.
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
