// Compare two states of a tensor and compact what differs. Does not allocate: it stops when the caller's scratch is
// full.
#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "../vds_core.h"
#include "dispatch.h"

namespace {

constexpr int64_t kGroup = 64;  // bytes compared at once: one cache line of each side

// Bit i is set when byte i of the two groups differs. SSE2, which every x86-64 has, already outruns memory.
inline uint64_t differing_bytes(const char* before, const char* after) {
  uint64_t mask = 0;
#if defined(__SSE2__)
  for (int i = 0; i < 4; ++i) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(before) + i);
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(after) + i);
    const unsigned equal = static_cast<unsigned>(_mm_movemask_epi8(_mm_cmpeq_epi8(x, y)));
    mask |= static_cast<uint64_t>(equal ^ 0xFFFFu) << (16 * i);
  }
#else
  if (std::memcmp(before, after, kGroup) != 0)
    for (int i = 0; i < kGroup; ++i) mask |= static_cast<uint64_t>(before[i] != after[i]) << i;
#endif
  return mask;
}

template <typename T>
struct Compactor {
  T* before;
  const T* after;
  uint32_t offset;
  uint32_t* positions;
  T* old_out;
  T* new_out;
  int64_t found;

  template <bool advance>
  void emit(int64_t i) {
    positions[found] = offset + static_cast<uint32_t>(i);
    old_out[found] = before[i];
    new_out[found] = after[i];
    ++found;
    if (advance) before[i] = after[i];
  }
};

// Returns how many elements it compared: n, or less when there is no room for another group's changes.
// A run of groups is compared without a branch on what was found, and only then are its changes written: whether a
// group differs cannot be predicted, and a wrong guess would throw away the loads of memory that are under way.
template <typename T, bool advance>
int64_t diff(Compactor<T>& out, int64_t n, int64_t capacity) {
  constexpr int64_t per = kGroup / sizeof(T);
  constexpr uint64_t element = (1ull << sizeof(T)) - 1;
  constexpr int64_t run = 64;      // groups: what is found of them, and they, stay in the first-level cache
  constexpr int64_t ahead = 4096;  // bytes between a prefetch and its use: one run
  uint64_t masks[run];
  int64_t which[run];
  int64_t at = 0;
  while (at + per <= n) {
    const int64_t groups = std::min({run, (n - at) / per, (capacity - out.found) / per});
    if (groups == 0) return at;
    const char* const before = reinterpret_cast<const char*>(out.before + at);
    const char* const after = reinterpret_cast<const char*>(out.after + at);
    int64_t differing = 0;
    for (int64_t g = 0; g < groups; ++g) {
      // First the next run of one side, then of the other: memory is faster where it is not asked in turns.
      const char* const next = (g < run / 2 ? before + 2 * g * kGroup : after + (2 * g - run) * kGroup) + ahead;
      __builtin_prefetch(next);
      __builtin_prefetch(next + kGroup);
      masks[differing] = differing_bytes(before + g * kGroup, after + g * kGroup);
      which[differing] = g;
      differing += masks[differing] != 0;
    }
    for (int64_t d = 0; d < differing; ++d) {
      const int64_t first = at + which[d] * per;
      uint64_t mask = masks[d];
      do {
        const int k = __builtin_ctzll(mask) / static_cast<int>(sizeof(T));
        mask &= ~(element << (k * sizeof(T)));
        out.template emit<advance>(first + k);
      } while (mask != 0);
    }
    at += groups * per;
  }
  if (out.found + per > capacity) return at;
  for (; at < n; ++at)
    if (out.before[at] != out.after[at]) out.template emit<advance>(at);
  return n;
}

// What vds_diff is called with, and what it gives; Python declares the same (native/cpu.py).
struct Job {
  int64_t width;  // bytes of an element
  void* before;
  const void* after;
  int64_t n, offset;  // elements, and what their positions are counted from
  int64_t advance;    // whether to write `after` over `before`
  int64_t capacity;   // of the columns, at least one group of 64 bytes
  uint32_t* positions;
  void *old_out, *new_out;
  int64_t found, consumed;  // changes, in so many first elements
};

template <typename T>
void diff(Job& job) {
  Compactor<T> out{static_cast<T*>(job.before),
                   static_cast<const T*>(job.after),
                   static_cast<uint32_t>(job.offset),
                   job.positions,
                   static_cast<T*>(job.old_out),
                   static_cast<T*>(job.new_out),
                   0};
  job.consumed = job.advance ? diff<T, true>(out, job.n, job.capacity) : diff<T, false>(out, job.n, job.capacity);
  job.found = out.found;
}

}  // namespace

// Compares n elements and writes what differs to positions, old_out and new_out, until there may not be room for more.
// Returns 0, or -1 for an unknown width.
VDS_API int vds_diff(Job* job) {
  switch (job->width) {
    case 1: return diff<uint8_t>(*job), 0;
    case 2: return diff<uint16_t>(*job), 0;
    case 4: return diff<uint32_t>(*job), 0;
    case 8: return diff<uint64_t>(*job), 0;
    default: return -1;
  }
}
