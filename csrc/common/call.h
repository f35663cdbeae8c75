// The data about a call on a lane that the waits of the call need.
#pragma once

#include <cstdint>

#include "common/announcement.h"

namespace symm_overlap {

// What a failed wait reports about itself, how long the wait may take, and which call the peers must be in.
struct Call {
  uint32_t op;
  uint32_t number;
  uint64_t timeout_ns;
  Announcement announced;
};

}  // namespace symm_overlap
