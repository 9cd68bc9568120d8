// Compares two states of a tensor and compacts what differs. All the kernels do is in diff_compact.h, which a host runs
// too.
#include "../diff_compact.h"
#include "api.cuh"

namespace {

using namespace vds::diff;

template <typename T>
__global__ void __launch_bounds__(kTeam)
    mark(const T* before, const T* after, int64_t n, bool aligned, uint8_t* masks, uint32_t* counts) {
  __shared__ uint32_t sums[kTeam];
  mark_tile(blockIdx.x, before, after, n, aligned, masks, counts, sums, vds::Team{});
}

__global__ void __launch_bounds__(kAdders) add(uint32_t* counts, int64_t tiles) {
  __shared__ uint32_t sums[kAdders];
  add_up(counts, tiles, sums, vds::Team{});
}

template <typename T>
__global__ void __launch_bounds__(kTeam)
    write(T* before, const T* after, const uint8_t* masks, const uint32_t* offsets, bool advance, Columns<T> out) {
  __shared__ uint32_t sums[kTeam];
  write_tile(blockIdx.x, before, after, masks, offsets, advance, out, sums, vds::Team{});
}

template <typename T>
int start_mark(const void* before, const void* after, int64_t n, uint8_t* masks, uint32_t* counts,
               cudaStream_t stream) {
  const int64_t tiles = tiles_of(n);
  const bool aligned = (reinterpret_cast<uintptr_t>(before) | reinterpret_cast<uintptr_t>(after)) % 16 == 0;
  if (tiles > 0)
    mark<T><<<static_cast<unsigned>(tiles), kTeam, 0, stream>>>(
        static_cast<const T*>(before), static_cast<const T*>(after), n, aligned, masks, counts);
  add<<<1, kAdders, 0, stream>>>(counts, tiles);
  return cudaGetLastError();
}

template <typename T>
int start_write(void* before, const void* after, int64_t n, const uint8_t* masks, const uint32_t* offsets, bool advance,
                uint32_t* positions, void* old_out, void* new_out, cudaStream_t stream) {
  const Columns<T> out{positions, static_cast<T*>(old_out), static_cast<T*>(new_out)};
  if (n > 0)
    write<T><<<static_cast<unsigned>(tiles_of(n)), kTeam, 0, stream>>>(
        static_cast<T*>(before), static_cast<const T*>(after), masks, offsets, advance, out);
  return cudaGetLastError();
}

}  // namespace

// First half of a diff of n < 2^31 elements, in tiles of 8192. All but n is a device address: masks u8 [tiles, 1024],
// aligned to 8; counts u32 [tiles + 1] receives how many changes lie before each tile, and last, how many there are.
// Returns a cudaError_t.
VDS_API int vds_cuda_diff_mark(int width, const void* before, const void* after, int64_t n, void* masks, void* counts,
                               void* stream) {
  uint8_t* const bits = static_cast<uint8_t*>(masks);
  uint32_t* const found = static_cast<uint32_t*>(counts);
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  switch (width) {
    case 1: return start_mark<uint8_t>(before, after, n, bits, found, queue);
    case 2: return start_mark<uint16_t>(before, after, n, bits, found, queue);
    case 4: return start_mark<uint32_t>(before, after, n, bits, found, queue);
    case 8: return start_mark<uint64_t>(before, after, n, bits, found, queue);
    default: return vds::kUnknownWidth;
  }
}

// Second half: positions u32, old and new values of every change, in order; and if `advance`, the new value over the
// old one.
VDS_API int vds_cuda_diff_write(int width, void* before, const void* after, int64_t n, const void* masks,
                                const void* counts, int advance, void* positions, void* old_out, void* new_out,
                                void* stream) {
  const uint8_t* const bits = static_cast<const uint8_t*>(masks);
  const uint32_t* const found = static_cast<const uint32_t*>(counts);
  uint32_t* const places = static_cast<uint32_t*>(positions);
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  switch (width) {
    case 1: return start_write<uint8_t>(before, after, n, bits, found, advance != 0, places, old_out, new_out, queue);
    case 2: return start_write<uint16_t>(before, after, n, bits, found, advance != 0, places, old_out, new_out, queue);
    case 4: return start_write<uint32_t>(before, after, n, bits, found, advance != 0, places, old_out, new_out, queue);
    case 8: return start_write<uint64_t>(before, after, n, bits, found, advance != 0, places, old_out, new_out, queue);
    default: return vds::kUnknownWidth;
  }
}
