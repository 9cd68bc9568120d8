// The `ctx` codec's alphabets, contexts and models, as docs/protocol.md states them. No I/O, no allocation.
#pragma once

#include <cstdint>
#include <type_traits>

#include "vds_core.h"

namespace vds {
namespace ctx {

constexpr int64_t kTileElements = 1 << 18;  // of a tile at most
constexpr int kMaxClasses = 16;
constexpr int kContexts = 256;

// rANS: 32-bit states in [kFloor, 2^32), renewed by 16-bit words, frequencies of 12 bits.
constexpr int kScale = 12;
constexpr uint32_t kTotal = 1u << kScale;
constexpr uint32_t kFloor = 1u << 16;
constexpr int kMaxLanes = 4;

// Magnitudes: one symbol each below 16, then four an octave, told apart by raw bits.
constexpr uint32_t kExact = 16;
constexpr int kFine = 2;

constexpr int kGapBits = 18;  // of an escaped gap
constexpr int kGapEnd = 72, kGapEscape = 73, kGapSymbols = 74;
constexpr int kStepEscape = 248, kStepSymbols = 249;

struct Magnitude {
  uint32_t symbol;
  int bits;      // raw bits that follow
  uint32_t raw;  // their value
};

// Without a branch, which would be guessed wrong for a third of real gaps.
VDS_HD inline Magnitude magnitude(uint32_t v) {
  const bool exact = v < kExact;
  const int top = 31 - __builtin_clz(v | kExact), bits = top - kFine;
  const uint32_t symbol = kExact + ((static_cast<uint32_t>(top) - 4) << kFine) + ((v >> bits) & ((1u << kFine) - 1));
  return {exact ? v : symbol, exact ? 0 : bits, exact ? 0 : v & ((1u << bits) - 1)};
}

VDS_HD inline int raw_bits(uint32_t symbol) {
  return symbol < kExact ? 0 : static_cast<int>((symbol - kExact) >> kFine) + 4 - kFine;
}
VDS_HD inline uint32_t from_magnitude(uint32_t symbol, uint32_t raw) {
  if (symbol < kExact) return symbol;
  const uint32_t lead = (1u << kFine) | ((symbol - kExact) & ((1u << kFine) - 1));
  return (lead << raw_bits(symbol)) | raw;
}

// The context of an element is its sign-free leading bits: of a bf16, fp32 or fp8 (nearly) its exponent.
template <typename T>
VDS_HD constexpr uint8_t context(T u) {
  if (sizeof(T) == 1) return static_cast<uint8_t>(u & 0x7F);
  return static_cast<uint8_t>(u >> (sizeof(T) == 2 ? 7 : 23));
}

template <typename T>
constexpr T kSign = static_cast<T>(T{1} << (8 * sizeof(T) - 1));

// Signs of weights and of their steps are as good as random, so what depends on them is computed without a branch: by
// all ones where there is a sign, and zero elsewhere.
template <typename T>
VDS_HD constexpr T if_signed(T u) {
  return static_cast<T>(0 - (u >> (8 * sizeof(T) - 1)));
}
template <typename T>
VDS_HD constexpr T negated_if(T mask, T u) {
  return static_cast<T>((u ^ mask) - mask);
}

// A float's rank among its bit patterns, mod 2^(8 width): (kSign - 1) - u where it is signed. Its own inverse.
template <typename T>
VDS_HD constexpr T rank_of(T u) {
  return static_cast<T>(u ^ (if_signed(u) & (kSign<T> - 1)));
}

// A step away from zero is positive, whatever the old value's sign. Its own inverse.
template <typename T>
VDS_HD constexpr T oriented(T step, T old) {
  return negated_if(if_signed(old), step);
}

// A step s ≠ 0 as 2 (|s| - 1) + (s < 0), which fits the width.
template <typename T>
VDS_HD constexpr T fold_step(T s) {
  const T mask = if_signed(s);
  return static_cast<T>((negated_if(mask, s) - 1) * 2 + (mask & 1));
}
template <typename T>
VDS_HD constexpr T unfold_step(T z) {
  return negated_if(static_cast<T>(0 - (z & 1)), static_cast<T>((z >> 1) + 1));
}

// What a folded step makes of an old value.
template <typename T>
VDS_HD constexpr T stepped(T old, T z) {
  return rank_of(static_cast<T>(rank_of(old) + oriented(unfold_step(z), old)));
}

// One class of contexts low ... high: frequencies as decoding and encoding look them up. Slots hold symbols alone: what
// a tile looks up in its classes' tables has to come from a distant cache, and so there should be little of it.
struct Class {
  uint8_t gap_slots[kTotal];
  uint8_t step_slots[kTotal];
  uint32_t gap_codes[kGapSymbols];  // frequency | first slot << 16; 0 for what does not occur
  uint32_t step_codes[kStepSymbols];
  uint32_t low, high;
};

struct Model {
  uint32_t classes;
  uint8_t class_of[kContexts];
  Class of[1];  // as many as there are classes
};

// A rectangle of a block that is seen as rows of `row_length` elements.
struct Tile {
  int64_t row, rows, column, columns;
};

}  // namespace ctx
}  // namespace vds
