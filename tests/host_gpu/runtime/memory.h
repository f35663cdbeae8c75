// The memory that CUDA knows. Device memory is memory of the host.
#pragma once

#include <cstddef>

#include "common.h"

namespace host_gpu {

enum class Kind { kHost, kRegistered, kDevice };

struct Memory {
  char* start = nullptr;
  size_t size = 0;
  int device = 0;
  Kind kind = Kind::kHost;
};

void add_memory(void* start, size_t size, Kind kind);
// Returns false if no memory of this kind starts there.
bool remove_memory(void* start, Kind kind);
// Finds the memory that contains an address. Returns false if CUDA does not know that memory.
bool find_memory(const void* address, Memory* found);

// Ends the process if an access begins in memory that CUDA knows and ends outside of it.
void check_bounds(const void* address, size_t bytes, const char* access);

size_t total_memory();

}  // namespace host_gpu
