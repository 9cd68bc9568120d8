// The `ctx` codec: a block's changes, coded tile by tile against its old values (docs/protocol.md, *ctx*). Does not
// choose tiles or models, and does not allocate: the caller gives memory of vds_ctx_memory bytes.
#include "ctx_grid.h"
#include "ctx_job.h"
#include "dispatch.h"

namespace {

using namespace vds::ctx;
using vds::Arena;

// Below it, a tile's changes are so few that the states of more lanes would cost more than they save in time.
constexpr int64_t kLaneChanges = 2048;

constexpr int64_t kIndexBytes = 5;  // at most, of a tile

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

Scratch tile_scratch(Arena& arena) {
  constexpr int64_t words = kTileElements / 64;
  return {arena.take<uint8_t>(kTileElements + 64),
          arena.take<uint64_t>(words),
          arena.take<uint32_t>(words + kMembersSlack),
          arena.take<uint32_t>(kTileElements),
          arena.take<uint32_t>(2 * kTileElements + kMaxClasses),
          arena.take<uint16_t>(2 * kTileElements + kMaxClasses + 1),
          arena.take<uint8_t>(8 * kTileElements + 8)};
}

enum Refusal : int64_t { kNoRoom = -1, kMalformed = -1, kUnknownWidth = -2, kUnsorted = -3, kNoMemory = -4 };

// A number as LEB128, of at most 5 bytes.
uint8_t* write_varint(uint32_t value, uint8_t* to) {
  for (; value >= 0x80; value >>= 7) *to++ = static_cast<uint8_t>(value | 0x80);
  *to++ = static_cast<uint8_t>(value);
  return to;
}

// The changes of a block, and all that looking at its tiles takes besides.
template <typename T>
struct Coding {
  Coding(Arena& arena, const Grid& grid, int64_t n) : scratch(tile_scratch(arena)), sorted(arena, grid, n) {}
  Scratch scratch;
  Sorted<T> sorted;
};

template <typename T>
Changes<T> changes_of(const Job& job) {
  return {job.positions, static_cast<const T*>(job.before), static_cast<const T*>(job.after), job.n};
}

// Behind the bytes, whose place is `room`, comes the index.
template <typename T>
int64_t encode(const Model& model, const Grid& grid, Job& job) {
  const Changes<T> changes = changes_of<T>(job);
  if (!changes.ascend_below(grid.rows * grid.row_length)) return kUnsorted;
  Arena arena(job.memory);
  uint8_t* const out = arena.take<uint8_t>(job.room);
  uint8_t* const index = arena.take<uint8_t>(kIndexBytes * grid.tiles());
  Coding<T> coding(arena, grid, changes.n);
  if (arena.used() > job.size) return kNoMemory;
  coding.sorted.sort(grid, model, changes);
  const Old<T> old{static_cast<const T*>(job.old), grid.row_length};
  int64_t written = 0;
  uint8_t* stated = index;
  const bool fits = grid.each_tile([&](const Tile& tile, int64_t t, const Tile& next) {
    const TileChanges<T> own = coding.sorted.of(t);
    const int lanes = own.n() < kLaneChanges ? 1 : kMaxLanes;
    const int64_t taken = own.n() == 0 ? 0
                                       : kernels_for<T>().encode(model, old, tile, next, own, lanes, coding.scratch,
                                                                 out + written, job.room - written);
    if (taken < 0) return false;
    stated = write_varint(static_cast<uint32_t>(taken) << 1 | (lanes == kMaxLanes), stated);
    written += taken;
    return true;
  });
  job.index_size = stated - index;
  return fits ? written : kNoRoom;
}

template <typename T>
int64_t tally(const Model& model, const Grid& grid, const Job& job) {
  const Changes<T> changes = changes_of<T>(job);
  if (!changes.ascend_below(grid.rows * grid.row_length)) return kUnsorted;
  Arena arena(job.memory);
  Coding<T> coding(arena, grid, changes.n);
  if (arena.used() > job.size) return kNoMemory;
  coding.sorted.sort(grid, model, changes);
  const Old<T> old{static_cast<const T*>(job.old), grid.row_length};
  grid.each_tile([&](const Tile& tile, int64_t t, const Tile& next) {
    const TileChanges<T> own = coding.sorted.of(t);
    if (own.n() > 0) kernels_for<T>().tally(model, old, tile, next, own, coding.scratch, job.gaps, job.steps);
    return true;
  });
  return 0;
}

// What decoding needs besides the scratch of a tile: the changes as tiles give them, a mark for each, and how many
// marks lie before each word of them.
template <typename T>
struct Unordered {
  Unordered(Arena& arena, int64_t elements, int64_t capacity)
      : words((elements + 63) / 64), before(arena.take<uint32_t>(words)),
        found{arena.take<uint32_t>(capacity), arena.take<T>(capacity), arena.take<uint64_t>(words)} {}

