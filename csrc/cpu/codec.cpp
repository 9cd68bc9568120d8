// The gap and step streams, and the map from checkpoint positions to live memory. Decoders trust nothing but the
// lengths they are given; zstd is the caller's.
#include "../vds_core.h"
#include "dispatch.h"

namespace {

constexpr uint8_t kEscape = 255;
constexpr int kMaxRank = 16;

// Refusals of the decoders; native/cpu.py gives them words.
enum Status : int { kOk = 0, kTruncated = 1, kExcess = 2, kOutOfRange = 3, kLongForm = 4 };

uint16_t step_code(uint16_t before, uint16_t after) {
  return vds::zigzag(static_cast<uint16_t>(vds::ordered(after) - vds::ordered(before)));
}

}  // namespace

// Bytes of the gap stream of n positions, or -1 if they do not ascend strictly.
VDS_API int64_t vds_gaps_size(const uint32_t* positions, int64_t n) {
  int64_t previous = -1, size = n;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t gap = positions[i] - previous - 1;
    if (gap < 0) return -1;
    size += gap / kEscape;
    previous = positions[i];
  }
  return size;
}

// `out` has room for vds_gaps_size bytes.
VDS_API void vds_encode_gaps(const uint32_t* positions, int64_t n, uint8_t* out) {
  int64_t previous = -1;
  for (int64_t i = 0; i < n; ++i) {
    int64_t gap = positions[i] - previous - 1;
    for (; gap >= kEscape; gap -= kEscape) *out++ = kEscape;
    *out++ = static_cast<uint8_t>(gap);
    previous = positions[i];
  }
}

// `positions` has room for `changed`; every position written is below `count`.
VDS_API int vds_decode_gaps(const uint8_t* data, int64_t size, int64_t changed, int64_t count, uint32_t* positions) {
  int64_t at = 0, position = -1;
  for (int64_t i = 0; i < changed; ++i) {
    ++position;
    uint8_t byte;
    do {
      if (at == size) return kTruncated;
      byte = data[at++];
      position += byte;
      if (position >= count) return kOutOfRange;
    } while (byte == kEscape);
    positions[i] = static_cast<uint32_t>(position);
  }
  return at == size ? kOk : kExcess;
}

// Bytes of the step stream, or -1-i if element i did not change.
VDS_API int64_t vds_steps_size(const uint16_t* before, const uint16_t* after, int64_t n) {
  int64_t size = n;
  for (int64_t i = 0; i < n; ++i) {
    if (before[i] == after[i]) return -1 - i;
    size += step_code(before[i], after[i]) > kEscape ? 2 : 0;
  }
  return size;
}

// `out` has room for vds_steps_size bytes.
VDS_API void vds_encode_steps(const uint16_t* before, const uint16_t* after, int64_t n, uint8_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t z = step_code(before[i], after[i]);
    if (z <= kEscape) {
      *out++ = static_cast<uint8_t>(z - 1);
    } else {
      *out++ = kEscape;
      *out++ = static_cast<uint8_t>(z);
      *out++ = static_cast<uint8_t>(z >> 8);
    }
  }
}

// `steps` has room for `changed`.
VDS_API int vds_decode_steps(const uint8_t* data, int64_t size, int64_t changed, uint16_t* steps) {
  int64_t at = 0;
  for (int64_t i = 0; i < changed; ++i) {
    if (at == size) return kTruncated;
    uint16_t z = static_cast<uint16_t>(data[at++] + 1);
    if (z == kEscape + 1) {
      if (size - at < 2) return kTruncated;
      z = static_cast<uint16_t>(data[at] | data[at + 1] << 8);
      at += 2;
      if (z <= kEscape) return kLongForm;
    }
    steps[i] = vds::unzigzag(z);
  }
  return at == size ? kOk : kExcess;
}

VDS_API void vds_apply_steps(const uint16_t* before, const uint16_t* steps, int64_t n, uint16_t* after) {
  for (int64_t i = 0; i < n; ++i) after[i] = vds::ordered(static_cast<uint16_t>(vds::ordered(before[i]) + steps[i]));
}

// Those of the elements base + positions that lie in the region, whose dimensions have at least 2 elements and nested,
// falling source strides. `base` is relative to the region's source offset. Outputs have room for n. Returns how many,
// or -1 for the rank.
VDS_API int64_t vds_map_positions(const uint32_t* positions, int64_t n, int64_t base, int rank, const int64_t* sizes,
                                  const int64_t* source_strides, const int64_t* target_strides, uint32_t* selected,
                                  int64_t* targets) {
  if (rank < 0 || rank > kMaxRank) return -1;
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    int64_t rest = base + positions[i], target = 0;
    bool inside = rest >= 0;
    for (int d = 0; inside && d < rank; ++d) {
      const int64_t index = rest / source_strides[d];
      rest -= index * source_strides[d];
      target += index * target_strides[d];
      inside = index < sizes[d];
    }
    if (!inside || rest != 0) continue;
    selected[found] = static_cast<uint32_t>(i);
    targets[found++] = target;
  }
  return found;
}
