// Adds sends and receives to a schedule of compute actions.
#pragma once

#include <optional>
#include <vector>

#include "cells.h"

namespace symm_overlap::sim {

// Returns the rows with a send after each action whose result another rank needs, and with the matching receive in that
// rank's row. Empty if some action never gets its input, or if there are sends and receives already. The order is the
// same as in symm_overlap/pipeline/lowering/send_recv.py.
std::optional<std::vector<std::vector<int64_t>>> add_send_recv(const Rows& rows);

}  // namespace symm_overlap::sim
