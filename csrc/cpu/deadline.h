// How long a wait may last, in milliseconds. The argument of the call comes first, then the setting of the calling
// thread, then SYMM_OVERLAP_TIMEOUT. If none of them is set, the limit is 300 s.
#pragma once

#include <cstdint>

namespace symm_overlap::cpu {

// Sets the limit for the calling thread; 0 removes the setting.
void set_thread_timeout_ms(int64_t timeout_ms);

// Returns the limit that applies for an argument. An argument of 0 means "not given".
int64_t timeout_ms_or_default(int64_t argument);

}  // namespace symm_overlap::cpu
