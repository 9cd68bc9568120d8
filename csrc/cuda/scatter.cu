// The commit: one cooperative launch, of no more blocks than run at once. All it does is in commit_phases.h, which a
// host runs too.
#include <cooperative_groups.h>

#include "../commit_phases.h"
#include "api.cuh"

namespace {

using namespace vds::commit;
constexpr int kThreads = 256;
// Blocks of a multiprocessor: keep its memory busy, and need not wait for all that runs there on other streams.
constexpr int kEach = 2;

// Phases with a barrier of the whole grid behind each.
struct Grid {
  struct Own {
    int64_t value = 0;
    __device__ explicit Own(const Grid&) {}
    __device__ int64_t& operator[](int64_t) { return value; }
  };

  __device__ int64_t threads() const { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

  template <typename Phase>
  __device__ void last(const Phase& phase) const {
    phase(blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x);
  }

  template <typename Phase>
  __device__ void operator()(const Phase& phase) const {
    last(phase);
    cooperative_groups::this_grid().sync();
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) commit(Update<T> update, Index* first) {
  run(update, first, Grid{});
}

// Blocks that a device runs at once: more cannot wait for each other. Under MIG and MPS, of the part that the process
// may use.
template <typename T>
cudaError_t most_blocks(int64_t* blocks) {
  int device = 0, processors = 0, each = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, commit<T>, kThreads, 0);
  *blocks = static_cast<int64_t>(processors) * (each < kEach ? each : kEach);
  return status;
}

template <typename T>
int launch(const void* segments, int64_t count, const void* offsets, const void* expected, const void* values,
           int64_t n, void* first, cudaStream_t stream) {
  int64_t most = 0;
  const cudaError_t status = most_blocks<T>(&most);
  if (status != cudaSuccess) return status;
  const int64_t wanted = vds::blocks_for(n, kThreads);
  Update<T> update{static_cast<const vds::Segment*>(segments),
                   count,
                   static_cast<const uint32_t*>(offsets),
                   static_cast<const T*>(expected),
                   static_cast<const T*>(values),
                   n};
  Index* outcome = static_cast<Index*>(first);
  void* arguments[] = {&update, &outcome};
  return cudaLaunchCooperativeKernel(commit<T>, dim3(static_cast<unsigned>(wanted < most ? wanted : most)),
                                     dim3(kThreads), arguments, 0, stream);
}

}  // namespace

VDS_API int vds_abi_version() { return vds::kAbiVersion; }

VDS_API const char* vds_cuda_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

// *yes: whether a device can run a grid whose blocks wait for each other, as the commit's do. Returns a cudaError_t,
// which is none only if this library has code for the device.
VDS_API int vds_cuda_cooperates(int device, int* yes) {
  int current = 0;
  cudaError_t status = cudaGetDevice(&current);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(yes, cudaDevAttrCooperativeLaunch, device);
  if (status != cudaSuccess) return status;
  if (current != device) status = cudaSetDevice(device);
  cudaFuncAttributes commits;
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&commits, commit<uint16_t>);
  if (current != device) cudaSetDevice(current);
  cudaGetLastError();  // it is returned: no launch on another device is to be taken for what failed
  return status;
}

// Everything but the counts is a device address. *first receives −1, or the index of the first element that was not as
// expected. Returns a cudaError_t.
VDS_API int vds_cuda_scatter(int width, const void* segments, int64_t count, const void* offsets, const void* expected,
                             const void* values, int64_t n, void* first, void* stream) {
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  switch (width) {
    case 1: return launch<uint8_t>(segments, count, offsets, expected, values, n, first, queue);
    case 2: return launch<uint16_t>(segments, count, offsets, expected, values, n, first, queue);
    case 4: return launch<uint32_t>(segments, count, offsets, expected, values, n, first, queue);
    case 8: return launch<uint64_t>(segments, count, offsets, expected, values, n, first, queue);
    default: return vds::kUnknownWidth;
  }
}
