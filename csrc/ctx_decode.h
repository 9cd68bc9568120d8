// Decoding one `ctx` tile by a team of threads, as phases with a barrier behind each (docs/protocol.md, *ctx*). A phase is a
// function of a thread's number and of memory that the team shares, so that a GPU runs it and a host can, one thread after the other.
// Decoding trusts nothing but the lengths it is given. Does not launch anything, and does not put changes in order.
#pragma once

#include <cstring>

#include "ctx_format.h"

namespace vds {
namespace ctx {

constexpr int kTeam = 128;          // threads
constexpr int kSelectors = 32;      // the first thread that looks for elements: it is in another warp than the one that reads the stream
constexpr uint32_t kGroup = 128;    // elements whose classes are counted together: a count fits a byte
constexpr uint32_t kGroups = kTileElements / kGroup, kGroupsEach = kGroups / kTeam;
constexpr uint32_t kChunk = 512;    // changes that are handed from the stream's reader to the others at a time
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

// Frequencies of gap and step symbols, and the last context: a row of uint16. The host checked that they are those of a model.
struct ClassRow {
  uint16_t gaps[kGapSymbols], steps[kStepSymbols], last;
};
static_assert(sizeof(ClassRow) == 2 * kClassColumns, "a row without holes");

// What became of a block.
struct Outcome {
  uint32_t found;   // changes written, in no order; more than `room` where that was exceeded
  uint32_t faults;  // not 0 where a tile is malformed, or there was no room
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

// What the team shares: 53 KiB.
struct Shared {
  uint64_t counts[kGroups][2];  // members of each of 16 classes in a group, a byte each
  uint32_t before[kGroups];     // members of the class at hand before a group
  uint8_t slots[kTotal];        // the symbol of each slot of the statistics at hand
  uint32_t codes[kStepSymbols]; // frequency | first slot << 16 of each symbol
  uint32_t chunk[2][kChunk];    // ranks or folded steps, by turns
  uint32_t places[kChunks];     // where in the output each chunk of the class at hand went
  uint32_t sums[kTeam];
  int32_t filled[2];  // of a chunk: how many; below kChunk in the last one, -1 where the tile is malformed
  uint32_t members;   // of the class at hand
  uint8_t class_of[kContexts];
  Reading reading;
};

VDS_HD inline uint32_t take_room(uint32_t* counter, uint32_t n) {
#if defined(__CUDA_ARCH__)
  return atomicAdd(counter, n);
#else
  const uint32_t before = *counter;
  *counter += n;
  return before;
#endif
}

// The old values of a tile, by the number of an element in it.
template <typename T>
class TileView {
 public:
  VDS_HD explicit TileView(const TileJob& job)
      : bits_(reinterpret_cast<const T*>(job.old)), row_length_(job.row_length), first_(job.row * job.row_length + job.column),
        columns_(static_cast<uint32_t>(job.columns)), elements_(static_cast<uint32_t>(job.rows * job.columns)) {}
  VDS_HD uint32_t elements() const { return elements_; }
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

// A tile's bytes: states and words from the front, raw bits from the back. One thread reads them, with all it needs in registers.
class Stream {
 public:
  VDS_HD Stream(const TileJob& job, const Reading& from)
      : data_(reinterpret_cast<const uint8_t*>(job.data)), size_(static_cast<uint32_t>(job.size >> 1)), at_(from.at),
        loaded_(from.loaded), window_(from.window), have_(from.have), lanes_(job.size & 1 ? kMaxLanes : 1) {
    for (int i = 0; i < kMaxLanes; ++i) states_[i] = from.states[i];
    look_ahead();
  }
  VDS_HD void save(Reading& to) const {
    for (int i = 0; i < kMaxLanes; ++i) to.states[i] = states_[i];
    to.at = at_;
    to.loaded = loaded_;
    to.window = window_;
    to.have = have_;
  }

  VDS_HD int lanes() const { return lanes_; }

