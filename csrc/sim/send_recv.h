// Puts sends and receives into a schedule of compute.
#pragma once

#include <optional>
#include <vector>

#include "cells.h"

namespace symm_overlap::sim {

// The rows with a send behind each action whose result another rank needs and the matching receive in that rank's row;
// empty if some action never gets its input, or if there are sends and receives already. The order is that of
// symm_overlap/pipeline/lowering/send_recv.py.
std::optional<std::vector<std::vector<int64_t>>> add_send_recv(const Rows& rows);

}  // namespace symm_overlap::sim
