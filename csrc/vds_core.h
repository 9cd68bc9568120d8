// What the CPU and the CUDA library share: the state hash's keys, the float order behind the step codec, and the shape
// of a segment. No I/O, no allocation, no device calls. docs/protocol.md is normative.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define VDS_HD __host__ __device__
#else
#define VDS_HD
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "units and streams are little-endian");

namespace vds {

constexpr int kAbiVersion = 4;
constexpr int kLanes = 4;
constexpr int64_t kBlock = 1024;  // units that share one R

VDS_HD constexpr uint64_t mix64(uint64_t v) {
  uint64_t z = v * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// T_lane[unit], unit in [0, kBlock).
VDS_HD constexpr int16_t unit_key(int lane, int64_t unit) {
  return static_cast<int16_t>(static_cast<uint16_t>(mix64(static_cast<uint64_t>(unit) + 1) >> (16 * lane)) | 1u);
}

// A bijection of 16 bits whose differences depend on where it is: q(u + d) - q(u) is not a function of d alone. So a
// change that was coded as a step from the old value has another effect on the hash when it is applied to a wrong old
// value. The casts keep every step in 16 bits, which is what lets a compiler put 16 of them into one vector.
VDS_HD constexpr uint16_t quadratic(uint16_t u) {
  return static_cast<uint16_t>(u * static_cast<uint16_t>(2u * u + 1u));
}
VDS_HD constexpr uint16_t swap_bytes(uint16_t u) {
  return static_cast<uint16_t>(static_cast<uint16_t>(u << 8) | static_cast<uint16_t>(u >> 8));
}

// What lanes 0 and 1, and what lanes 2 and 3, read of a unit.
struct Readings {
  int16_t once, twice;
};
VDS_HD constexpr Readings readings(uint16_t unit) {
  const uint16_t once = quadratic(unit);
  return {static_cast<int16_t>(once), static_cast<int16_t>(quadratic(swap_bytes(once)))};
}

struct Seed {
  uint64_t a, b;
};

struct Lanes {
  uint32_t v[kLanes];
};

// R of a block of units.
VDS_HD inline Lanes block_key(Seed seed, uint64_t block) {
  const uint64_t y = mix64(seed.a + block), z = mix64(seed.b + block);
  return {{static_cast<uint32_t>(y) | 1u, static_cast<uint32_t>(y >> 32) | 1u, static_cast<uint32_t>(z) | 1u,
           static_cast<uint32_t>(z >> 32) | 1u}};
}

VDS_HD constexpr int units_per(int width) { return width < 2 ? 1 : width / 2; }

// k(u) mod 2^16: a float's rank among its bit patterns. Its own inverse.
VDS_HD constexpr uint16_t ordered(uint16_t u) { return u < 0x8000 ? u : static_cast<uint16_t>(0x7FFF - u); }

VDS_HD constexpr uint16_t zigzag(uint16_t step) {
  return static_cast<uint16_t>((step << 1) ^ (step & 0x8000 ? 0xFFFF : 0));
}
VDS_HD constexpr uint16_t unzigzag(uint16_t z) { return static_cast<uint16_t>((z >> 1) ^ (z & 1 ? 0xFFFF : 0)); }

// Elements first … last-1 of an update go to address + width * offset.
struct Segment {
  int64_t address, first, last, reserved;
};

}  // namespace vds
