// How long a wait may last, in milliseconds: argument, else the calling thread's setting, else SYMM_OVERLAP_TIMEOUT,
// else 300 s.
#pragma once

#include <cstdint>

namespace symm_overlap::cpu {

// Sets it for the calling thread; 0 means none.
void set_thread_timeout_ms(int64_t timeout_ms);

// Resolves an argument, where 0 means "not given".
int64_t timeout_ms_or_default(int64_t argument);

}  // namespace symm_overlap::cpu
