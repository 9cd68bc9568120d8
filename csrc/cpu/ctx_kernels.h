// What the `ctx` codec does with one tile, for each width and instruction set.
#pragma once

#include "../ctx_format.h"

namespace vds {
namespace ctx {

constexpr int64_t kMembersSlack = 40;  // counts that are read behind those of a tile's last word

// Memory for one tile at a time.
struct Scratch {
  uint8_t* contexts;   // kTileElements + 64
  uint64_t* masks;     // kTileElements / 64
  uint32_t* before;    // kTileElements / 64 + kMembersSlack
  uint32_t* elements;  // kTileElements
  uint32_t* codes;     // 2 kTileElements + kMaxClasses
  uint16_t* words;     // one more
  uint8_t* raw;        // 8 kTileElements + 8
};

// What changes in a tile, class by class: its elements, ascending in each class, as indices into the tile's in
// row-major order, and their folded steps.
template <typename T>
struct TileChanges {
  uint32_t* elements;  // those of the tile may be written to
  const T* steps;
  const uint32_t* ends;  // of each class
  uint32_t begin, end;   // where the tile's are

  int64_t n() const { return end - begin; }
  uint32_t begin_of(uint32_t c) const { return c == 0 ? begin : ends[c - 1]; }
};

// A block of which the tiles are parts, in its old state.
template <typename T>
struct Old {
  const T* bits;
  int64_t row_length;
};

// Where changes go: positions in the block and new values, in any order, and a mark of each position: bit p mod 64 of
// word ⌊p / 64⌋.
template <typename T>
struct Changed {
  uint32_t* positions;
  T* values;
  uint64_t* marks;
};

template <typename T>
struct TileKernels {
  // Returns how many changes it found, or -1 if the tile is malformed or there is no room for them.
  int64_t (*decode[2])(const Model&, const Old<T>&, const Tile&, const Tile& next, const uint8_t* data, int64_t size,
                       const Scratch&, const Changed<T>& out, int64_t room);
  void (*order)(const Changed<T>& found, int64_t n, int64_t words, uint32_t* before, uint32_t* positions, T* values);
  // Writes the tile's bytes and returns their number, or -1 if there is no room.
  int64_t (*encode)(const Model&, const Old<T>&, const Tile&, const Tile& next, const TileChanges<T>&, int lanes,
                    const Scratch&, uint8_t* out, int64_t room);
  // Adds the tile's symbols to the counts of each class.
  void (*tally)(const Model&, const Old<T>&, const Tile&, const Tile& next, const TileChanges<T>&, const Scratch&,
                uint64_t* gaps, uint64_t* steps);
};

struct Kernels {
  TileKernels<uint8_t> bytes;
  TileKernels<uint16_t> halves;
  TileKernels<uint32_t> words;
};

extern const Kernels kPortable;
#if defined(VDS_CTX_AVX2)
extern const Kernels kAvx2;
#endif

}  // namespace ctx
}  // namespace vds

// Calls what depends on the width of elements, or returns `unknown`.
#define VDS_CTX_WIDTHS(call, unknown) \
  switch (width) {                    \
    case 1: return call(uint8_t);     \
    case 2: return call(uint16_t);    \
    case 4: return call(uint32_t);    \
    default: return unknown;          \
  }
