// What the host asks a device about its streams.
#pragma once

#include <cstdint>

namespace symm_overlap::cuda {

// Creates a non-blocking stream for one lane, and returns it as the number that torch.cuda.ExternalStream accepts.
// `high_priority`: its pending work is scheduled ahead of the work of ordinary streams. Torch's own streams cannot be
// used: they come round-robin from a pool of 32, so that two lanes, or a lane and the caller, could get the same stream
// and deadlock. The stream is never destroyed: lanes live as long as the process, and captured graphs may refer to it.
int64_t new_stream(int device, bool high_priority);

// Returns whether the current stream of a device is being captured, even if the capture has failed.
bool capturing(int device);

// Returns whether any thread captures on any device: on the current stream, or on one of torch's pools of streams,
// where torch captures by default.
bool capturing_anywhere();

}  // namespace symm_overlap::cuda
