// Compare two states of a tensor and compact what differs. Does not allocate: it stops when the caller's scratch is full.
#include <cstring>

#include "../vds_core.h"
#include "dispatch.h"

namespace {

constexpr int64_t kGroup = 64;  // bytes compared at once: one cache line of each side

// First group at or after `at` that holds a difference; `groups` if there is none.
VDS_CLONES int64_t next_difference(const char* __restrict before, const char* __restrict after, int64_t at, int64_t groups) {
  for (; at < groups; ++at) {
    uint64_t x[kGroup / 8], y[kGroup / 8], any = 0;
    std::memcpy(x, before + at * kGroup, kGroup);
    std::memcpy(y, after + at * kGroup, kGroup);
    for (int i = 0; i < kGroup / 8; ++i) any |= x[i] ^ y[i];
    if (any) break;
  }
  return at;
}

template <typename T>
struct Compactor {
  T* before;
  const T* after;
  bool advance;
  uint32_t* positions;
  T* old_out;
  T* new_out;
  int64_t found = 0;

  // Elements from … to-1, without a branch on the outcome: the slot after the last found one is always writable.
  void take(int64_t from, int64_t to, int64_t offset) {
    for (int64_t i = from; i < to; ++i) {
      const T x = before[i], y = after[i];
      positions[found] = static_cast<uint32_t>(offset + i);
      old_out[found] = x;
      new_out[found] = y;
      found += x != y;
    }
    if (advance) std::memcpy(before + from, after + from, static_cast<size_t>(to - from) * sizeof(T));
  }
};

template <typename T>
int64_t diff(T* before, const T* after, int64_t n, int64_t offset, bool advance, int64_t capacity, uint32_t* positions,
             T* old_out, T* new_out, int64_t* consumed) {
  constexpr int64_t per = kGroup / sizeof(T);
  Compactor<T> out{before, after, advance, positions, old_out, new_out};
  const int64_t groups = n / per;
  int64_t at = 0;
  while (out.found + per < capacity) {
    at = next_difference(reinterpret_cast<const char*>(before), reinterpret_cast<const char*>(after), at, groups);
    if (at == groups) {
      out.take(groups * per, n, offset);
      *consumed = n;
      return out.found;
    }
    out.take(at * per, (at + 1) * per, offset);
    ++at;
  }
  *consumed = at * per;
  return out.found;
}

}  // namespace

// Compares n elements and writes what differs to positions (counted from `offset`), old and new, which have room for `capacity`
// (more than one group of 64 bytes). Returns how many were found in the first *consumed elements, or -1 for an unknown width.
VDS_API int64_t vds_diff(int width, void* before, const void* after, int64_t n, int64_t offset, int advance, int64_t capacity,
                         uint32_t* positions, void* old_out, void* new_out, int64_t* consumed) {
#define VDS_DIFF(T)                                                                                                   \
  return diff(static_cast<T*>(before), static_cast<const T*>(after), n, offset, advance != 0, capacity, positions,    \
              static_cast<T*>(old_out), static_cast<T*>(new_out), consumed)
  switch (width) {
    case 1: VDS_DIFF(uint8_t);
    case 2: VDS_DIFF(uint16_t);
    case 4: VDS_DIFF(uint32_t);
    case 8: VDS_DIFF(uint64_t);
    default: return -1;
  }
#undef VDS_DIFF
}