  VDS_HD bool begin() {
    if (size_ < 4 * static_cast<uint32_t>(lanes_)) return false;
    for (int i = 0; i < kMaxLanes && i < lanes_; ++i) {
      states_[i] = 0;
      for (int k = 0; k < 4; ++k) states_[i] |= static_cast<uint32_t>(data_[4 * i + k]) << (8 * k);
      if (states_[i] < kFloor) return false;
    }
    at_ = 4 * static_cast<uint32_t>(lanes_);
    look_ahead();
    return true;
  }

  // The next symbols of all states, of which none is taken yet: looked up together, so that their latencies overlap.
  VDS_HD void look(const Shared& s, uint32_t (&symbols)[kMaxLanes], uint32_t (&codes)[kMaxLanes]) const {
    for (int i = 0; i < kMaxLanes && i < lanes_; ++i) symbols[i] = s.slots[states_[i] & (kTotal - 1)];
    for (int i = 0; i < kMaxLanes && i < lanes_; ++i) codes[i] = s.codes[symbols[i]];
  }

  // Takes the symbol of a state; false where a word is missing.
  VDS_HD bool take(int lane, uint32_t code) {
    uint32_t& state = states_[lane];
    state = (code & 0xFFFF) * (state >> kScale) + (state & (kTotal - 1)) - (code >> 16);
    if (state >= kFloor) return true;
    if (size_ - at_ < 2) return false;
    state = state << 16 | next_;
    at_ += 2;
    look_ahead();
    return true;
  }

  // The next `count` raw bits, at most 32.
  VDS_HD bool raw(uint32_t count, uint32_t& bits) {
    if (have_ < count) {
      for (uint32_t i = 0; i < 4 && loaded_ < size_; ++i, ++loaded_, have_ += 8)
        window_ |= static_cast<uint64_t>(data_[size_ - 1 - loaded_]) << have_;
      if (have_ < count) return false;
    }
    bits = static_cast<uint32_t>(window_ & ((1ull << count) - 1));
    window_ >>= count;
    have_ -= count;
    return true;
  }

  // Whether all was used, up to the last byte, and the bits that fill it are zero.
  VDS_HD bool finished() const {
    for (int i = 0; i < kMaxLanes && i < lanes_; ++i)
      if (states_[i] != kFloor) return false;
    return at_ + loaded_ - have_ / 8 == size_ && (window_ & ((1u << have_ % 8) - 1)) == 0;
  }

 private:
  // The next word is loaded as soon as the one before is taken, so that nothing waits for it.
  VDS_HD void look_ahead() {
    next_ = size_ - at_ < 2 ? 0 : static_cast<uint32_t>(data_[at_]) | static_cast<uint32_t>(data_[at_ + 1]) << 8;
  }

