// Merge the changes of two versions of a block. Does not decode or allocate: lists come in and go out as arrays.
#include "../vds_core.h"
#include "dispatch.h"

namespace {

// Without branches on the data: which list comes next is as good as random, and a wrong guess costs more than the whole
// body.
template <typename T, bool add>
int64_t merge(const uint32_t* first_positions, const T* first, int64_t n, const uint32_t* second_positions,
              const T* second, int64_t m, uint32_t* positions, T* values) {
  int64_t i = 0, j = 0, found = 0;
  while (i < n && j < m) {
    const uint32_t a = first_positions[i], b = second_positions[j];
    const bool has_first = a <= b, has_second = b <= a;
    const T left = first[i], right = second[j];
    positions[found] = has_first ? a : b;
    if (add) {
      const T sum = static_cast<T>((has_first ? left : T{0}) + (has_second ? right : T{0}));
      values[found] = sum;
      found += sum != 0;
    } else {
      values[found] = has_second ? right : left;
      ++found;
    }
    i += has_first;
    j += has_second;
  }
  for (; i < n; ++i) {
    positions[found] = first_positions[i];
    values[found++] = first[i];
  }
  for (; j < m; ++j) {
    positions[found] = second_positions[j];
    values[found++] = second[j];
  }
  return found;
}

}  // namespace

// The union of two lists of ascending positions. Where both have a position, its value is the second's or, with `add`,
// the sum mod 2^(8 width), and what sums to zero is left out. Outputs have room for n + m. Returns how many, or -1 for
// an unknown width.
VDS_API int64_t vds_merge(int width, const uint32_t* first_positions, const void* first, int64_t n,
                          const uint32_t* second_positions, const void* second, int64_t m, int add, uint32_t* positions,
                          void* values) {
#define VDS_MERGE(T)                                                                                                  \
  return (add ? merge<T, true> : merge<T, false>)(first_positions, static_cast<const T*>(first), n, second_positions, \
                                                  static_cast<const T*>(second), m, positions,                        \
                                                  static_cast<T*>(values))
  switch (width) {
    case 1: VDS_MERGE(uint8_t);
    case 2: VDS_MERGE(uint16_t);
    case 4: VDS_MERGE(uint32_t);
    case 8: VDS_MERGE(uint64_t);
    default: return -1;
  }
#undef VDS_MERGE
}
