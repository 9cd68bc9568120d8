// The state hash: over runs, over strided boxes of live memory, and of changes. Does not own threads: callers split
// tensors.
#include <cstring>

#include "../vds_core.h"
#include "dispatch.h"

namespace {

using vds::kBlock;
using vds::kLanes;
using vds::Lanes;
using vds::Readings;
using vds::Seed;

constexpr int kMaxRank = 16;

struct KeyTable {
  alignas(64) int16_t lane[kLanes][kBlock];
  constexpr KeyTable() : lane() {
    for (int l = 0; l < kLanes; ++l)
      for (int64_t j = 0; j < kBlock; ++j) lane[l][j] = vds::unit_key(l, j);
  }
};
constexpr KeyTable kKeys;

// Σ T[first + i] · reading(units[i]) per lane, within one block. Compiled to pmullw and pmaddwd; sums wrap mod 2^32
// (-fwrapv), as the hash does.
VDS_CLONES void dot(const int16_t* __restrict units, int64_t first, int64_t n, Lanes* out) {
  const int16_t* __restrict t0 = kKeys.lane[0] + first;
  const int16_t* __restrict t1 = kKeys.lane[1] + first;
  const int16_t* __restrict t2 = kKeys.lane[2] + first;
  const int16_t* __restrict t3 = kKeys.lane[3] + first;
  int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Readings r = vds::readings(static_cast<uint16_t>(units[i]));
    s0 += r.once * t0[i];
    s1 += r.once * t1[i];
    s2 += r.twice * t2[i];
    s3 += r.twice * t3[i];
  }
  *out = {{static_cast<uint32_t>(s0), static_cast<uint32_t>(s1), static_cast<uint32_t>(s2), static_cast<uint32_t>(s3)}};
}

// The same for two whole blocks: each key is loaded once for both.
VDS_CLONES void dot_two(const int16_t* __restrict one, const int16_t* __restrict two, Lanes* out) {
  int32_t a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    const Readings a = vds::readings(static_cast<uint16_t>(one[i])), b = vds::readings(static_cast<uint16_t>(two[i]));
    a0 += a.once * kKeys.lane[0][i];
    a1 += a.once * kKeys.lane[1][i];
    a2 += a.twice * kKeys.lane[2][i];
    a3 += a.twice * kKeys.lane[3][i];
    b0 += b.once * kKeys.lane[0][i];
    b1 += b.once * kKeys.lane[1][i];
    b2 += b.twice * kKeys.lane[2][i];
    b3 += b.twice * kKeys.lane[3][i];
  }
  out[0] = {
      {static_cast<uint32_t>(a0), static_cast<uint32_t>(a1), static_cast<uint32_t>(a2), static_cast<uint32_t>(a3)}};
  out[1] = {
      {static_cast<uint32_t>(b0), static_cast<uint32_t>(b1), static_cast<uint32_t>(b2), static_cast<uint32_t>(b3)}};
}

void fold(Lanes& total, const Lanes& sums, Seed seed, int64_t block) {
  const Lanes key = vds::block_key(seed, static_cast<uint64_t>(block));
  for (int l = 0; l < kLanes; ++l) total.v[l] += sums.v[l] * key.v[l];
}

// Adds the units first … first+n-1 of a tensor.
void add_units(Lanes& total, const int16_t* units, int64_t first, int64_t n, Seed seed) {
  // Blocks of which two halves lie far enough apart: memory delivers more when it is read in two places.
  constexpr int64_t worthwhile = 32;
  Lanes sums[2];
  while (n > 0) {
    const int64_t lead = first % kBlock, block = first / kBlock;
    int64_t taken;
    if (lead == 0 && n >= worthwhile * kBlock) {
      const int64_t half = n / kBlock / 2;
      for (int64_t b = 0; b < half; ++b) {
        dot_two(units + b * kBlock, units + (half + b) * kBlock, sums);
        fold(total, sums[0], seed, block + b);
        fold(total, sums[1], seed, block + half + b);
      }
      taken = 2 * half * kBlock;
    } else {
      taken = kBlock - lead < n ? kBlock - lead : n;
      dot(units, lead, taken, sums);
      fold(total, sums[0], seed, block);
    }
    units += taken;
    first += taken;
    n -= taken;
  }
}

// Adds elements start … start+n-1 that lie `stride` elements apart in memory.
template <typename T>
void add_row(Lanes& total, const T* live, int64_t stride, int64_t start, int64_t n, Seed seed) {
  constexpr int per = vds::units_per(sizeof(T));
  if (sizeof(T) > 1 && stride == 1) {
    add_units(total, reinterpret_cast<const int16_t*>(live), start * per, n * per, seed);
    return;
  }
  constexpr int64_t batch = 1024;
  alignas(64) int16_t units[batch * per];
  for (int64_t at = 0; at < n; at += batch) {
    const int64_t taken = n - at < batch ? n - at : batch;
    for (int64_t i = 0; i < taken; ++i) {
      const T element = live[(at + i) * stride];
      if (sizeof(T) == 1)
        units[i] = static_cast<int16_t>(element);
      else
        std::memcpy(units + i * per, &element, sizeof(T));
    }
    add_units(total, units, (start + at) * per, taken * per, seed);
  }
}

// Single units, at unit `index`.
struct Scattered {
  Seed seed;
  uint64_t block = ~0ull;
  Lanes key{};

