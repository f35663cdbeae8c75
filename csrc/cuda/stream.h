// What the host asks a device about its streams.
#pragma once

#include <cstdint>

namespace symm_overlap::cuda {

// Creates a non-blocking stream for one lane, and returns it as the number that torch.cuda.ExternalStream accepts.
// `high_priority`: its pending work is scheduled ahead of the work of ordinary streams. Torch's own streams cannot be
// used: they come round-robin from a pool of 32, so that two lanes, or a lane and the caller, could get the same stream
// and deadlock. The stream is never destroyed, since captured graphs may refer to it.
int64_t new_stream(int device, bool high_priority);

// Returns whether the current stream of a device is being captured, even if the capture has failed.
bool capturing(int device);

// Waits for a device, and returns whether memory that other ranks can reach may be freed now.
//
// torch itself waits for the device before it frees such memory. During a capture, by any thread, that is an error, and
// so it is once CUDA has failed. A destructor would throw it, which ends the process.
bool may_free(int device) noexcept;

}  // namespace symm_overlap::cuda
