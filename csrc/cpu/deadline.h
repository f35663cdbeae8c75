// How long a wait may last, in milliseconds. The argument of the call comes first, then the setting of the caller's
// context in Python, then SYMM_OVERLAP_TIMEOUT. If none of them is set, the limit is 300 s.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace symm_overlap::cpu {

// Creates the variable of Python's contexts that has the setting: a number, where 0 means "not set". To be called once,
// with the GIL. A context and not a thread has the setting, because tasks of asyncio share a thread.
pybind11::object new_timeout_variable();

// Returns the limit where neither an argument nor a context sets one.
int64_t process_timeout_ms();

// Returns the limit that applies for an argument. An argument of 0 means "not given".
int64_t timeout_ms_or_default(int64_t argument);

}  // namespace symm_overlap::cpu
