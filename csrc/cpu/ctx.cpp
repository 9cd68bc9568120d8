// The `ctx` codec: a block's changes, coded tile by tile against its old values (docs/protocol.md, *ctx*). Does not choose
// tiles or models, and does not allocate: the caller gives a scratch of vds_ctx_scratch_size bytes.
#include <algorithm>
#include <cstring>

#include "ctx_kernels.h"
#include "dispatch.h"

namespace {

using namespace vds::ctx;

// Below it, a tile's changes are so few that the states of more lanes would cost more than they save in time.
constexpr int64_t kLaneChanges = 4096;

const Kernels& kernels() {
#if defined(VDS_CTX_AVX2)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
      __builtin_cpu_supports("popcnt"))
    return kAvx2;
#endif
  return kPortable;
}

template <typename T>
const TileKernels<T>& kernels_for();
template <>
const TileKernels<uint8_t>& kernels_for<uint8_t>() {
  return kernels().bytes;
}
template <>
const TileKernels<uint16_t>& kernels_for<uint16_t>() {
  return kernels().halves;
}
template <>
const TileKernels<uint32_t>& kernels_for<uint32_t>() {
  return kernels().words;
}

// Hands out parts of one piece of memory, or only counts them when there is none.
class Arena {
 public:
  explicit Arena(void* memory) : at_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(int64_t n) {
    T* const part = reinterpret_cast<T*>(at_);
    const int64_t size = (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    used_ += size;
    if (at_ != nullptr) at_ += size;
    return part;
  }
  int64_t used() const { return used_; }

 private:
  char* at_;
  int64_t used_ = 0;
};

Scratch tile_scratch(Arena& arena) {
  constexpr int64_t words = kTileElements / 64;
  return {arena.take<uint8_t>(kTileElements + 64), arena.take<uint64_t>(words), arena.take<uint32_t>(words + kMembersSlack),
          arena.take<uint32_t>(kTileElements),
          arena.take<uint32_t>(2 * kTileElements + kMaxClasses), arena.take<uint16_t>(2 * kTileElements + kMaxClasses + 1),
          arena.take<uint8_t>(8 * kTileElements + 8)};
}

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

// The changes of a block by tile.
template <typename T>
class Sorted {
 public:
  Sorted(Arena& arena, int64_t elements, int64_t strips, int64_t tiles, int64_t n)
      : strips_(arena.take<StripTiles>(strips)), strip_of_(arena.take<uint16_t>(elements)), begins_(arena.take<int64_t>(tiles)),
        ends_(arena.take<int64_t>(tiles)), tiles_(arena.take<uint16_t>(n)), elements_(arena.take<uint32_t>(n)),
        moved_(arena.take<uint32_t>(n)), moved_before_(arena.take<T>(n)), moved_after_(arena.take<T>(n)) {}

