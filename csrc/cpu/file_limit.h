// The limit of open files, which any call that opens a file may reach.
#pragma once

#include <cerrno>

namespace symm_overlap::cpu {

inline bool out_of_files(int error) {
  return error == EMFILE || error == ENFILE;
}

// Advice that is appended to the error message.
constexpr const char* kFileAdvice =
    ". Each symmetric tensor keeps a file open, and so does each peer: free some, or raise the limit (ulimit -n).";

}  // namespace symm_overlap::cpu
