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

// The changes of a block by tile, and by class within each.
template <typename T>
class Sorted {
 public:
  Sorted(Arena& arena, const Grid& grid, int64_t n)
      : strips_(arena.take<StripTiles>(grid.count)), strip_of_(arena.take<uint16_t>(grid.row_length)),
        ends_(arena.take<uint32_t>(grid.tiles() * kMaxClasses + 1)), found_(arena.take<uint32_t>(n)),
        place_(arena.take<uint32_t>(n)), elements_(arena.take<uint32_t>(n)), steps_(arena.take<T>(n)) {}

  void sort(const Grid& grid, const Model& model, const Changes<T>& changes) {
    classes_ = model.classes;
    const int64_t places = grid.tiles() * classes_;  // and one more, for what lies in no tile
    std::fill_n(ends_, places + 1, 0u);
    if (grid.rows == 1)
      follow(grid, model, changes);
    else
      distribute(grid, model, changes);
    uint32_t at = 0;
    for (int64_t p = 0; p <= places; ++p) {
      const uint32_t own = ends_[p];
      ends_[p] = at;
      at += own;
    }
    for (int64_t i = 0; i < changes.n; ++i) {
      const uint32_t to = ends_[place_[i]]++;
      elements_[to] = found_[i];
      const T before = changes.before[i], after = changes.after[i];
      steps_[to] = fold_step(oriented(static_cast<T>(rank_of(after) - rank_of(before)), before));
    }
  }

  TileChanges<T> of(int64_t tile) const {
    const uint32_t* const ends = ends_ + tile * classes_;
    return {elements_, steps_, ends, tile == 0 ? 0 : ends[-1], ends[classes_ - 1]};
  }

 private:
  struct StripTiles {
    uint32_t first, height, column, columns;  // its first tile, the rows of each, and where it is
  };
  static constexpr uint16_t kNone = 0xFFFF;

  void found(int64_t i, int64_t place, int64_t element) {
    place_[i] = static_cast<uint32_t>(place);
    found_[i] = static_cast<uint32_t>(element);
    ++ends_[place];
  }

  // In one row, tiles follow each other as positions do.
  void follow(const Grid& grid, const Model& model, const Changes<T>& changes) {
    const auto [positions, before, after, n] = changes;
    const int64_t nowhere = grid.count * classes_;
    int64_t i = 0;
    for (int64_t s = 0; s < grid.count; ++s) {
      const int64_t column = grid.strips[s].column, end = column + grid.strips[s].columns;
      for (; i < n && positions[i] < column; ++i) found(i, nowhere, 0);
      for (; i < n && positions[i] < end; ++i)
        found(i, s * classes_ + model.class_of[context(before[i])], positions[i] - column);
    }
    for (; i < n; ++i) found(i, nowhere, 0);
  }

  // Which strip is next is as good as random: looked up, not searched for.
  void distribute(const Grid& grid, const Model& model, const Changes<T>& changes) {
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
    const uint32_t length = static_cast<uint32_t>(grid.row_length);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t row = positions[i] / length, column = positions[i] - row * length;
      if (strip_of_[column] == kNone) {
        found(i, tiles * classes_, 0);
        continue;
      }
      const StripTiles& strip = strips_[strip_of_[column]];
      const uint32_t down = row / strip.height;
      found(i, (strip.first + down) * classes_ + model.class_of[context(before[i])],
            (row - down * strip.height) * strip.columns + column - strip.column);
    }
  }

  StripTiles* strips_;        // [strips]
  uint16_t* strip_of_;        // [row_length]
  uint32_t* ends_;            // [tiles, classes], and one
  uint32_t *found_, *place_;  // [n], in the order of positions
  uint32_t* elements_;        // [n], by place
  T* steps_;                  // [n]
  int64_t classes_ = 0;
};

}  // namespace ctx
}  // namespace vds
