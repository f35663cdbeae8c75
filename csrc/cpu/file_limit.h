// The limit of open files, which every way to open one may meet.
#pragma once

#include <cerrno>

namespace symm_overlap::cpu {

inline bool out_of_files(int error) {
  return error == EMFILE || error == ENFILE;
}

// To follow the text of the error.
constexpr const char* kFileAdvice =
    ". Each symmetric tensor keeps a file open, and so does each peer: free some, or raise the limit (ulimit -n).";

}  // namespace symm_overlap::cpu
