// Where things are in the control block of one (group, lane) on a GPU: one block of 32-bit words a rank, in symmetric
// memory.
//
//   [slot(0, 0) | slot(0, 1) | ... | slot(W-1, C-1)]   written by the peers, polled here; a 128-byte line each
//   [notice]                                           written by any peer that has failed; a line
//   [failed]                                           written here once this rank has failed; a line
//   [call(0) ... call(W-1)]                            written by the peers: the calls they are in; a line each
//   [ticket(0), ticket(1), replayed]                   blocks that have begun and ended, of a kernel of several, and
//                                                      whether a graph has used the workspace; a line
//   [sent(0, 0) ... sent(W-1, C-1)]                    epochs this rank has sent, by destination and channel
//   [awaited(0, 0) ... awaited(W-1, C-1)]              epochs this rank has waited for, by source and channel
//
// A slot has a line of its own because a peer's store takes the line out of the poller's way for a moment: with two
// slots in one line, each signal would slow the waits of every other channel. The counters are touched by this rank
// alone, one stream for each, so they are packed. They are in device memory, not in kernel arguments, so that a
// captured CUDA graph counts on at every replay.
//
// Each lane has a second block of the same layout, the *host block*, in pinned memory of the host, which the processes
// of all ranks share where they can. There the streams of calls that are not captured signal and wait by memory
// operations, unless they meet in kernels anyway (cuda/meeting.cu), and the hosts count the epochs: a sequence of its
// own, which replays cannot confuse. Memory of the host, because a wait by a memory operation ends in no other way than
// that the word changes, and the host must be able to change it by a store of its own: whatever it enqueued could stand
// behind the very wait that it is to end. The price is that a flag travels over PCIe and not over NVLink. Of the host
// block are used the slots, and
//
//   [reached(0, 0) ...]   in the line of the slot: the latest wait at which this rank's own stream has come
//   [notice]              written by the hosts of peers that have failed, and of this rank when it fails
//   [call(0) ...]         as above; in the same line, gone(0) ...: that nothing more is to be waited for from a peer
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/epoch.h"

namespace symm_overlap {

enum Gone : uint32_t {
  kMayCome = 0,
  kDied = 1,        // the process of the peer is no more
  kLaneFailed = 2,  // this rank's host has failed the lane, and has told the peers
};

struct ControlBlock {
  static constexpr size_t kLineWords = 32;

  int world;
  int channels;

  // The slot that `source` writes in the block of the rank that waits.
  SYMM_OVERLAP_HOST_DEVICE size_t slot(int source, int channel) const { return pair(source, channel) * kLineWords; }
  // Not in the same line of a CPU's cache, as the slot is written from another side.
  SYMM_OVERLAP_HOST_DEVICE size_t reached(int source, int channel) const {
    return slot(source, channel) + kLineWords / 2;
  }
  SYMM_OVERLAP_HOST_DEVICE size_t notice() const { return pairs() * kLineWords; }
  SYMM_OVERLAP_HOST_DEVICE size_t failed() const { return notice() + kLineWords; }
  // Two 64-bit words, each an Announcement of `source`, by place_of.
  SYMM_OVERLAP_HOST_DEVICE size_t call(int source) const { return failed() + (1 + size_t(source)) * kLineWords; }
  // Of the host block: a Gone.
  SYMM_OVERLAP_HOST_DEVICE size_t gone(int source) const { return call(source) + kLineWords / 2; }
  // 0 between two kernels.
  SYMM_OVERLAP_HOST_DEVICE size_t ticket(int which) const { return call(world) + size_t(which); }
  // 1 from the first call of a replayed graph until the next call that the host issues.
  SYMM_OVERLAP_HOST_DEVICE size_t replayed() const { return ticket(2); }
  SYMM_OVERLAP_HOST_DEVICE size_t sent(int destination, int channel) const {
    return counters() + pair(destination, channel);
  }
  SYMM_OVERLAP_HOST_DEVICE size_t awaited(int source, int channel) const {
    return counters() + pairs() + pair(source, channel);
  }
  SYMM_OVERLAP_HOST_DEVICE size_t words() const { return counters() + 2 * pairs(); }

 private:
  SYMM_OVERLAP_HOST_DEVICE size_t counters() const { return ticket(0) + kLineWords; }
  SYMM_OVERLAP_HOST_DEVICE size_t pairs() const { return static_cast<size_t>(world) * channels; }
  SYMM_OVERLAP_HOST_DEVICE size_t pair(int rank, int channel) const {
    return static_cast<size_t>(rank) * channels + channel;
  }
};

}  // namespace symm_overlap
