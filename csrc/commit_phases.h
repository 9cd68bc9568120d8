// The commit by a grid of threads, as phases with a barrier of the whole grid behind each: a GPU runs them in one
// launch and a host can. Writes every live element, or none if one of them is not as expected. One pass: to compare all
// before any is written would bring each line twice, since an update of millions of elements touches more than a cache
// holds. Does not launch anything, and does not check addresses: whoever staged the update did.
#pragma once

#include "vds_core.h"

#if defined(__CUDA_ARCH__)
#define VDS_UNROLL _Pragma("unroll")
#else
#define VDS_UNROLL
#endif

namespace vds {
namespace commit {

using Index = unsigned long long;
constexpr Index kNone = ~0ull;  // −1 for the host
constexpr int kAtOnce = 4;      // elements that a thread asks for before it needs the first

// Elements of one width. Segments are ascending and disjoint; targets are distinct.
template <typename T>
struct Update {
  const Segment* segments;
  int64_t count;
  const uint32_t* offsets;
  const T* expected;
  const T* values;
  int64_t n;
};

// Element 0 of the segment that covers element i of an update, or null when none does.
template <typename T>
VDS_HD inline T* first_of(const Update<T>& update, int64_t i) {
  int64_t low = 0, high = update.count;  // the last segment that begins at or before i is low − 1
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (update.segments[middle].first <= i)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == 0 || i >= update.segments[low - 1].last) return nullptr;
  return reinterpret_cast<T*>(update.segments[low - 1].address);
}

// Many threads may do so at once.
VDS_HD inline void lower(Index* to, Index found) {
#if defined(__CUDA_ARCH__)
  atomicMin(to, found);
#else
  if (found < *to) *to = found;
#endif
}

// Writes elements thread, thread + stride, … up to the first that is not as expected; returns that one's index, or n or
// more.
template <typename T>
VDS_HD inline int64_t write(const Update<T>& update, int64_t thread, int64_t stride) {
  int64_t i = thread;
  while (i < update.n) {
    // All is read before anything is written, for the compiler cannot know that a write is to none of it.
    uint32_t offsets[kAtOnce];
    T *live[kAtOnce], found[kAtOnce], expected[kAtOnce], values[kAtOnce];
    VDS_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t element = i + k * stride < update.n ? i + k * stride : i;
      offsets[k] = update.offsets[element];
      expected[k] = update.expected[element];
      values[k] = update.values[element];
    }
    VDS_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      live[k] = i + k * stride < update.n ? first_of(update, i + k * stride) : nullptr;
      if (live[k] != nullptr) found[k] = *(live[k] += offsets[k]);
    }
    VDS_UNROLL
    for (int k = 0; k < kAtOnce; ++k, i += stride) {
      if (live[k] == nullptr) continue;
      if (found[k] != expected[k]) return i;
      *live[k] = values[k];
    }
  }
  return i;
}

// *first becomes kNone when everything is written; or the lowest element whose live bits were not as expected, and then
// all is as it was. It is set by the launch itself, which costs a barrier and no operation of its own on the stream.
// `grid` calls a phase with the number of each of its threads, then waits for all of them; grid.last() does not wait.
// Grid::Own keeps a number for each thread.
template <typename T, typename Grid>
VDS_HD void run(const Update<T>& update, Index* first, const Grid& grid) {
  const int64_t stride = grid.threads();
  typename Grid::Own stopped(grid);
  grid([&](int64_t thread) {
    if (thread == 0) *first = kNone;
  });
  grid([&](int64_t thread) {
    stopped[thread] = write(update, thread, stride);
    if (stopped[thread] < update.n) lower(first, static_cast<Index>(stopped[thread]));
  });
  grid.last([&](int64_t thread) {
    if (*first == kNone) return;
    // What was written was compared equal to `expected` first.
    for (int64_t i = thread; i < stopped[thread] && i < update.n; i += stride) {
      T* const live = first_of(update, i);
      if (live != nullptr) live[update.offsets[i]] = update.expected[i];
    }
  });
}

}  // namespace commit
}  // namespace vds

#undef VDS_UNROLL
