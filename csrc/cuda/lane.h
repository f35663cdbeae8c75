// A lane as the kernels see it: plain pointers and numbers, passed by value.
#pragma once

#include <cstdint>

#include "common/announcement.h"
#include "common/control_block.h"
#include "common/failure_record.h"

namespace symm_overlap::cuda {

struct Lane {
  uint32_t* control;      // this rank's control block
  const uint64_t* peers;  // in device memory: every rank's control block as this GPU addresses it
  FailureRecord* record;  // pinned host memory
  ControlBlock block;
  int rank;
};

// What a wait says about itself when it fails, how long it may take, and which call the peers must be in.
struct Call {
  uint32_t op;
  uint32_t number;
  uint64_t timeout_ns;
  Announcement announced;
};

}  // namespace symm_overlap::cuda
