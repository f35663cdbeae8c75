#include "fibers.h"

#include <ucontext.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace host_gpu {

thread_local uint3 thread_index, block_index;
thread_local dim3 block_size, grid_size;

namespace {

constexpr size_t kStackBytes = 64 << 10;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  bool at_barrier = false;
};

thread_local Fiber* current = nullptr;
thread_local ucontext_t scheduler;
thread_local const std::function<void()>* body_of_fibers = nullptr;
thread_local bool met = false;  // whether a thread of this grid has reached a barrier

void leave() {
  Fiber* fiber = current;
  swapcontext(&fiber->context, &scheduler);
}

void enter() {
  (*body_of_fibers)();
  current->done = true;
  leave();
}

void start(Fiber& fiber) {
  fiber.done = fiber.at_barrier = false;
  if (fiber.stack == nullptr) fiber.stack.reset(new char[kStackBytes]);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
}

void resume(Fiber& fiber, unsigned index) {
  current = &fiber;
  thread_index = {index, 0, 0};
  swapcontext(&scheduler, &fiber.context);
  current = nullptr;
}

void run_block(unsigned threads) {
  static thread_local std::vector<Fiber> fibers;  // kept, so that their stacks are reused
  if (fibers.size() < threads) fibers.resize(threads);
  for (unsigned i = 0; i < threads; ++i) start(fibers[i]);
  for (unsigned done = 0; done < threads;) {
    unsigned waiting = done = 0;
    for (unsigned i = 0; i < threads; ++i) {
      if (!fibers[i].done && !fibers[i].at_barrier) resume(fibers[i], i);
      done += fibers[i].done;
      waiting += fibers[i].at_barrier;
    }
    if (done + waiting < threads) continue;
    for (unsigned i = 0; i < threads; ++i) fibers[i].at_barrier = false;
  }
}

}  // namespace

// Most kernels with many blocks only compute. Their threads may run one after another, which takes far less time. The
// first block shows whether the threads meet at barriers. Either all blocks have barriers or none.
void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  grid_size = dim3(blocks);
  block_size = dim3(threads);
  body_of_fibers = &body;
  met = false;
  static thread_local std::minstd_rand random;
  const bool backwards = random() % 2 == 1;  // CUDA promises no order
  for (unsigned i = 0; i < blocks; ++i) {
    block_index = {backwards ? blocks - 1 - i : i, 0, 0};
    if (i == 0 || met) {
      run_block(threads);
      continue;
    }
    for (unsigned thread = 0; thread < threads; ++thread) {
      thread_index = {thread, 0, 0};
      body();
    }
  }
  body_of_fibers = nullptr;
}

void pause_thread(unsigned nanoseconds) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
  if (current != nullptr) leave();
}

void block_barrier() {
  if (current == nullptr) {
    std::fputs("host GPU: a barrier in a block where the first one had none\n", stderr);
    std::abort();
  }
  met = true;
  current->at_barrier = true;
  leave();
}

}  // namespace host_gpu
