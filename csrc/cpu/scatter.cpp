// Gather from and scatter into live memory. Does not know tensors: addresses and offsets are vouched for by the caller.
#include <atomic>
#include <system_error>
#include <thread>

#include "../vds_core.h"
#include "dispatch.h"

namespace {

using vds::Segment;

constexpr int64_t kAhead = 64;           // elements between a prefetch and its use: random reads of DRAM are ~100 ns
constexpr int64_t kPerThread = 1 << 16;  // fewer elements than this are not worth a thread's start
constexpr int kMaxThreads = 64;

template <typename T>
struct Update {
  const Segment* segments;
  int64_t count;
  const uint32_t* offsets;
  const T* expected;
  const T* values;

  // Calls body(live, from, to) for the pieces of segments within [lo, hi), ascending, until one returns false.
  template <typename Body>
  void pieces(int64_t lo, int64_t hi, Body body) const {
    for (int64_t s = 0; s < count; ++s) {
      const int64_t from = segments[s].first > lo ? segments[s].first : lo;
      const int64_t to = segments[s].last < hi ? segments[s].last : hi;
      if (from < to && !body(reinterpret_cast<T*>(segments[s].address), from, to)) return;
    }
  }

  // Writes elements lo … hi-1 up to the first whose live bits are unexpected; returns the index it stopped at.
  // `first` becomes the lowest mismatch of all threads.
  int64_t write(int64_t lo, int64_t hi, std::atomic<int64_t>& first) const {
    int64_t done = hi;
    pieces(lo, hi, [&](T* live, int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        __builtin_prefetch(live + offsets[i + kAhead < to ? i + kAhead : to - 1], 1);
        T* const target = live + offsets[i];
        if (*target != expected[i]) {
          int64_t seen = first.load();
          while (i < seen && !first.compare_exchange_weak(seen, i)) {
          }
          done = i;
          return false;
        }
        *target = values[i];
      }
      return true;
    });
    return done;
  }

  // The undo log is `expected` itself: whatever was overwritten was compared equal to it first.
  void undo(int64_t lo, int64_t written) const {
    pieces(lo, written, [&](T* live, int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) live[offsets[i]] = expected[i];
      return true;
    });
  }
};

template <typename T>
int64_t scatter(const Update<T>& update, int64_t n, int threads) {
  if (threads > n / kPerThread) threads = static_cast<int>(n / kPerThread);
  if (threads > kMaxThreads) threads = kMaxThreads;
  if (threads < 1) threads = 1;
  std::atomic<int64_t> first{n};
  int64_t written[kMaxThreads];
  std::thread helpers[kMaxThreads];
  const auto lo = [&](int t) { return n / threads * t + (n % threads) * t / threads; };
  const auto work = [&](int t) { written[t] = update.write(lo(t), lo(t + 1), first); };
  for (int t = 1; t < threads; ++t) {
    try {
      helpers[t] = std::thread(work, t);
    } catch (const std::system_error&) {  // the process is at its limit of threads: do that share here
      work(t);
    }
  }
  work(0);
  for (int t = 1; t < threads; ++t)
    if (helpers[t].joinable()) helpers[t].join();
  if (first == n) return -1;
  for (int t = 0; t < threads; ++t) update.undo(lo(t), written[t]);
  return first;
}

template <typename T>
void gather(const T* live, const uint32_t* offsets, int64_t n, T* out) {
  for (int64_t i = 0; i < n; ++i) {
    __builtin_prefetch(live + offsets[i + kAhead < n ? i + kAhead : n - 1]);
    out[i] = live[offsets[i]];
  }
}

}  // namespace

// Returns -1 when everything was written, the index of the first element that was not as expected when nothing was, or
// -2 for an unknown width. Segments are ascending, disjoint and within n; targets are distinct.
VDS_API int64_t vds_scatter(int width, const void* segments, int64_t count, const uint32_t* offsets,
                            const void* expected, const void* values, int64_t n, int threads) {
#define VDS_SCATTER(T)                                                                                             \
  return scatter(Update<T>{static_cast<const Segment*>(segments), count, offsets, static_cast<const T*>(expected), \
                           static_cast<const T*>(values)},                                                         \
                 n, threads)
  switch (width) {
    case 1: VDS_SCATTER(uint8_t);
    case 2: VDS_SCATTER(uint16_t);
    case 4: VDS_SCATTER(uint32_t);
    case 8: VDS_SCATTER(uint64_t);
    default: return -2;
  }
#undef VDS_SCATTER
}

// 0, or -1 for an unknown width.
VDS_API int vds_gather(int width, const void* live, const uint32_t* offsets, int64_t n, void* out) {
#define VDS_GATHER(T)                                                    \
  gather(static_cast<const T*>(live), offsets, n, static_cast<T*>(out)); \
  return 0
  switch (width) {
    case 1: VDS_GATHER(uint8_t);
    case 2: VDS_GATHER(uint16_t);
    case 4: VDS_GATHER(uint32_t);
    case 8: VDS_GATHER(uint64_t);
    default: return -1;
  }
#undef VDS_GATHER
}
