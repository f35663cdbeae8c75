// One call on a lane, as its waits know it.
#pragma once

#include <cstdint>

#include "common/announcement.h"

namespace symm_overlap {

// What a wait says about itself when it fails, how long it may take, and which call the peers must be in.
struct Call {
  uint32_t op;
  uint32_t number;
  uint64_t timeout_ns;
  Announcement announced;
};

}  // namespace symm_overlap
