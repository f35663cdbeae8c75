// The lane data for kernels: plain pointers and numbers, passed by value.
#pragma once

#include <cstdint>

#include "common/call.h"
#include "common/control_block.h"
#include "common/failure_record.h"

namespace symm_overlap::cuda {

struct Lane {
  uint32_t* control;      // this rank's control block
  const uint64_t* peers;  // in device memory: every rank's control block as this GPU addresses it
  FailureRecord* record;  // pinned host memory
  uint32_t* host;         // this rank's host block (control_block.h)
  ControlBlock block;
  int rank;
};

}  // namespace symm_overlap::cuda