  void sort(const Grid& grid, const uint32_t* positions, const T* before, const T* after, int64_t n) {
    if (grid.rows == 1)
      follow(grid, positions, before, after, n);
    else
      distribute(grid, positions, before, after, n);
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
  void follow(const Grid& grid, const uint32_t* positions, const T* before, const T* after, int64_t n) {
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
  void distribute(const Grid& grid, const uint32_t* positions, const T* before, const T* after, int64_t n) {
    std::fill_n(strip_of_, grid.row_length, kNone);
    uint32_t tiles = 0;
    for (int64_t s = 0; s < grid.count; ++s) {
      const Strip& strip = grid.strips[s];
      strips_[s] = {tiles, static_cast<uint32_t>(std::min(strip.tile_rows(), grid.rows)), static_cast<uint32_t>(strip.column),
                    static_cast<uint32_t>(strip.columns)};
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

  StripTiles* strips_;                           // [strips]
  uint16_t* strip_of_;                           // [row_length]
  int64_t *begins_, *ends_;                      // [tiles]
  uint16_t* tiles_;                              // [n]
  uint32_t *elements_, *moved_;                  // [n]
  T *moved_before_, *moved_after_;               // [n]
  const uint32_t* given_ = nullptr;
  const T *before_ = nullptr, *after_ = nullptr;
};

enum Refusal : int64_t { kNoRoom = -1, kUnknownWidth = -2, kUnsorted = -3 };

bool ascend_below(const uint32_t* positions, int64_t n, int64_t end) {
  int64_t sorted = 1;
  for (int64_t i = 1; i < n; ++i) sorted += positions[i - 1] < positions[i];
  return n == 0 || (sorted == n && positions[n - 1] < end);
}

template <typename T>
int64_t encode(const Model& model, const T* old, const Grid& grid, const uint32_t* positions, const T* before, const T* after,
               int64_t n, void* memory, uint8_t* out, int64_t room, int64_t* spans) {
  if (!ascend_below(positions, n, grid.rows * grid.row_length)) return kUnsorted;
  Arena arena(memory);
  const Scratch scratch = tile_scratch(arena);
  Sorted<T> sorted(arena, grid.rows * grid.row_length, grid.count, grid.tiles(), n);
  sorted.sort(grid, positions, before, after, n);
  int64_t written = 0;
  const bool fits = grid.each_tile([&](const Tile& tile, int64_t index, const Tile& next) {
    const TileChanges<T> changes = sorted.of(index);
    const int lanes = changes.n < kLaneChanges ? 1 : kMaxLanes;
    const int64_t size = changes.n == 0 ? 0
                                        : kernels_for<T>().encode(model, {old, grid.row_length}, tile, next, changes, lanes, scratch,
                                                                  out + written, room - written);
    if (size < 0) return false;
    spans[2 * index] = size;
    spans[2 * index + 1] = lanes;
    written += size;
    return true;
  });
  return fits ? written : kNoRoom;
}

template <typename T>
int64_t tally(const Model& model, const T* old, const Grid& grid, const uint32_t* positions, const T* before, const T* after,
              int64_t n, void* memory, uint64_t* gaps, uint64_t* steps) {
  if (!ascend_below(positions, n, grid.rows * grid.row_length)) return kUnsorted;
  Arena arena(memory);
  const Scratch scratch = tile_scratch(arena);
  Sorted<T> sorted(arena, grid.rows * grid.row_length, grid.count, grid.tiles(), n);
  sorted.sort(grid, positions, before, after, n);
  grid.each_tile([&](const Tile& tile, int64_t index, const Tile& next) {
    const TileChanges<T> changes = sorted.of(index);
    if (changes.n > 0)
      kernels_for<T>().tally(model, {old, grid.row_length}, tile, next, changes, scratch, gaps, steps);
    return true;
  });
  return 0;
}

// What decoding needs besides the scratch of a tile: the changes as tiles give them, a mark for each, and how many marks lie before
// each word of them.
template <typename T>
struct Unordered {
  Unordered(Arena& arena, int64_t elements, int64_t capacity)
      : words((elements + 63) / 64), before(arena.take<uint32_t>(words)),
        found{arena.take<uint32_t>(capacity), arena.take<T>(capacity), arena.take<uint64_t>(words)} {}

  int64_t words;
  uint32_t* before;
  Changed<T> found;
};

// Decodes the tiles whose `wanted` is set; `sizes` are bytes << 1 | whether there are kMaxLanes states.
template <typename T>
int64_t decode(const Model& model, const T* old, const Grid& grid, const int64_t* sizes, const uint8_t* wanted, const uint8_t* data,
               void* memory, uint32_t* positions, T* steps, int64_t capacity) {
  Arena arena(memory);
  const Scratch scratch = tile_scratch(arena);
  const Unordered<T> all(arena, grid.rows * grid.row_length, capacity);
  std::memset(all.found.marks, 0, static_cast<size_t>(all.words) * sizeof *all.found.marks);
  int64_t total = 0, offset = 0;
  const bool sound = grid.each_tile([&](const Tile& tile, int64_t index, const Tile& next) {
    const int64_t size = sizes[index] >> 1;
    if (size > 0 && wanted[index]) {
      const Changed<T> here{all.found.positions + total, all.found.steps + total, all.found.marks};
      const int64_t n = kernels_for<T>().decode[sizes[index] & 1](model, {old, grid.row_length}, tile, next, data + offset, size,
                                                                  scratch, here, capacity - total);
      if (n < 1) return false;
      total += n;
    }
    offset += size;
    return true;
  });
  if (!sound) return -1;
  kernels_for<T>().order(all.found, total, all.words, all.before, positions, steps);
  return total;
}

template <typename T>
void survey(const T* old, int64_t count, const T* before, const T* after, int64_t n, uint64_t* members, uint64_t* steps) {
  for (int64_t i = 0; i < count; ++i) ++members[context(old[i])];
  for (int64_t i = 0; i < n; ++i) {
    const T z = fold_step(oriented(static_cast<T>(rank_of(after[i]) - rank_of(before[i])), before[i]));
    ++steps[context(before[i]) * kStepSymbols + (magnitude(z >> 1).symbol << 1 | (z & 1))];
  }
}

bool fill(const uint16_t* frequencies, int symbols, uint8_t* slots, uint32_t* codes) {
  uint32_t start = 0;
  for (int s = 0; s < symbols; ++s) {
    const uint32_t frequency = frequencies[s];
    if (frequency > kTotal - start) return false;
    codes[s] = frequency == 0 ? 0 : frequency | start << 16;
    std::memset(slots + start, s, frequency);
    start += frequency;
  }
  return start == kTotal;
}

}  // namespace

VDS_API int64_t vds_ctx_model_size(int classes) {
  return static_cast<int64_t>(sizeof(Model)) + (classes - 1) * static_cast<int64_t>(sizeof(Class));
}

// Lays out a model of 1 to 16 classes from the last context of each and the frequencies of its symbols. Returns 0, or -1 if the
// contexts do not ascend to 255 or a class's frequencies do not add up to 4096.
VDS_API int vds_ctx_model(int classes, const uint8_t* last, const uint16_t* gaps, const uint16_t* steps, void* out) {
  Model& model = *static_cast<Model*>(out);
  if (classes < 1 || classes > kMaxClasses || last[classes - 1] != kContexts - 1) return -1;
  model.classes = static_cast<uint32_t>(classes);
  int low = 0;
  for (int c = 0; c < classes; ++c) {
    Class& of = model.of[c];
    if (last[c] < low || !fill(gaps + c * kGapSymbols, kGapSymbols, of.gap_slots, of.gap_codes) ||
        !fill(steps + c * kStepSymbols, kStepSymbols, of.step_slots, of.step_codes))
      return -1;
    of.low = static_cast<uint32_t>(low);
    of.high = last[c];
    for (; low <= last[c]; ++low) model.class_of[low] = static_cast<uint8_t>(c);
  }
  return 0;
}

// Bytes of scratch for any of the functions below, for a block of `elements` in so many strips and tiles, with n changes.
VDS_API int64_t vds_ctx_scratch_size(int64_t elements, int64_t strips, int64_t tiles, int64_t n) {
  Arena encoding(nullptr), decoding(nullptr);
  tile_scratch(encoding);
  Sorted<uint32_t>(encoding, elements, strips, tiles, n);
  tile_scratch(decoding);
  Unordered<uint32_t>(decoding, elements, n);
  return encoding.used() > decoding.used() ? encoding.used() : decoding.used();
}

#define VDS_CTX_WIDTHS(call)       \
  switch (width) {                 \
    case 1: return call(uint8_t);  \
    case 2: return call(uint16_t); \
    case 4: return call(uint32_t); \
    default: return kUnknownWidth; \
  }

// Encodes n changes of a block of rows x row_length elements, tile by tile, and writes (size, lanes) of each tile to spans.
// Strips (column, columns) cover a row in order. Returns the bytes written to `out`, or a Refusal: they take more than `room`, or positions do not ascend.
VDS_API int64_t vds_ctx_encode(int width, const void* model, const void* old, int64_t rows, int64_t row_length, const int64_t* strips,
                               int64_t count, const uint32_t* positions, const void* before, const void* after, int64_t n,
                               void* scratch, uint8_t* out, int64_t room, int64_t* spans) {
  const Grid grid{rows, row_length, reinterpret_cast<const Strip*>(strips), count};
#define VDS_CTX_ENCODE(T)                                                                                               \
  encode<T>(*static_cast<const Model*>(model), static_cast<const T*>(old), grid, positions, static_cast<const T*>(before), \
            static_cast<const T*>(after), n, scratch, out, room, spans)
  VDS_CTX_WIDTHS(VDS_CTX_ENCODE)
#undef VDS_CTX_ENCODE
}

// Adds the symbols of the tiles to gaps [classes, 74] and steps [classes, 249]; of `model`, only the classes matter. Here strips need
// not cover a row: what lies in none is not counted. Returns 0 or a Refusal.
VDS_API int64_t vds_ctx_tally(int width, const void* model, const void* old, int64_t rows, int64_t row_length, const int64_t* strips,
                              int64_t count, const uint32_t* positions, const void* before, const void* after, int64_t n,
                              void* scratch, uint64_t* gaps, uint64_t* steps) {
  const Grid grid{rows, row_length, reinterpret_cast<const Strip*>(strips), count};
#define VDS_CTX_TALLY(T)                                                                                               \
  tally<T>(*static_cast<const Model*>(model), static_cast<const T*>(old), grid, positions, static_cast<const T*>(before), \
           static_cast<const T*>(after), n, scratch, gaps, steps)
  VDS_CTX_WIDTHS(VDS_CTX_TALLY)
#undef VDS_CTX_TALLY
}

// Decodes the wanted tiles of a block against its old values, which need to be right in those tiles only. `sizes` add up to at
// most what `data` holds. Returns the number of changes written, in ascending order; -1 if a tile is malformed or holds none, or
// they are more than `capacity`.
VDS_API int64_t vds_ctx_decode(int width, const void* model, const void* old, int64_t rows, int64_t row_length, const int64_t* strips,
                               int64_t count, const int64_t* sizes, const uint8_t* wanted, const uint8_t* data, void* scratch,
                               uint32_t* positions, void* steps, int64_t capacity) {
  const Grid grid{rows, row_length, reinterpret_cast<const Strip*>(strips), count};
#define VDS_CTX_DECODE(T)                                                                                                   \
  decode<T>(*static_cast<const Model*>(model), static_cast<const T*>(old), grid, sizes, wanted, data, scratch, positions, \
            static_cast<T*>(steps), capacity)
  VDS_CTX_WIDTHS(VDS_CTX_DECODE)
#undef VDS_CTX_DECODE
}

// Adds elements per context to members [256], and the step symbols of n changes per context of the old value to steps [256, 249].
VDS_API int vds_ctx_survey(int width, const void* old, int64_t elements, const void* before, const void* after, int64_t n,
                           uint64_t* members, uint64_t* steps) {
#define VDS_CTX_SURVEY(T)                                                                                            \
  (survey(static_cast<const T*>(old), elements, static_cast<const T*>(before), static_cast<const T*>(after), n, members, steps), 0)
  VDS_CTX_WIDTHS(VDS_CTX_SURVEY)
#undef VDS_CTX_SURVEY
}
