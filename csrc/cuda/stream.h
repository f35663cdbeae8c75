// Streams that belong to one lane alone.
#pragma once

#include <cstdint>

namespace symm_overlap::cuda {

// A new non-blocking stream, as the number that torch.cuda.ExternalStream takes. `high_priority`: its pending work is
// scheduled ahead of that of ordinary streams. Torch's own streams would not do: they come round-robin from a pool of
// 32, so that two lanes, or a lane and the caller, could be handed the same one and wait for each other for ever. Never
// destroyed: lanes live as long as the process, and captured graphs may refer to it.
int64_t new_stream(int device, bool high_priority);

}  // namespace symm_overlap::cuda
