// Flags between a kernel and the copies that it waits for, or that wait for it.
#pragma once

namespace symm_overlap::issue {

// The flags of one call. Each is a word of this rank's own memory, identified by the chunk of rows that it stands for.
// A driver that raises them and waits for them has a class of its own.
class Flags {
 public:
  Flags() = default;
  Flags(const Flags&) = delete;
  Flags& operator=(const Flags&) = delete;
  virtual ~Flags() = default;
};

}  // namespace symm_overlap::issue
