// The state hash of a contiguous run. A thread holds the keys of its 8 places in a block of 1024 units in registers; a
// CTA walks over many blocks, whose R it works out once, 128 at a time, in shared memory.
#include "api.cuh"

namespace {

using vds::kBlock;
using vds::kLanes;
using vds::Lanes;
using vds::Seed;

constexpr int kThreads = 128;
constexpr int kPer = kBlock / kThreads;  // units of a block per thread
constexpr int kBatch = kThreads;         // blocks of units per CTA and round
static_assert(kPer == 8, "one 16-byte load");

// Units in memory: 16-bit halves of wider elements, or one byte each.
struct Halves {
  const int16_t* data;
  __device__ int unit(int64_t i) const { return data[i]; }
};
struct Bytes {
  const uint8_t* data;
  __device__ int unit(int64_t i) const { return data[i]; }
};

__device__ inline void load8(const Halves& units, int64_t at, bool aligned, int (&u)[kPer]) {
  if (aligned) {
    const int4 packed = *reinterpret_cast<const int4*>(units.data + at);
    const int words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u[2 * i] = static_cast<int16_t>(words[i]);
      u[2 * i + 1] = words[i] >> 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPer; ++i) u[i] = units.unit(at + i);
  }
}
__device__ inline void load8(const Bytes& units, int64_t at, bool, int (&u)[kPer]) {
#pragma unroll
  for (int i = 0; i < kPer; ++i) u[i] = units.unit(at + i);
}

// Units [0, n) in memory are units first … first+n−1 of the tensor; adds their hash to lanes.
template <typename Units>
__global__ void __launch_bounds__(kThreads)
    hash(Units units, int64_t n, int64_t first, Seed seed, bool aligned, uint32_t* lanes) {
  __shared__ Lanes block_keys[kBatch];
  const int place = threadIdx.x * kPer;
  int16_t keys[kLanes][kPer];
#pragma unroll
  for (int l = 0; l < kLanes; ++l)
#pragma unroll
    for (int i = 0; i < kPer; ++i) keys[l][i] = vds::unit_key(l, place + i);

  Lanes total{};
  const int64_t first_block = first / kBlock;
  const int64_t blocks = (first + n + kBlock - 1) / kBlock - first_block;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kBatch; base < blocks;
       base += static_cast<int64_t>(gridDim.x) * kBatch) {
    __syncthreads();
    block_keys[threadIdx.x] = vds::block_key(seed, static_cast<uint64_t>(first_block + base + threadIdx.x));
    __syncthreads();
    const int batch = static_cast<int>(blocks - base < kBatch ? blocks - base : kBatch);
#pragma unroll 2
    for (int b = 0; b < batch; ++b) {
      const int64_t at = (first_block + base + b) * kBlock + place - first;
      int u[kPer];
      vds::Readings read[kPer];
      if (at >= 0 && at + kPer <= n) {
        load8(units, at, aligned, u);
      } else {
#pragma unroll
        for (int i = 0; i < kPer; ++i) u[i] = at + i >= 0 && at + i < n ? units.unit(at + i) : 0;
      }
#pragma unroll
      for (int i = 0; i < kPer; ++i) read[i] = vds::readings(static_cast<uint16_t>(u[i]));
#pragma unroll
      for (int l = 0; l < kLanes; ++l) {
        uint32_t sum = 0;
#pragma unroll
        for (int i = 0; i < kPer; ++i)
          sum += static_cast<uint32_t>((l < 2 ? read[i].once : read[i].twice) * static_cast<int>(keys[l][i]));
        total.v[l] += sum * block_keys[b].v[l];
      }
    }
  }
#pragma unroll
  for (int l = 0; l < kLanes; ++l) {
    uint32_t sum = total.v[l];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, step);
    if (threadIdx.x % 32 == 0) atomicAdd(lanes + l, sum);
  }
}

}  // namespace

// bits and lanes (u32 [4]) are device addresses; elements start … start+n−1 of a tensor. Returns a cudaError_t.
VDS_API int vds_cuda_hash(int width, const void* bits, int64_t n, int64_t start, uint64_t a, uint64_t b, void* lanes,
                          void* stream) {
  if (width != 1 && width != 2 && width != 4 && width != 8) return vds::kUnknownWidth;
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  uint32_t* const out = static_cast<uint32_t*>(lanes);
  const cudaError_t cleared = cudaMemsetAsync(out, 0, kLanes * sizeof *out, queue);
  if (cleared != cudaSuccess || n == 0) return cleared;
  const int64_t units = n * vds::units_per(width), first = start * vds::units_per(width);
  const unsigned grid = vds::blocks_for(units, kBlock * kBatch);
  if (width == 1) {
    hash<<<grid, kThreads, 0, queue>>>(Bytes{static_cast<const uint8_t*>(bits)}, units, first, Seed{a, b}, false, out);
  } else {
    // A thread's units begin at a multiple of 8 in the tensor, so one check of where `first` lies in memory holds for
    // all.
    const bool aligned = (reinterpret_cast<uintptr_t>(bits) - static_cast<uintptr_t>(first) * 2) % 16 == 0;
    hash<<<grid, kThreads, 0, queue>>>(Halves{static_cast<const int16_t*>(bits)}, units, first, Seed{a, b}, aligned,
                                       out);
  }
  return cudaGetLastError();
}
