#include "cpu/epoch_slot.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace symm_overlap::cpu {

namespace {

// Counted in pause instructions. All together take about 5 us, which is longer than a barrier between running ranks and
// shorter than a time slice. The first checks follow one another closely, for a peer that is about to signal. Later
// checks are further and further apart, because each check takes the line away from the peer that must write it.
constexpr int kCloseLooks = 32;
constexpr int kMostAtOnce = 16;
constexpr int kPauses = 200;
constexpr int kYields = 4;  // if there are more ranks than cores, the peer may be waiting for this very core

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void EpochSlot::signal(uint32_t value) {
  // Sequentially consistent on both sides: either the sleeper sees the new epoch, or we see the sleeper.
  epoch.store(value, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) {
    futex(&epoch, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

bool EpochSlot::spin(uint32_t expected) const {
  int pause = 1;
  for (int paused = 0; paused < kPauses; paused += pause) {
    if (seen(expected)) {
      return reached(expected);
    }
    if (paused >= kCloseLooks && pause < kMostAtOnce) {
      pause *= 2;
    }
    for (int i = 0; i < pause; ++i) {
      relax();
    }
  }
  for (int i = 0; i < kYields; ++i) {
    if (seen(expected)) {
      return reached(expected);
    }
    ::sched_yield();
  }
  return reached(expected);
}

void EpochSlot::sleep(uint32_t expected, int64_t slice_ms, const std::function<void()>& idle) {
  const timespec slice{0, static_cast<long>(slice_ms * 1'000'000)};
  struct Sleeping {
    std::atomic<uint32_t>& count;
    explicit Sleeping(std::atomic<uint32_t>& c) : count(c) { count.fetch_add(1, std::memory_order_seq_cst); }
    ~Sleeping() { count.fetch_sub(1, std::memory_order_relaxed); }
  } sleeping(sleepers);
  while (true) {
    const uint32_t found = epoch.load(std::memory_order_seq_cst);
    if (epoch_reached(found, expected)) {
      return;
    }
    if (futex(&epoch, FUTEX_WAIT, found, &slice) != 0) {
      idle();
    }
  }
}

}  // namespace symm_overlap::cpu
