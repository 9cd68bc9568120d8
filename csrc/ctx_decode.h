// Decoding one `ctx` tile by a team of threads, as phases with a barrier behind each (docs/protocol.md, *ctx*). A phase
// is a function of a thread's number and of memory that the team shares, so that a GPU runs it and a host can, one
// thread after the other. Decoding trusts nothing but the lengths it is given. Does not launch anything, and does not
// put changes in order.
#pragma once

#include "ctx_stream.h"
#include "ctx_team.h"

namespace vds {
namespace ctx {

VDS_HD inline uint32_t take_room(uint32_t* counter, uint32_t n) {
#if defined(__CUDA_ARCH__)
  return atomicAdd(counter, n);
#else
  const uint32_t before = *counter;
  *counter += n;
  return before;
#endif
}

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

// The place in the block of the member of a class that has `rank` before it. Where old values change meanwhile there
// may be none: then it is some place of the tile.
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
VDS_HD void position_turn(int thread, uint32_t turn, uint32_t of, const TileView<T>& tile, uint32_t* positions,
                          const Shared& s) {
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
VDS_HD void unfold_turn(int thread, uint32_t turn, const TileView<T>& tile, const uint32_t* positions, T* values,
                        const Shared& s) {
  const int32_t n = s.filled[turn & 1];
  for (int32_t i = thread - kSelectors; i < n; i += kTeam - kSelectors) {
    const uint32_t to = s.places[turn] + static_cast<uint32_t>(i);
    values[to] = stepped(tile.old(positions[to]), static_cast<T>(s.chunk[turn & 1][i]));
  }
}

// The changes of one class, whose statistics are `row`; returns how many, or -1. `team` runs a phase on all threads,
// then a barrier: what is read between two phases is not written by the next one.
template <typename T, typename Team>
VDS_HD int32_t decode_class(uint32_t of, const ClassRow& row, const TileJob& job, const BlockJob& block,
                            const TileView<T>& tile, Outcome* outcome, uint32_t* positions, T* values, Shared& s,
                            const Team& team) {
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
VDS_HD bool decode_tile(const TileJob& job, const BlockJob& block, const ClassRow* classes, Outcome* outcome,
                        uint32_t* positions, T* values, Shared& s, const Team& team) {
  const TileView<T> tile(job);
  const int count = static_cast<int>(block.classes);
  team([&](int thread) { begin_tile(thread, job, classes, count, s); });
  if (s.filled[0] < 0) return false;
  team([&](int thread) { count_groups(thread, tile, s); });
  int64_t total = 0;
  for (int c = 0; c < count; ++c) {
    const int32_t n =
        decode_class<T>(static_cast<uint32_t>(c), classes[c], job, block, tile, outcome, positions, values, s, team);
    if (n < 0) return false;
    total += n;
  }
  return total > 0 && Stream(job, s.reading).finished();
}

// Decodes a tile into what its block has of positions and new values, and flags it if it is malformed or there is no
// room.
template <typename T, typename Team>
VDS_HD void run_tile(const TileJob& job, const BlockJob* blocks, const ClassRow* models, Outcome* outcomes,
                     uint32_t* positions, T* values, Shared& s, const Team& team) {
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