  const uint8_t* data_;
  uint32_t size_, at_, loaded_, next_ = 0;
  uint64_t window_;
  uint32_t have_;
  int lanes_;  // 1 or kMaxLanes; loops over them have a fixed end besides, so that they unroll and states stay in registers
  uint32_t states_[kMaxLanes];
};

// Phase: which class each context is of, and where the stream begins.
VDS_HD inline void begin_tile(int thread, const TileJob& job, const ClassRow* classes, int count, Shared& s) {
  for (int c = thread; c < kContexts; c += kTeam) {
    int of = 0;
    while (of + 1 < count && classes[of].last < c) ++of;
    s.class_of[c] = static_cast<uint8_t>(of);
  }
  if (thread != 0) return;
  s.reading = {};
  Stream stream(job, s.reading);
  s.filled[0] = stream.begin() ? 0 : -1;
  stream.save(s.reading);
}

// Phase: how many members of each class there are in each group.
template <typename T>
VDS_HD void count_groups(int thread, const TileView<T>& tile, Shared& s) {
  for (uint32_t group = static_cast<uint32_t>(thread); group < kGroups; group += kTeam) {
    uint64_t low = 0, high = 0;
    tile.each_of(group, [&](uint8_t context, uint32_t) {
      const uint32_t of = s.class_of[context];
      const uint64_t one = 1ull << (8 * (of & 7));
      low += of < 8 ? one : 0;
      high += of < 8 ? 0 : one;
      return false;
    });
    s.counts[group][0] = low;
    s.counts[group][1] = high;
  }
}

// Phase: each symbol's first slot. What has no frequency begins where the next one does.
VDS_HD inline void find_codes(int thread, const uint16_t* frequencies, int symbols, Shared& s) {
  for (int symbol = thread; symbol < symbols; symbol += kTeam) {
    uint32_t start = 0;
    for (int i = 0; i < symbol; ++i) start += frequencies[i];
    s.codes[symbol] = frequencies[symbol] | start << 16;
  }
}

// Phase, behind `find_codes`: the symbol of each slot is the last one that begins at or before it.
VDS_HD inline void fill_slots(int thread, int symbols, Shared& s) {
  constexpr uint32_t each = kTotal / kTeam;
  uint32_t slot = static_cast<uint32_t>(thread) * each;
  int low = 1, high = symbols;  // the last is low - 1
  while (low < high) {
    const int middle = (low + high) / 2;
    if (s.codes[middle] >> 16 <= slot)
      low = middle + 1;
    else
      high = middle;
  }
  for (uint32_t i = 0; i < each; ++i, ++slot) {
    while (low < symbols && s.codes[low] >> 16 <= slot) ++low;
    s.slots[slot] = static_cast<uint8_t>(low - 1);
  }
}

VDS_HD inline uint32_t members_of(const Shared& s, uint32_t group, uint32_t of) {
  return static_cast<uint32_t>(s.counts[group][of >> 3] >> (8 * (of & 7))) & 0xFF;
}

// Phase: how many members of a class the groups of a thread have.
VDS_HD inline void sum_members(int thread, uint32_t of, Shared& s) {
  uint32_t sum = 0;
  for (uint32_t i = 0; i < kGroupsEach; ++i) sum += members_of(s, static_cast<uint32_t>(thread) * kGroupsEach + i, of);
  s.sums[thread] = sum;
}

// Phase, behind `sum_members`: how many members lie before each group.
VDS_HD inline void add_members(int thread, uint32_t of, Shared& s) {
  uint32_t before = 0;
  for (int other = 0; other < thread; ++other) before += s.sums[other];
  for (uint32_t i = 0; i < kGroupsEach; ++i) {
    const uint32_t group = static_cast<uint32_t>(thread) * kGroupsEach + i;
    s.before[group] = before;
    before += members_of(s, group, of);
  }
  if (thread == kTeam - 1) s.members = before;
  if (thread == 0) s.reading.rank = 0;
}

// One thread: the ranks of the next changed members, kChunk at most; returns how many, or -1.
VDS_HD inline int32_t read_gaps(Stream& stream, Shared& s, uint32_t* ranks) {
  uint32_t rank = s.reading.rank;
  const uint32_t members = s.members;
  for (uint32_t i = 0; i < kChunk; i += static_cast<uint32_t>(stream.lanes())) {
    uint32_t symbols[kMaxLanes], codes[kMaxLanes];
    stream.look(s, symbols, codes);
    for (int lane = 0; lane < kMaxLanes && lane < stream.lanes(); ++lane) {
      const uint32_t symbol = symbols[lane];
      if (!stream.take(lane, codes[lane])) return -1;
      if (symbol == kGapEnd) return static_cast<int32_t>(i + static_cast<uint32_t>(lane));
      uint32_t gap = symbol, raw = 0;
      if (symbol >= kExact) {
        const bool escape = symbol == kGapEscape;
        if (!stream.raw(static_cast<uint32_t>(escape ? kGapBits : raw_bits(symbol)), raw)) return -1;
        gap = escape ? raw : from_magnitude(symbol, raw);
      }
      if (gap >= members - rank) return -1;
      ranks[i + static_cast<uint32_t>(lane)] = rank + gap;
      rank += gap + 1;
    }
  }
  s.reading.rank = rank;
  return kChunk;
}

// One thread: the next n folded steps; returns n, or -1.
template <typename T>
VDS_HD int32_t read_steps(Stream& stream, const Shared& s, uint32_t n, uint32_t* folded) {
  for (uint32_t i = 0; i < n; i += static_cast<uint32_t>(stream.lanes())) {
    uint32_t symbols[kMaxLanes], codes[kMaxLanes];
    stream.look(s, symbols, codes);
    for (int lane = 0; lane < kMaxLanes && lane < stream.lanes(); ++lane) {
      if (i + static_cast<uint32_t>(lane) == n) break;
      const uint32_t symbol = symbols[lane];
      if (!stream.take(lane, codes[lane])) return -1;
      uint32_t z = symbol, raw = 0;
      if (symbol >= 2 * kExact) {
        const bool escape = symbol == kStepEscape;
        if (!stream.raw(static_cast<uint32_t>(escape ? 8 * static_cast<int>(sizeof(T)) : raw_bits(symbol >> 1)), raw)) return -1;
        const uint32_t size = escape ? 0 : from_magnitude(symbol >> 1, raw);
        if (size >= kSign<T>) return -1;
        z = escape ? raw : size << 1 | (symbol & 1);
      }
      folded[i + static_cast<uint32_t>(lane)] = z;
    }
  }
  return static_cast<int32_t>(n);
}

// Phase: one thread reads chunk `turn` of gaps, and finds room for it.
VDS_HD inline void gap_turn(uint32_t turn, const TileJob& job, const BlockJob& block, Outcome* outcome, Shared& s) {
  Stream stream(job, s.reading);
  int32_t n = read_gaps(stream, s, s.chunk[turn & 1]);
  stream.save(s.reading);
  if (n > 0) {
    const int64_t at = take_room(&outcome->found, static_cast<uint32_t>(n));
    s.places[turn] = static_cast<uint32_t>(at);
    if (at + n > block.room) n = -1;
  }
  s.filled[turn & 1] = n;
}

// The place in the block of the member of a class that has `rank` before it. Where old values change meanwhile there may be none:
// then it is some place of the tile.
template <typename T>
VDS_HD uint32_t select(const TileView<T>& tile, uint32_t rank, uint32_t of, const Shared& s) {
  uint32_t low = 1, high = kGroups;  // the last group before which there are at most `rank` is low - 1
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (s.before[middle] <= rank)
      low = middle + 1;
    else
      high = middle;
  }
  uint32_t left = rank - s.before[low - 1], found = 0;
  tile.each_of(low - 1, [&](uint8_t context, uint32_t place) {
    found = place;
    return s.class_of[context] == of && left-- == 0;
  });
  return found;
}

// Phase: the other threads turn chunk `turn` of ranks into positions.
template <typename T>
VDS_HD void position_turn(int thread, uint32_t turn, uint32_t of, const TileView<T>& tile, uint32_t* positions, const Shared& s) {
  const int32_t n = s.filled[turn & 1];
  for (int32_t i = thread - kSelectors; i < n; i += kTeam - kSelectors)
    positions[s.places[turn] + static_cast<uint32_t>(i)] = select(tile, s.chunk[turn & 1][i], of, s);
}

// Phase: one thread reads chunk `turn` of n steps.
template <typename T>
VDS_HD void step_turn(uint32_t turn, uint32_t n, const TileJob& job, Shared& s) {
  Stream stream(job, s.reading);
  s.filled[turn & 1] = read_steps<T>(stream, s, n, s.chunk[turn & 1]);
  stream.save(s.reading);
}

// Phase: the other threads unfold chunk `turn` of steps.
template <typename T>
VDS_HD void unfold_turn(int thread, uint32_t turn, const TileView<T>& tile, const uint32_t* positions, T* values, const Shared& s) {
  const int32_t n = s.filled[turn & 1];
  for (int32_t i = thread - kSelectors; i < n; i += kTeam - kSelectors) {
    const uint32_t to = s.places[turn] + static_cast<uint32_t>(i);
    values[to] = stepped(tile.old(positions[to]), static_cast<T>(s.chunk[turn & 1][i]));
  }
}

// The changes of one class, whose statistics are `row`; returns how many, or -1. `team` runs a phase on all threads, then a barrier:
// what is read between two phases is not written by the next one.
template <typename T, typename Team>
VDS_HD int32_t decode_class(uint32_t of, const ClassRow& row, const TileJob& job, const BlockJob& block, const TileView<T>& tile,
                            Outcome* outcome, uint32_t* positions, T* values, Shared& s, const Team& team) {
  team([&](int thread) {
    find_codes(thread, row.gaps, kGapSymbols, s);
    sum_members(thread, of, s);
  });
  team([&](int thread) {
    fill_slots(thread, kGapSymbols, s);
    add_members(thread, of, s);
  });
  // In each turn one thread reads a chunk while the others work on the one before.
  uint32_t turn = 0;
  int32_t n = kChunk;
  for (;; ++turn) {
    const bool reading = n == static_cast<int32_t>(kChunk);
    team([&](int thread) {
      if (thread == 0 && reading) gap_turn(turn, job, block, outcome, s);
      if (thread >= kSelectors && turn > 0) position_turn(thread, turn - 1, of, tile, positions, s);
    });
    if (!reading) break;
    n = s.filled[turn & 1];
    if (n < 0) return -1;
  }
  const uint32_t total = (turn - 1) * kChunk + static_cast<uint32_t>(n);
  team([&](int thread) { find_codes(thread, row.steps, kStepSymbols, s); });
  team([&](int thread) { fill_slots(thread, kStepSymbols, s); });
  for (turn = 0;; ++turn) {
    const bool reading = turn * kChunk < total;
    const uint32_t left = reading ? total - turn * kChunk : 0, size = left < kChunk ? left : kChunk;
    team([&](int thread) {
      if (thread == 0 && reading) step_turn<T>(turn, size, job, s);
      if (thread >= kSelectors && turn > 0) unfold_turn(thread, turn - 1, tile, positions, values, s);
    });
    if (!reading) break;
    if (s.filled[turn & 1] < 0) return -1;
  }
  return static_cast<int32_t>(total);
}

template <typename T, typename Team>
VDS_HD bool decode_tile(const TileJob& job, const BlockJob& block, const ClassRow* classes, Outcome* outcome, uint32_t* positions,
                        T* values, Shared& s, const Team& team) {
  const TileView<T> tile(job);
  const int count = static_cast<int>(block.classes);
  team([&](int thread) { begin_tile(thread, job, classes, count, s); });
  if (s.filled[0] < 0) return false;
  team([&](int thread) { count_groups(thread, tile, s); });
  int64_t total = 0;
  for (int c = 0; c < count; ++c) {
    const int32_t n = decode_class<T>(static_cast<uint32_t>(c), classes[c], job, block, tile, outcome, positions, values, s, team);
    if (n < 0) return false;
    total += n;
  }
  return total > 0 && Stream(job, s.reading).finished();
}

// Decodes a tile into what its block has of positions and new values, and flags it if it is malformed or there is no room.
template <typename T, typename Team>
VDS_HD void run_tile(const TileJob& job, const BlockJob* blocks, const ClassRow* models, Outcome* outcomes, uint32_t* positions,
                     T* values, Shared& s, const Team& team) {
  const BlockJob& block = blocks[job.block];
  Outcome* const outcome = outcomes + job.block;
  const ClassRow* const classes = models + block.first_class;
  uint32_t* const to = positions + block.first;
  const bool sound = decode_tile(job, block, classes, outcome, to, values + block.first, s, team);
  team([&](int thread) {
    if (thread == 0 && !sound) outcome->faults = 1;
  });
}

}  // namespace ctx
}  // namespace vds