  void add(Lanes& total, uint64_t index, uint16_t unit) {
    const vds::Readings r = vds::readings(unit);
    add(total, index, r.once, r.twice);
  }
  void change(Lanes& total, uint64_t index, uint16_t before, uint16_t after) {
    const vds::Readings old = vds::readings(before), now = vds::readings(after);
    add(total, index, now.once - old.once, now.twice - old.twice);
  }

 private:
  void add(Lanes& total, uint64_t index, int32_t once, int32_t twice) {
    if (index / kBlock != block) {
      block = index / kBlock;
      key = vds::block_key(seed, block);
    }
    for (int l = 0; l < kLanes; ++l)
      total.v[l] +=
          key.v[l] * static_cast<uint32_t>(kKeys.lane[l][index % kBlock]) * static_cast<uint32_t>(l < 2 ? once : twice);
  }
};

// The k-th unit of an element.
template <typename T>
uint16_t unit(T element, int k) {
  return static_cast<uint16_t>(element >> (16 * k));
}

template <typename T>
Lanes changes(const uint32_t* positions, int64_t start, const T* before, const T* after, int64_t n, Seed seed) {
  constexpr int per = vds::units_per(sizeof(T));
  Lanes total{};
  Scattered scattered;
  scattered.seed = seed;
  for (int64_t i = 0; i < n; ++i)
    for (int k = 0; k < per; ++k)
      scattered.change(total, (static_cast<uint64_t>(start) + positions[i]) * per + k, unit(before[i], k),
                       unit(after[i], k));
  return total;
}

template <typename T>
Lanes strided(const T* live, int rank, const int64_t* sizes, const int64_t* strides, int64_t source,
              const int64_t* source_strides, Seed seed) {
  constexpr int per = vds::units_per(sizeof(T));
  Lanes total{};
  int64_t index[kMaxRank] = {};
  const int inner = rank - 1;
  Scattered scattered;
  scattered.seed = seed;
  for (;;) {
    if (source_strides[inner] == 1) {
      add_row(total, live, strides[inner], source, sizes[inner], seed);
    } else {
      for (int64_t i = 0; i < sizes[inner]; ++i)
        for (int k = 0; k < per; ++k)
          scattered.add(total, static_cast<uint64_t>(source + i * source_strides[inner]) * per + k,
                        unit(live[i * strides[inner]], k));
    }
    int d = inner - 1;
    for (; d >= 0; --d) {
      live += strides[d];
      source += source_strides[d];
      if (++index[d] < sizes[d]) break;
      live -= strides[d] * sizes[d];
      source -= source_strides[d] * sizes[d];
      index[d] = 0;
    }
    if (d < 0) return total;
  }
}

// In four places at once: one stream alone does not saturate memory, and this is to show what it can deliver.
VDS_CLONES uint64_t sum_words(const uint64_t* words, int64_t n) {
  const int64_t quarter = n / 4;
  uint64_t total = 0;
  for (int64_t i = 0; i < quarter; ++i)
    total += words[i] + words[i + quarter] + words[i + 2 * quarter] + words[i + 3 * quarter];
  for (int64_t i = 4 * quarter; i < n; ++i) total += words[i];
  return total;
}

}  // namespace

// Width is 1, 2, 4 or 8; the return value is 0, or -1 for another width or rank.
// clang-format off
#define VDS_BY_WIDTH(width, ...)                 \
  switch (width) {                               \
    case 1: { using T = uint8_t; __VA_ARGS__; return 0; }  \
    case 2: { using T = uint16_t; __VA_ARGS__; return 0; } \
    case 4: { using T = uint32_t; __VA_ARGS__; return 0; } \
    case 8: { using T = uint64_t; __VA_ARGS__; return 0; } \
    default: return -1;                          \
  }
// clang-format on

VDS_API int vds_hash_run(int width, const void* bits, int64_t n, int64_t start, uint64_t a, uint64_t b,
                         uint32_t* lanes) {
  Lanes total{};
  VDS_BY_WIDTH(width, add_row(total, static_cast<const T*>(bits), 1, start, n, Seed{a, b});
               std::memcpy(lanes, total.v, sizeof total.v))
}

// Sizes are at least 1, rank at least 1.
VDS_API int vds_hash_strided(int width, const void* live, int rank, const int64_t* sizes, const int64_t* strides,
                             int64_t source, const int64_t* source_strides, uint64_t a, uint64_t b, uint32_t* lanes) {
  if (rank < 1 || rank > kMaxRank) return -1;
  VDS_BY_WIDTH(width, const Lanes total = strided(static_cast<const T*>(live), rank, sizes, strides, source,
                                                  source_strides, Seed{a, b});
               std::memcpy(lanes, total.v, sizeof total.v))
}

VDS_API int vds_hash_changes(int width, const uint32_t* positions, int64_t start, const void* before, const void* after,
                             int64_t n, uint64_t a, uint64_t b, uint32_t* lanes) {
  VDS_BY_WIDTH(width, const Lanes total = changes(positions, start, static_cast<const T*>(before),
                                                  static_cast<const T*>(after), n, Seed{a, b});
               std::memcpy(lanes, total.v, sizeof total.v))
}

VDS_API uint64_t vds_read_sum(const void* data, int64_t words) {
  return sum_words(static_cast<const uint64_t*>(data), words);
}
