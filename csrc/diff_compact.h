// Comparing two states of a tensor by teams of threads, and compacting what differs in order, as phases with a barrier
// behind each: a GPU runs them and a host can. Three passes: mark what differs, add up how much that is, write it. Only
// the first reads both states whole; a bit an element is what the others go by. Does not launch anything.
#pragma once

#include <cstring>

#include "vds_core.h"

namespace vds {
namespace diff {

constexpr int kTeam = 128;                            // threads that share a tile
constexpr int kPer = 8;                               // elements of a mask byte
constexpr int64_t kTileBytes = 8 * kTeam;             // of the mask: one 64-bit word a thread where it is read
constexpr int64_t kTileElements = kPer * kTileBytes;  // 8192
constexpr int kAdders = 1024;                         // threads that add up the tiles' counts
constexpr int kGroup = 8;                             // threads whose counts one thread adds up

VDS_HD inline int64_t tiles_of(int64_t n) { return (n + kTileElements - 1) / kTileElements; }

// 16 bytes or less of either state at a time, if these are aligned.
template <typename T>
VDS_HD inline uint32_t differing(const T* before, const T* after, bool aligned) {
  constexpr size_t size = kPer * sizeof(T), align = size < 16 ? size : 16;
  uint32_t mask = 0;
  if (aligned) {
    T old[kPer], now[kPer];
    std::memcpy(old, __builtin_assume_aligned(before, align), size);
    std::memcpy(now, __builtin_assume_aligned(after, align), size);
    for (int i = 0; i < kPer; ++i) mask |= static_cast<uint32_t>(old[i] != now[i]) << i;
  } else {
    for (int i = 0; i < kPer; ++i) mask |= static_cast<uint32_t>(before[i] != after[i]) << i;
  }
  return mask;
}

VDS_HD inline uint32_t count_bits(uint64_t mask) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__popcll(mask));
#else
  return static_cast<uint32_t>(__builtin_popcountll(mask));
#endif
}

// The lowest bit that is set.
VDS_HD inline int first_bit(uint64_t mask) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(mask)) - 1;
#else
  return __builtin_ctzll(mask);
#endif
}

// Writes the mask of a tile, u8 [kTileBytes], zero beyond element n, and how many bits are set in it.
template <typename T, typename Team>
VDS_HD void mark_tile(int64_t tile, const T* before, const T* after, int64_t n, bool aligned, uint8_t* masks,
                      uint32_t* counts, uint32_t (&sums)[kTeam], const Team& team) {
  team([&](int thread) {
    uint32_t found = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 4
#endif
    for (int64_t i = 0; i < kTileBytes / kTeam; ++i) {
      const int64_t byte = tile * kTileBytes + i * kTeam + thread, first = byte * kPer;
      uint32_t mask = 0;
      if (first + kPer <= n) {
        mask = differing(before + first, after + first, aligned);
      } else {
        for (int64_t k = first; k < n; ++k) mask |= static_cast<uint32_t>(before[k] != after[k]) << (k - first);
      }
      masks[byte] = static_cast<uint8_t>(mask);
      found += count_bits(mask);
    }
    sums[thread] = found;
  });
  team([&](int thread) {
    if (thread % kGroup != 0) return;
    uint32_t sum = 0;
    for (int i = 0; i < kGroup; ++i) sum += sums[thread + i];
    sums[thread] = sum;
  });
  team([&](int thread) {
    if (thread != 0) return;
    uint32_t sum = 0;
    for (int i = 0; i < kTeam; i += kGroup) sum += sums[i];
    counts[tile] = sum;
  });
}

// Turns the counts of tiles into what lies before each of them, and in counts[tiles], all.
template <typename Team>
VDS_HD void add_up(uint32_t* counts, int64_t tiles, uint32_t (&sums)[kAdders], const Team& team) {
  const int64_t each = (tiles + kAdders - 1) / kAdders;
  const auto last = [&](int thread) { return (thread + 1) * each < tiles ? (thread + 1) * each : tiles; };
  team([&](int thread) {
    uint32_t sum = 0;
    for (int64_t i = thread * each; i < last(thread); ++i) sum += counts[i];
    sums[thread] = sum;
  });
  team([&](int thread) {
    uint32_t before = 0;
    for (int other = 0; other < thread; ++other) before += sums[other];
    for (int64_t i = thread * each; i < last(thread); ++i) {
      const uint32_t own = counts[i];
      counts[i] = before;
      before += own;
    }
    if (thread == kAdders - 1) counts[tiles] = before;
  });
}

// What differs, in order, to its place in the columns.
template <typename T>
struct Columns {
  uint32_t* positions;
  T *before, *after;
};

template <typename T, typename Team>
VDS_HD void write_tile(int64_t tile, T* before, const T* after, const uint8_t* masks, const uint32_t* offsets,
                       bool advance, const Columns<T>& out, uint32_t (&sums)[kTeam], const Team& team) {
  const auto mask_of = [&](int thread) {
    uint64_t mask;
    std::memcpy(&mask, __builtin_assume_aligned(masks + tile * kTileBytes + 8 * thread, 8), 8);
    return mask;
  };
  team([&](int thread) { sums[thread] = count_bits(mask_of(thread)); });
  team([&](int thread) {
    uint32_t to = offsets[tile];
    for (int other = 0; other < thread; ++other) to += sums[other];
    const int64_t first = tile * kTileElements + 8 * kPer * thread;
    for (uint64_t mask = mask_of(thread); mask != 0; mask &= mask - 1, ++to) {
      const int64_t i = first + first_bit(mask);
      out.positions[to] = static_cast<uint32_t>(i);
      out.before[to] = before[i];
      out.after[to] = after[i];
      if (advance) before[i] = after[i];
    }
  });
}

}  // namespace diff
}  // namespace vds
