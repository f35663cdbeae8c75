// The layout of the control block of one (group, lane) on a GPU. Each rank has one block of 32-bit words in symmetric
// memory.
//
//   [slot(0, 0) | slot(0, 1) | ... | slot(W-1, C-1)]   written by the peers, polled here; a 128-byte line each
//   [notice]                                           written by any peer that has failed; a line
//   [failed]                                           written by this rank when it has failed; a line
//   [call(0) ... call(W-1)]                            written by the peers: the calls they are in; a line each
//   [ticket(0), ticket(1), replayed]                   how many blocks of a kernel have begun and have ended, and
//                                                      whether a graph has used the workspace; a line
//   [sent(0, 0) ... sent(W-1, C-1)]                    epochs this rank has sent, by destination and channel
//   [awaited(0, 0) ... awaited(W-1, C-1)]              epochs this rank has waited for, by source and channel
//
// Each slot has a line of its own because a peer's store takes the line away from the poller for a moment. With two
// slots in one line, each signal would slow down the waits of the other channel. The counters are used by this rank
// only, and each counter by one stream only, so they are packed. They are in device memory and not in kernel arguments,
// so that a captured CUDA graph continues to count at every replay.
//
// Each lane has a second block with the same layout, the *host block*, in pinned host memory. The processes of all
// ranks share this memory if they can. In the host block, the streams of calls that are not captured signal and wait by
// memory operations, unless they meet in kernels anyway (cuda/meeting.cu). The hosts count the epochs of the host
// block. They are a separate sequence, which replays cannot confuse.
//
// The host block is in host memory because a wait by a memory operation ends only when the word changes. The host must
// be able to change the word by a store of its own, because anything that it enqueued could be queued behind the very
// wait that it is meant to end. The price is that a flag travels over PCIe and not over NVLink. In the host block, the
// slots are used, and
//
//   [reached(0, 0) ...]   in the line of the slot: the latest wait that this rank's own stream has reached
//   [notice]              written by the hosts of peers that have failed, and by this rank's host when it fails
//   [call(0) ...]         as above; in the same line, gone(0) ...: why nothing more is to be expected from a peer
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/epoch.h"

namespace symm_overlap {

enum Gone : uint32_t {
  kMayCome = 0,
  kDied = 1,        // the process of the peer has ended
  kLaneFailed = 2,  // this rank's host has marked the lane as failed and has notified the peers
};

struct ControlBlock {
  static constexpr size_t kLineWords = 32;

  int world;
  int channels;

  // The slot that `source` writes, in the block of the rank that waits.
  SYMM_OVERLAP_HOST_DEVICE size_t slot(int source, int channel) const { return pair(source, channel) * kLineWords; }
  // In another cache line of the CPU than the slot, because the slot is written from another side.
  SYMM_OVERLAP_HOST_DEVICE size_t reached(int source, int channel) const {
    return slot(source, channel) + kLineWords / 2;
  }
  SYMM_OVERLAP_HOST_DEVICE size_t notice() const { return pairs() * kLineWords; }
  SYMM_OVERLAP_HOST_DEVICE size_t failed() const { return notice() + kLineWords; }
  // Two 64-bit words, each an Announcement of `source`, by place_of.
  SYMM_OVERLAP_HOST_DEVICE size_t call(int source) const { return failed() + (1 + size_t(source)) * kLineWords; }
  // Used in the host block: a Gone.
  SYMM_OVERLAP_HOST_DEVICE size_t gone(int source) const { return call(source) + kLineWords / 2; }
  // Both tickets are 0 between two kernels.
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
