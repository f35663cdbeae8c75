#include "cpu/shared_object.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "cpu/available_memory.h"
#include "cpu/file_limit.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace symm_overlap::cpu {

namespace {

constexpr size_t kPiece = 4 << 20;

std::string reason(int error = errno) {
  return std::strerror(error);
}

std::string mib(double bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MiB", bytes / (1 << 20));
  return text;
}

// The free and the total space of the file system, for error messages.
std::string room() {
  struct statvfs fs{};
  if (statvfs(shm_dir().c_str(), &fs) != 0) {
    return "its size cannot be read: " + reason();
  }
  return mib(double(fs.f_bavail) * fs.f_frsize) + " free of " + mib(double(fs.f_blocks) * fs.f_frsize);
}

// The bytes that can still be reserved: a larger request must fail before it takes the memory of other processes, which
// the kernel would end. Memory of a file system in memory counts as long as it is available.
size_t most_bytes() {
  struct statvfs fs{};
  if (statvfs(shm_dir().c_str(), &fs) != 0) return SIZE_MAX;
  size_t most = size_t{fs.f_bavail} * fs.f_frsize;
  struct statfs kind{};
  if (statfs(shm_dir().c_str(), &kind) == 0 && kind.f_type == TMPFS_MAGIC) {
    most = std::min(most, available_memory());
  }
  return most;
}

// Why space could not be reserved, and what to do.
std::string why_not_reserved(int error) {
  if (error == EFBIG) {
    return "files of this process cannot be that large (ulimit -f)";
  }
  if (error == EPERM || error == ENOSYS || error == EOPNOTSUPP) {
    return "this process may not reserve space in " + shm_dir() + " (" + reason(error) +
           "). If a sandbox filters system calls, allow fallocate.";
  }
  return shm_dir() + " has " + room() + ", of which at most " + mib(double(most_bytes())) + " can be had now (" +
         reason(error) +
         "). Free symmetric tensors, raise the memory limit of the container or job, mount a larger tmpfs (docker run "
         "--shm-size=..., or mount -o remount,size=... " +
         shm_dir() + "), or set SYMM_OVERLAP_SHM_DIR to one with room.";
}

}  // namespace

const std::string& shm_dir() {
  static const auto* const dir = [] {  // never destroyed: threads may still wait
    const char* set = std::getenv("SYMM_OVERLAP_SHM_DIR");
    return new std::string(set != nullptr && *set != '\0' ? set : "/dev/shm");
  }();
  return *dir;
}

SharedObject SharedObject::create(size_t bytes, const char* purpose) {
  SharedObject object;
  // With O_EXCL, no process can give the file a name later.
  object.fd_ = ::open(shm_dir().c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  int error = errno;
  TORCH_CHECK(
      object.fd_ >= 0, "symm_overlap: cannot create ", mib(bytes), " of shared memory for ", purpose, " in ", shm_dir(),
      ": ", reason(error),
      out_of_files(error) ? kFileAdvice : ". Mount a writable tmpfs there, or set SYMM_OVERLAP_SHM_DIR to one.");
  TORCH_CHECK(bytes <= most_bytes(), "symm_overlap: asked for ", mib(bytes), " (", bytes,
              " bytes) of shared memory for ", purpose, ", but ", why_not_reserved(ENOSPC));
  // In pieces: on some kernels a signal undoes a whole request, and a timer would interrupt a large one every time.
  for (size_t done = 0; done < bytes; done += error == 0 ? kPiece : 0) {
    error = ::posix_fallocate(object.fd_, static_cast<off_t>(done), static_cast<off_t>(std::min(kPiece, bytes - done)));
    TORCH_CHECK(error == 0 || error == EINTR, "symm_overlap: asked for ", mib(bytes), " (", bytes,
                " bytes) of shared memory for ", purpose, ", but ", why_not_reserved(error));
  }
  object.bytes_ = bytes;
  object.map("a new object");
  return object;
}

SharedObject SharedObject::open(const Address& address) {
  SharedObject object;
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  object.fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat info{};
  const bool opened = object.fd_ >= 0 && ::fstat(object.fd_, &info) == 0;
  const int error = errno;
  TORCH_CHECK(opened, "symm_overlap: cannot open the shared memory of pid ", address.pid, ": ", reason(error),
              out_of_files(error)
                  ? kFileAdvice
                  : ". Ranks must run as one user in one pid namespace (containers: share it, as with docker run "
                    "--pid=...).");
  TORCH_CHECK(info.st_dev == address.device && info.st_ino == address.inode &&
                  static_cast<size_t>(info.st_size) == address.bytes,
              "symm_overlap: pid ", address.pid,
              " is not the peer that announced itself: do the ranks share one pid namespace?");
  object.bytes_ = address.bytes;
  object.map("a peer's object");
  object.close_file();
  return object;
}

void SharedObject::map(const char* what) {
  data_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    TORCH_CHECK(false, "symm_overlap: cannot map ", mib(bytes_), " of ", what, ": ", reason());
  }
  // Cause the page faults here and not inside the first overlapped call. It is only a hint, and old kernels reject it.
  (void)::madvise(data_, bytes_, MADV_POPULATE_WRITE);
}

void SharedObject::close_file() {
  ::close(std::exchange(fd_, -1));
}

SharedObject::Address SharedObject::address() const {
  struct stat info{};
  TORCH_CHECK(::fstat(fd_, &info) == 0, "symm_overlap: fstat: ", reason());
  return {::getpid(), fd_, static_cast<uint64_t>(info.st_dev), static_cast<uint64_t>(info.st_ino), bytes_};
}

SharedObject::SharedObject(SharedObject&& other) noexcept {
  *this = std::move(other);
}

SharedObject& SharedObject::operator=(SharedObject&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

SharedObject::~SharedObject() {
  if (data_ != nullptr) {
    ::munmap(data_, bytes_);
  }
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

}  // namespace symm_overlap::cpu
