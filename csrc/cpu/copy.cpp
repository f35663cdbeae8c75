#include "cpu/copy.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace symm_overlap::cpu {

namespace {

constexpr int64_t kBeyondCache = int64_t{1} << 20;  // a second-level cache may hold anything smaller

#ifdef __x86_64__

constexpr int64_t kLine = 64;  // a line that is written as a whole need not be read first

bool can_stream() {
  return __builtin_cpu_supports("avx") != 0;
}

__attribute__((target("avx"))) void stream(char* target, const char* source, int64_t bytes) {
  const int64_t before = std::min<int64_t>(bytes, -reinterpret_cast<uintptr_t>(target) % kLine);
  std::memcpy(target, source, before);
  int64_t at = before;
  for (; at + kLine <= bytes; at += kLine) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at + kLine / 2));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at), first);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at + kLine / 2), second);
  }
  std::memcpy(target + at, source + at, bytes - at);
  _mm_sfence();  // streaming stores are not ordered before later stores, but no signal may be seen before them
}

#else

bool can_stream() {
  return false;
}

void stream(char* target, const char* source, int64_t bytes) {
  std::memcpy(target, source, bytes);
}

#endif

}  // namespace

void copy(const at::Tensor& target, const at::Tensor& source) {
  if (target.sizes() != source.sizes() || target.scalar_type() != source.scalar_type() || !target.is_contiguous() ||
      !source.is_contiguous() || !target.is_cpu() || !source.is_cpu()) {
    target.copy_(source);
    return;
  }
  RECORD_FUNCTION("symm_overlap::copy", std::vector<c10::IValue>({target, source}));
  copy_bytes(static_cast<char*>(target.mutable_data_ptr()), static_cast<const char*>(source.const_data_ptr()),
             static_cast<int64_t>(target.nbytes()));
}

void copy_bytes(char* target, const char* source, int64_t bytes) {
  if (bytes < kBeyondCache || !can_stream()) {  // to copy a few rows takes less time than torch's dispatcher
    std::memcpy(target, source, bytes);
    return;
  }
  at::parallel_for(0, bytes, kBeyondCache,
                   [&](int64_t begin, int64_t end) { stream(target + begin, source + begin, end - begin); });
}

}  // namespace symm_overlap::cpu
