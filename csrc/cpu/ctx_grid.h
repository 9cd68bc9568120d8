// How a block is cut into tiles, and its changes sorted by tile. Does not allocate.
#pragma once

#include <algorithm>
#include <cstring>

#include "arena.h"
#include "ctx_kernels.h"

namespace vds {
namespace ctx {

// A strip of columns, and its tiles: as many rows each as kTileElements hold.
struct Strip {
  int64_t column, columns;
  int64_t tile_rows() const { return columns >= kTileElements ? 1 : kTileElements / columns; }
  int64_t tiles(int64_t rows) const { return (rows + tile_rows() - 1) / tile_rows(); }
};

struct Grid {
  int64_t rows, row_length;
  const Strip* strips;
  int64_t count;

  // Calls visit(tile, its index, the next tile, which of the last one is itself) until it returns false.
  template <typename Visit>
  bool each_tile(Visit visit) const {
    int64_t s = 0, index = 0;
    for (Tile tile = at(0, 0); s < count;) {
      const bool down = tile.row + tile.rows < rows;
      s += !down;
      const Tile next = down ? at(s, tile.row + tile.rows) : s < count ? at(s, 0) : tile;
      if (!visit(tile, index++, next)) return false;
      tile = next;
    }
    return true;
  }
  Tile at(int64_t s, int64_t row) const {
    return {row, std::min(strips[s].tile_rows(), rows - row), strips[s].column, strips[s].columns};
  }
  int64_t tiles() const {
    int64_t n = 0;
    for (int64_t s = 0; s < count; ++s) n += strips[s].tiles(rows);
    return n;
  }
};

// What changes in a block, by position.
template <typename T>
struct Changes {
  const uint32_t* positions;
  const T *before, *after;
  int64_t n;

  bool ascend_below(int64_t end) const {
    int64_t sorted = 1;
    for (int64_t i = 1; i < n; ++i) sorted += positions[i - 1] < positions[i];
    return n == 0 || (sorted == n && positions[n - 1] < end);
  }
};

// The changes of a block by tile.
template <typename T>
class Sorted {
 public:
  Sorted(Arena& arena, const Grid& grid, int64_t n)
      : strips_(arena.take<StripTiles>(grid.count)), strip_of_(arena.take<uint16_t>(grid.row_length)),
        begins_(arena.take<int64_t>(grid.tiles())), ends_(arena.take<int64_t>(grid.tiles())),
        tiles_(arena.take<uint16_t>(n)), elements_(arena.take<uint32_t>(n)), moved_(arena.take<uint32_t>(n)),
        moved_before_(arena.take<T>(n)), moved_after_(arena.take<T>(n)) {}

  void sort(const Grid& grid, const Changes<T>& changes) {
    if (grid.rows == 1)
      follow(grid, changes);
    else
      distribute(grid, changes);
  }

  TileChanges<T> of(int64_t tile) const {
    const int64_t first = begins_[tile];
    return {given_ + first, before_ + first, after_ + first, ends_[tile] - first};
  }

 private:
  struct StripTiles {
    uint32_t first, height, column, columns;  // its first tile, the rows of each, and where it is
  };
  static constexpr uint16_t kNone = 0xFFFF;

  // In one row, tiles follow each other as positions do.
  void follow(const Grid& grid, const Changes<T>& changes) {
    const auto [positions, before, after, n] = changes;
    int64_t i = 0;
    for (int64_t s = 0; s < grid.count; ++s) {
      const int64_t column = grid.strips[s].column, end = column + grid.strips[s].columns;
      i = std::lower_bound(positions + i, positions + n, column) - positions;
      begins_[s] = i;
      for (; i < n && positions[i] < end; ++i) elements_[i] = static_cast<uint32_t>(positions[i] - column);
      ends_[s] = i;
    }
    given_ = elements_;
    before_ = before;
    after_ = after;
  }

  // Which strip is next is as good as random: looked up, not searched for.
  void distribute(const Grid& grid, const Changes<T>& changes) {
    const auto [positions, before, after, n] = changes;
    std::fill_n(strip_of_, grid.row_length, kNone);
    uint32_t tiles = 0;
    for (int64_t s = 0; s < grid.count; ++s) {
      const Strip& strip = grid.strips[s];
      strips_[s] = {tiles, static_cast<uint32_t>(std::min(strip.tile_rows(), grid.rows)),
                    static_cast<uint32_t>(strip.column), static_cast<uint32_t>(strip.columns)};
      std::fill_n(strip_of_ + strip.column, strip.columns, static_cast<uint16_t>(s));
      tiles += static_cast<uint32_t>(strip.tiles(grid.rows));
    }
    std::memset(ends_, 0, static_cast<size_t>(tiles) * sizeof *ends_);
    const uint32_t length = static_cast<uint32_t>(grid.row_length);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t row = positions[i] / length, column = positions[i] - row * length;
      tiles_[i] = kNone;
      if (strip_of_[column] == kNone) continue;
      const StripTiles& strip = strips_[strip_of_[column]];
      const uint32_t chunk = row / strip.height;
      tiles_[i] = static_cast<uint16_t>(strip.first + chunk);
      elements_[i] = (row - chunk * strip.height) * strip.columns + column - strip.column;
      ++ends_[tiles_[i]];
    }
    int64_t at = 0;
    for (uint32_t t = 0; t < tiles; ++t) {
      begins_[t] = at;
      at += ends_[t];
      ends_[t] = begins_[t];
    }
    for (int64_t i = 0; i < n; ++i) {
      if (tiles_[i] == kNone) continue;
      const int64_t to = ends_[tiles_[i]]++;
      moved_[to] = elements_[i];
      moved_before_[to] = before[i];
      moved_after_[to] = after[i];
    }
    given_ = moved_;
    before_ = moved_before_;
    after_ = moved_after_;
  }

  StripTiles* strips_;              // [strips]
  uint16_t* strip_of_;              // [row_length]
  int64_t *begins_, *ends_;         // [tiles]
  uint16_t* tiles_;                 // [n]
  uint32_t *elements_, *moved_;     // [n]
  T *moved_before_, *moved_after_;  // [n]
  const uint32_t* given_ = nullptr;
  const T *before_ = nullptr, *after_ = nullptr;
};

}  // namespace ctx
}  // namespace vds
