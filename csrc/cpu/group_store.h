// The store of a group, with errors of one sentence. Torch's own errors are a C++ stack without the group and the rank.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

namespace symm_overlap::cpu {

// Every method throws DistBackendError if the store does not answer, which happens when the process that hosts it has
// ended. The error names `purpose`, the group, and the ranks that are known to be dead.
class GroupStore {
 public:
  GroupStore(c10d::ProcessGroup& group, const std::string& group_name, const std::string& purpose);

  void set(const std::string& key, const std::string& text);
  std::string get(const std::string& key);
  bool has(const std::string& key);
  int64_t add(const std::string& key, int64_t amount);

  // "symm_overlap: PURPOSE of group 'NAME': "
  const std::string& prologue() const { return prologue_; }

 private:
  template <typename Request>
  auto ask(Request&& request);
  [[noreturn]] void fail(const std::string& what);

  c10d::ProcessGroup& group_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::string prologue_;
};

}  // namespace symm_overlap::cpu
