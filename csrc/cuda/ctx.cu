// Decodes `ctx` tiles, one block of threads each. All it does is in ctx_decode.h, which a host runs too.
#include "../ctx_decode.h"
#include "api.cuh"

namespace {

using namespace vds::ctx;

template <typename T>
__global__ void __launch_bounds__(kTeam, 4) decode(const TileJob* tiles, const BlockJob* blocks, const ClassRow* models,
                                                   Outcome* outcomes, uint32_t* positions, T* values) {
  extern __shared__ __align__(16) unsigned char memory[];
  run_tile(tiles[blockIdx.x], blocks, models, outcomes, positions, values, *reinterpret_cast<Shared*>(memory),
           vds::Team{});
}

template <typename T>
int launch(const void* tiles, int64_t count, const void* blocks, int64_t block_count, const void* models,
           void* positions, void* values, void* outcomes, cudaStream_t stream) {
  Outcome* const out = static_cast<Outcome*>(outcomes);
  const cudaError_t cleared = cudaMemsetAsync(out, 0, static_cast<size_t>(block_count) * sizeof *out, stream);
  if (cleared != cudaSuccess || count == 0) return cleared;
  const cudaError_t granted =
      cudaFuncSetAttribute(decode<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (granted != cudaSuccess) return granted;
  decode<T><<<static_cast<unsigned>(count), kTeam, sizeof(Shared), stream>>>(
      static_cast<const TileJob*>(tiles), static_cast<const BlockJob*>(blocks), static_cast<const ClassRow*>(models),
      out, static_cast<uint32_t*>(positions), static_cast<T*>(values));
  return cudaGetLastError();
}

}  // namespace

// Everything but the counts, of which that of tiles is below 2^31, is a device address: tiles i64 [count, 9] (TileJob),
// blocks i64 [block_count, 4] (BlockJob), models u16 [classes, 324] (ClassRow), outcomes u32 [block_count, 2]
// (Outcome), which is written anew. The positions and new values of a block are in no order. Returns a cudaError_t.
VDS_API int vds_cuda_ctx_decode(int width, const void* tiles, int64_t count, const void* blocks, int64_t block_count,
                                const void* models, void* positions, void* values, void* outcomes, void* stream) {
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  switch (width) {
    case 1: return launch<uint8_t>(tiles, count, blocks, block_count, models, positions, values, outcomes, queue);
    case 2: return launch<uint16_t>(tiles, count, blocks, block_count, models, positions, values, outcomes, queue);
    case 4: return launch<uint32_t>(tiles, count, blocks, block_count, models, positions, values, outcomes, queue);
    default: return vds::kUnknownWidth;
  }
}
