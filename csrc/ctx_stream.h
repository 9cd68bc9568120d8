// The bytes of a `ctx` tile as one thread of a team reads them: symbols, raw bits, and from both gaps and steps. Trusts
// nothing but the length that it is given. Does not know which element a gap leads to.
#pragma once

#include "ctx_team.h"

namespace vds {
namespace ctx {

// A tile's bytes: states and words from the front, raw bits from the back. One thread reads them, from registers.
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
  // 1 or kMaxLanes. Loops over them have a fixed end besides, so that they unroll and states stay in registers.
  int lanes_;
  uint32_t states_[kMaxLanes];
};

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
        if (!stream.raw(static_cast<uint32_t>(escape ? 8 * static_cast<int>(sizeof(T)) : raw_bits(symbol >> 1)), raw))
          return -1;
        const uint32_t size = escape ? 0 : from_magnitude(symbol >> 1, raw);
        if (size >= kSign<T>) return -1;
        z = escape ? raw : size << 1 | (symbol & 1);
      }
      folded[i + static_cast<uint32_t>(lane)] = z;
    }
  }
  return static_cast<int32_t>(n);
}

}  // namespace ctx
}  // namespace vds
