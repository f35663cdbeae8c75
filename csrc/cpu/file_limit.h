// The limit of open files, which any call that opens a file may reach.
#pragma once

#include <cerrno>

namespace symm_overlap::cpu {

inline bool out_of_files(int error) {
  return error == EMFILE || error == ENFILE;
}

// Advice that is appended to the error message.
constexpr const char* kFileAdvice =
    ". Each symmetric tensor and each peer keeps a file open: free some tensors, or raise the limit (ulimit -n).";

}  // namespace symm_overlap::cpu
