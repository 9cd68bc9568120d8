// What a team of threads decodes a `ctx` tile from: jobs, which are rows of the C ABI, the memory that the team shares,
// and the tile's old values. Does not decode.
#pragma once

#include <cstring>

#include "ctx_format.h"

namespace vds {
namespace ctx {

constexpr int kTeam = 128;        // threads
constexpr int kSelectors = 32;    // the first that looks for elements: in another warp than the stream's reader
constexpr uint32_t kGroup = 128;  // elements whose classes are counted together: a count fits a byte
constexpr uint32_t kGroups = kTileElements / kGroup, kGroupsEach = kGroups / kTeam;
constexpr uint32_t kChunk = 512;  // changes that are handed from the stream's reader to the others at a time
constexpr uint32_t kChunks = kTileElements / kChunk + 1;
constexpr int kClassColumns = kGapSymbols + kStepSymbols + 1;
static_assert(kGroups == kGroupsEach * kTeam && kChunk % kMaxLanes == 0, "");

// One tile to decode. A row of int64: the layout is part of the C ABI.
struct TileJob {
  int64_t old;         // address of the block's first element, before the changes
  int64_t row_length;  // elements of a row of the block
  int64_t row, rows, column, columns;
  int64_t data;  // address of the tile's bytes
  int64_t size;  // bytes << 1 | whether there are kMaxLanes states
  int64_t block;
};

// Where the changes of a block go, and what its tiles are coded with. A row of int64, as above.
struct BlockJob {
  int64_t first, room;           // elements of the output columns: the first, and how many
  int64_t first_class, classes;  // rows of the models
};

// Frequencies of gap and step symbols, and the last context: a row of uint16. The host has checked them.
struct ClassRow {
  uint16_t gaps[kGapSymbols], steps[kStepSymbols], last;
};
static_assert(sizeof(ClassRow) == 2 * kClassColumns, "a row without holes");

// What became of a block.
struct Outcome {
  uint32_t found;   // changes written, in no order; more than `room` where that was exceeded
  uint32_t faults;  // not 0 where a tile is malformed, or there was no room
};

// The old values of a tile, by the number of an element in it.
template <typename T>
class TileView {
 public:
  VDS_HD explicit TileView(const TileJob& job)
      : bits_(reinterpret_cast<const T*>(job.old)), row_length_(job.row_length),
        first_(job.row * job.row_length + job.column), columns_(static_cast<uint32_t>(job.columns)),
        elements_(static_cast<uint32_t>(job.rows * job.columns)) {}
  VDS_HD T old(uint32_t place) const { return bits_[place]; }

  // Calls visit(element's context, its place in the block) for each of a group until that returns true.
  template <typename Visit>
  VDS_HD void each_of(uint32_t group, Visit visit) const {
    uint32_t element = group * kGroup;
    const uint32_t end = element + kGroup < elements_ ? element + kGroup : elements_;
    uint32_t row = element / columns_, column = element % columns_;
    while (element < end) {
      const uint32_t left = columns_ - column, run = left < end - element ? left : end - element;
      if (each_in_row(first_ + row * row_length_ + column, run, visit)) return;
      element += run;
      column = 0;
      ++row;
    }
  }

 private:
  static constexpr uint32_t kWide = 16 / sizeof(T);

  template <typename Visit>
  VDS_HD bool each_in_row(int64_t place, uint32_t n, Visit& visit) const {
    const T* from = bits_ + place;
    uint32_t i = 0;
    for (; i < n && reinterpret_cast<uintptr_t>(from + i) % 16 != 0; ++i)
      if (visit(context(from[i]), static_cast<uint32_t>(place + i))) return true;
    for (; i + kWide <= n; i += kWide) {
      T wide[kWide];
      std::memcpy(wide, __builtin_assume_aligned(from + i, 16), 16);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (uint32_t k = 0; k < kWide; ++k)
        if (visit(context(wide[k]), static_cast<uint32_t>(place + i + k))) return true;
    }
    for (; i < n; ++i)
      if (visit(context(from[i]), static_cast<uint32_t>(place + i))) return true;
    return false;
  }

  const T* bits_;
  int64_t row_length_, first_;
  uint32_t columns_, elements_;
};

// The state of the thread that reads a tile's stream, between two phases.
struct Reading {
  uint32_t states[kMaxLanes];
  uint32_t at;      // bytes of states and words taken from the front
  uint32_t loaded;  // bytes of raw bits taken from the back
  uint64_t window;  // of which so many bits are not used yet
  uint32_t have;
  uint32_t rank;  // of the next member of the class that may have changed
};

// What the team shares: 52 KiB.
struct Shared {
  uint64_t counts[kGroups][2];   // members of each of 16 classes in a group, a byte each
  uint32_t before[kGroups];      // members of the class at hand before a group
  uint8_t slots[kTotal];         // the symbol of each slot of the statistics at hand
  uint32_t codes[kStepSymbols];  // frequency | first slot << 16 of each symbol
  uint32_t chunk[2][kChunk];     // ranks or folded steps, by turns
  uint32_t places[kChunks];      // where in the output each chunk of the class at hand went
  uint32_t sums[kTeam];
  int32_t filled[2];  // of a chunk: how many; below kChunk in the last one, -1 where the tile is malformed
  uint32_t members;   // of the class at hand
  uint8_t class_of[kContexts];
  Reading reading;
};

}  // namespace ctx
}  // namespace vds
