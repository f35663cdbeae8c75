// The record of a lane's first failure, in pinned host memory, where the host can read it without using the GPU.
#pragma once

#include <cstdint>

namespace symm_overlap {

// The kernel writes the other words first and then stores `reason` with release order at system scope.
struct FailureRecord {
  uint32_t reason;  // a FailureReason
  uint32_t op;      // the number that the host has assigned to the op's name
  uint32_t call;    // this rank's count of calls on the lane when the wait was issued
  uint32_t peer;    // timed out, died: the rank that did not signal; a peer failed: the rank where the failure began;
                    // gave up: this rank; mismatch: the rank that is in another call
  uint32_t channel;
  uint32_t expected;  // the epoch; for a mismatch: the number of this rank's call
  uint32_t found;     // the epoch; for a mismatch: the number of the peer's call, kNoCall if it has announced none

  uint32_t ended;  // not part of a failure: the number of the latest kernel that ends a call and that has run
};

enum FailureReason : uint32_t {
  kNoFailure = 0,
  kTimedOut = 1,    // a wait of this rank passed its deadline
  kPeerFailed = 2,  // another rank failed and notified this rank
  kGaveUp = 3,      // the host of this rank gave up in the middle of a call
  kMismatch = 4,    // a peer is in another call than this rank
  kPeerDied = 5,    // the process of a rank that this rank waits for has ended
};

constexpr uint32_t kNoCall = 0xFFFFFFFFu;

}  // namespace symm_overlap
