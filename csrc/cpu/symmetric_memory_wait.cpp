// The waits of a rank for its peers' signals in symmetric memory, and the failure of these waits.
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "common/different_call.h"
#include "cpu/deadline.h"
#include "cpu/give_up.h"
#include "cpu/symmetric_memory.h"
#include "cpu/without_gil.h"

namespace symm_overlap::cpu {

namespace {

// How often a sleeping wait checks whether its peer is alive and whether Ctrl-C was pressed.
constexpr int64_t kLookUpMs = 100;
// How many times a wait spins before it sleeps. Together they take about 100 us.
constexpr int kPatience = 20;

}  // namespace

EpochSlot& CpuSymmetricMemory::slot_of(const Wait& wait, int source) const {
  return *(layout_.*wait.slot)(pads_[rank_], source, wait.channel);
}

void CpuSymmetricMemory::wait(const Wait& wait, int first, int count, size_t timeout_ms) {
  for (int i = 0; i < count; ++i) {
    const int source = (first + i) % get_world_size();
    if (!slot_of(wait, source).spin(wait.expected)) {
      wait_for_late(wait, first + i, count - i, timeout_ms);
    }
    if (wait.call.hash != 0 && !layout_.call_slot(pads_[rank_], source)->same(wait.call)) {
      fail_as_different_call(wait, source);
    }
  }
}

void CpuSymmetricMemory::wait_for_late(const Wait& wait, int first, int count, size_t timeout_ms) {
  const int source = first % get_world_size();
  EpochSlot& slot = slot_of(wait, source);
  const WithoutGil without_gil;  // torch's bindings call this with the GIL
  if (spin_on(slot, wait.expected)) {
    return;
  }
  const int64_t timeout = timeout_ms_or_default(static_cast<int64_t>(timeout_ms));
  const auto start = std::chrono::steady_clock::now();
  slot.sleep(wait.expected, std::min(kLookUpMs, timeout), [&] {
    const auto waited =
        std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start).count();
    // Check all ranks whose signal has not arrived, not only `source`. Otherwise a rank that is gone would be noticed
    // only after the waits for the ranks before it, which may take long.
    for (int i = 0; i < count; ++i) {
      look_at(wait, (first + i) % get_world_size(), waited);
    }
    const uint32_t found = slot.epoch.load(std::memory_order_acquire);
    if (waited >= timeout && !epoch_reached(found, wait.expected)) {
      fail(wait, source, found, waited, "");
    }
    TORCH_CHECK_WITH(DistBackendError, !gave_up_ || epoch_reached(found, wait.expected), prologue(wait), " for rank ",
                     source, ": this rank has failed in the meantime");
    without_gil.check_signals();
  });
}

void CpuSymmetricMemory::look_at(const Wait& wait, int source, int64_t waited_ms) {
  // Read first what the peer has announced and whether it is gone, and then its slot: a signal that it sent before that
  // still counts.
  const bool elsewhere = wait.call.hash != 0 && layout_.call_slot(pads_[rank_], source)->elsewhere(wait.call);
  const std::string why = why_gone(source);
  const uint32_t found = slot_of(wait, source).epoch.load(std::memory_order_acquire);
  if (epoch_reached(found, wait.expected)) {
    return;
  }
  if (elsewhere) {
    fail_as_different_call(wait, source);
  }
  if (!why.empty()) {
    fail(wait, source, found, waited_ms, why);
  }
}

bool CpuSymmetricMemory::spin_on(const EpochSlot& slot, uint32_t expected) const {
  // If a peer is only a little late, spinning notices its signal sooner, because a wake-up takes some 50 us. But spin
  // only if there is a core for every rank.
  for (int turn = 0; core_each_ && turn < kPatience; ++turn) {
    if (slot.spin(expected)) {
      return true;
    }
  }
  return false;
}

std::string CpuSymmetricMemory::prologue(const Wait& wait) const {
  return c10::str("symm_overlap: ", wait.what, " on rank ", rank_, " of ", ranks_.size(), " (group '", group_,
                  "', pid ", ::getpid(), ", channel ", wait.channel, ")");
}

void CpuSymmetricMemory::fail(const Wait& wait, int source, uint32_t found, int64_t waited_ms, const std::string& why) {
  const uint32_t word = give_up_of(source);
  uint32_t none = 0;
  reason_.compare_exchange_strong(none, word != 0 ? word : give_up_word(source));
  const bool dead = ranks_[source].peer->dead() || (word != 0 && ranks_[culprit_of(word)].peer->dead());
  const std::string next = why.empty()
                               ? "Is that rank in the same call? To wait longer, set symm_overlap.timeout(seconds) or "
                                 "SYMM_OVERLAP_TIMEOUT."
                           : is_different_call(word) ? same_calls_advice()
                           : dead ? "Its own output says why; this group cannot go on."
                                  : "Its own output says why. Calls can go on in a new group, or on another lane.";
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(prologue(wait), ": rank ", source, " ", why.empty() ? process_of(source) + " did not signal" : why,
               " after ", waited_ms / 1000.0, " s: expected epoch ", wait.expected, ", found ", found, ". ", next));
}

void CpuSymmetricMemory::fail_as_different_call(const Wait& wait, int source) {
  const int64_t theirs = layout_.call_slot(pads_[rank_], source)->number_of(wait.call);
  uint32_t none = 0;
  reason_.compare_exchange_strong(none, give_up_word(rank_) | kDifferentCall);
  give_up();
  const std::string peer = c10::str("rank ", source, " ", process_of(source));
  C10_THROW_ERROR(DistBackendError, c10::str(prologue(wait), ": ", different_call(peer, theirs, wait.call.number)));
}

}  // namespace symm_overlap::cpu
