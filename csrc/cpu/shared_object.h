// A private piece of shared memory. It never has a name, so nothing is left behind, however a process ends. A peer
// opens it through the owner's open file, which the kernel allows only for the same user.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace symm_overlap::cpu {

// The folder of the shared-memory file system: SYMM_OVERLAP_SHM_DIR, or /dev/shm if that is not set.
const std::string& shm_dir();

class SharedObject {
 public:
  // How a peer finds an object: the owner's file descriptor, and the inode to check that the file is the right one.
  struct Address {
    pid_t pid = 0;
    int fd = -1;
    uint64_t device = 0;
    uint64_t inode = 0;
    size_t bytes = 0;
  };

  // Creates an object of `bytes` zeroed bytes, owned by this process. Its pages are reserved now, so that a full file
  // system is an exception here and not a SIGBUS at the first write.
  static SharedObject create(size_t bytes, const char* purpose);
  // Maps a peer's object. The peer must still own it during this call, but not afterwards.
  static SharedObject open(const Address& address);

  SharedObject() = default;
  SharedObject(SharedObject&& other) noexcept;
  SharedObject& operator=(SharedObject&& other) noexcept;
  SharedObject(const SharedObject&) = delete;
  SharedObject& operator=(const SharedObject&) = delete;
  ~SharedObject();

  Address address() const;
  // To be called when no further peer will open the object. The mapping stays valid without the file.
  void close_file();

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void map(const char* what);

  int fd_ = -1;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace symm_overlap::cpu