  int64_t words;
  uint32_t* before;
  Changed<T> found;
};

// Whether tiles of these sizes, which are stated as bytes << 1 | whether there are kMaxLanes states, are `size` bytes
// together.
bool add_up(const int64_t* stated, int64_t tiles, int64_t size) {
  for (int64_t t = 0; t < tiles; ++t) {
    if (stated[t] < 0 || stated[t] >> 1 > size) return false;
    size -= stated[t] >> 1;
  }
  return size == 0;
}

template <typename T>
int64_t decode(const Model& model, const Grid& grid, const Job& job) {
  if (!add_up(job.stated, grid.tiles(), job.data_size)) return kMalformed;
  Arena arena(job.memory);
  const Scratch scratch = tile_scratch(arena);
  const Unordered<T> all(arena, grid.rows * grid.row_length, job.n);
  if (arena.used() > job.size) return kNoMemory;
  std::memset(all.found.marks, 0, static_cast<size_t>(all.words) * sizeof *all.found.marks);
  const Old<T> old{static_cast<const T*>(job.old), grid.row_length};
  const uint8_t* data = job.data;
  int64_t total = 0;
  const bool sound = grid.each_tile([&](const Tile& tile, int64_t t, const Tile& next) {
    const int64_t taken = job.stated[t] >> 1;
    if (taken > 0 && (job.wanted == nullptr || job.wanted[t])) {
      const Changed<T> here{all.found.positions + total, all.found.values + total, all.found.marks};
      const int64_t n =
          kernels_for<T>().decode[job.stated[t] & 1](model, old, tile, next, data, taken, scratch, here, job.n - total);
      if (n < 1) return false;
      total += n;
    }
    data += taken;
    return true;
  });
  if (!sound) return kMalformed;
  kernels_for<T>().order(all.found, total, all.words, all.before, job.positions, static_cast<T*>(job.after));
  return total;
}

// What `call` returns for an element of the job's width, its model and its grid.
template <typename Call>
int64_t with_width(const Job& job, Call call) {
  const Model& model = *static_cast<const Model*>(job.model);
  const Grid& grid = *static_cast<const Grid*>(job.grid);
  const int64_t width = job.width;
#define VDS_CTX_CALL(T) call(T{}, model, grid)
  VDS_CTX_WIDTHS(VDS_CTX_CALL, kUnknownWidth)
#undef VDS_CTX_CALL
}

}  // namespace

// Bytes of memory for any of the functions below, for a block with n changes, which is encoded into at most `room`
// bytes.
VDS_API int64_t vds_ctx_memory(const Job* job) {
  const Grid& grid = *static_cast<const Grid*>(job->grid);
  Arena encoding(nullptr), decoding(nullptr);
  encoding.take<uint8_t>(job->room);
  encoding.take<uint8_t>(kIndexBytes * grid.tiles());
  Coding<uint32_t>(encoding, grid, job->n);
  tile_scratch(decoding);
  Unordered<uint32_t>(decoding, grid.rows * grid.row_length, job->n);
  return std::max(encoding.used(), decoding.used());
}

// Encodes n changes of a block, whose strips cover a row, from positions, `before` and `after`, tile by tile: their
// bytes to the beginning of `memory`, and what the index states of each tile, index_size bytes in all, behind `room`
// bytes, rounded up to 64. Returns the size of the bytes, or a Refusal: they take more than `room`, positions do not
// ascend, or `memory` is too small.
VDS_API int64_t vds_ctx_encode(Job* job) {
  return with_width(
      *job, [&](auto bits, const Model& model, const Grid& grid) { return encode<decltype(bits)>(model, grid, *job); });
}

// Adds the symbols of the tiles of n changes, given as above, to `gaps` and `steps`; of `model`, only the classes
// matter. Here strips need not cover a row: what lies in none is not counted. Returns 0 or a Refusal.
VDS_API int64_t vds_ctx_tally(const Job* job) {
  return with_width(
      *job, [&](auto bits, const Model& model, const Grid& grid) { return tally<decltype(bits)>(model, grid, *job); });
}

// Reads what an index states of so many tiles, bytes << 1 | whether there are kMaxLanes states, and nothing else.
// Returns 0, or what is wrong: 1 it ends early, 2 it has bytes left over, 3 a number is 2^28 or more, 4 the tiles are
// not `bytes` together.
VDS_API int vds_ctx_read_index(const uint8_t* index, int64_t size, int64_t* stated, int64_t tiles, int64_t bytes) {
  const uint8_t* const end = index + size;
  for (int64_t t = 0; t < tiles; ++t) {
    int64_t value = 0;
    for (int shift = 0;; shift += 7) {
      if (shift == 28) return 3;
      if (index == end) return 1;
      value |= static_cast<int64_t>(*index & 0x7F) << shift;
      if (*index++ < 0x80) break;
    }
    stated[t] = value;
  }
  if (index != end) return 2;
  return add_up(stated, tiles, bytes) ? 0 : 4;
}

// Decodes the wanted tiles of a block from `data` against its old values, which need to be right in those tiles only,
// to positions and `after`, ascending. Returns how many changes, or a Refusal: `stated` does not add up to data_size, a
// wanted tile is malformed or holds none, they are more than n, or `memory` is too small.
VDS_API int64_t vds_ctx_decode(const Job* job) {
  return with_width(
      *job, [&](auto bits, const Model& model, const Grid& grid) { return decode<decltype(bits)>(model, grid, *job); });
}
