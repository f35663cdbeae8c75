#include "cpu/group_store.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/file_limit.h"
#include "cpu/known_peers.h"

namespace symm_overlap::cpu {

namespace {

// A process that ends closes its connections first. So the store stops answering a moment before the process that hosts
// it is known to be dead.
constexpr int kLooks = 20;
constexpr std::chrono::milliseconds kBetweenLooks{10};

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

GroupStore::GroupStore(c10d::ProcessGroup& group, const std::string& group_name, const std::string& purpose)
    : group_(group),
      store_(group.getStore()),
      prologue_("symm_overlap: " + purpose + " of group '" + group_name + "': ") {
  TORCH_CHECK_WITH(DistBackendError, store_, prologue_,
                   "this process group has no store of its own, as groups that are written in Python, or whose ranks "
                   "are threads. Make a group on a backend of torch (torch.distributed.new_group(backend=...)).");
}

template <typename Request>
auto GroupStore::ask(Request&& request) {
  try {
    return request();
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::system_error& error) {
    fail(error.what());
  }
}

void GroupStore::set(const std::string& key, const std::string& text) {
  ask([&] { store_->set(key, std::vector<uint8_t>(text.begin(), text.end())); });
}

std::string GroupStore::get(const std::string& key) {
  const std::vector<uint8_t> text = ask([&] { return store_->get(key); });
  return {text.begin(), text.end()};
}

bool GroupStore::has(const std::string& key) {
  return ask([&] { return store_->check({key}); });
}

int64_t GroupStore::add(const std::string& key, int64_t amount) {
  return ask([&] { return store_->add(key, amount); });
}

void GroupStore::fail(const std::string& what) {
  for (const int error : {EMFILE, ENFILE}) {  // a store in a file opens it for every request
    TORCH_CHECK_WITH(DistBackendError, what.find(std::strerror(error)) == std::string::npos, prologue_,
                     "the group's store cannot be used: ", std::strerror(error), kFileAdvice);
  }
  std::string dead = dead_peers(group_);
  for (int look = 0; dead.empty() && look < kLooks; ++look) {
    std::this_thread::sleep_for(kBetweenLooks);
    dead = dead_peers(group_);
  }
  const std::string why =
      dead.empty() ? "the process that hosts the group's store, usually rank 0, has ended or cannot be reached"
                   : dead + ", and the group's store, usually hosted by rank 0, is gone";
  C10_THROW_ERROR(DistBackendError, prologue_ + why + " (" + first_line(what) +
                                        "). The output of the rank that ended says why it did; this group cannot go "
                                        "on.");
}

}  // namespace symm_overlap::cpu
