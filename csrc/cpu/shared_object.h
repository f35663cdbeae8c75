// A private piece of shared memory. It never has a name, so nothing is left behind however a process ends: a peer opens
// it through the owner's open file, which the kernel grants to the same user only.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace symm_overlap::cpu {

// The folder of the shared-memory file system: SYMM_OVERLAP_SHM_DIR, else /dev/shm.
const std::string& shm_dir();

class SharedObject {
 public:
  // How a peer finds an object: the owner's descriptor, and the inode by which to know that it is the right one.
  struct Address {
    pid_t pid = 0;
    int fd = -1;
    uint64_t device = 0;
    uint64_t inode = 0;
    size_t bytes = 0;
  };

  // A new object of `bytes` zeroed bytes, owned by this process. Its pages are reserved now, so that a full
  // file system is an exception here and not a SIGBUS at the first write.
  static SharedObject create(size_t bytes, const char* purpose);
  // Maps a peer's object; the peer must still own it. From then on the mapping lives by itself.
  static SharedObject open(const Address& address);

  SharedObject() = default;
  SharedObject(SharedObject&& other) noexcept;
  SharedObject& operator=(SharedObject&& other) noexcept;
  SharedObject(const SharedObject&) = delete;
  SharedObject& operator=(const SharedObject&) = delete;
  ~SharedObject();

  Address address() const;
  // Once no further peer will open the object: the mapping lives without the file.
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
