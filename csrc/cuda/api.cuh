// Shared by the CUDA sources: export, launch checking, phases. No kernels.
#pragma once

#include <cuda_runtime.h>

#include "../vds_core.h"

#define VDS_API extern "C" __attribute__((visibility("default")))

namespace vds {

constexpr int kUnknownWidth = static_cast<int>(cudaErrorInvalidValue);

// Blocks for one thread per item, capped: kernels stride over the rest.
inline unsigned blocks_for(int64_t items, int threads) {
  const int64_t blocks = (items + threads - 1) / threads;
  return static_cast<unsigned>(blocks<1 ? 1 : blocks>(1 << 20) ? (1 << 20) : blocks);
}

// Runs a phase of the headers that a host runs too: on every thread of the block, then a barrier.
struct Team {
  template <typename Phase>
  VDS_HD void operator()(const Phase& phase) const {
#if defined(__CUDA_ARCH__)
    phase(static_cast<int>(threadIdx.x));
    __syncthreads();
#endif
  }
};

}  // namespace vds
