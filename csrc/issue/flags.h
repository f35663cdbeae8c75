// Flags between a kernel and the copies that it waits for, or that wait for it.
#pragma once

namespace symm_overlap::issue {

// The flags of one call. Each is a word of this rank's own memory, identified by the chunk of rows that it stands for.
// Both functions act on the current stream.
class Flags {
 public:
  Flags() = default;
  Flags(const Flags&) = delete;
  Flags& operator=(const Flags&) = delete;
  virtual ~Flags() = default;

  // Sets a flag, after all that the stream has been given so far.
  virtual void raise(int chunk) = 0;
  // Lets the stream wait until a kernel has set a flag.
  virtual void await(int chunk) = 0;
};

}  // namespace symm_overlap::issue
