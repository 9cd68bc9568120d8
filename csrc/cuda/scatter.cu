// The commit: compare every live element with what is expected, then write all of them or none.
// Two kernels on one stream rather than one with an undo: the second finds its lines in L2, and nothing needs rolling back.
#include "api.cuh"

namespace {

using vds::Segment;
using Index = unsigned long long;
constexpr Index kNone = ~0ull;  // −1 for the host
constexpr int kThreads = 256;

// The live element that element i goes to, or null when no segment covers it. Segments are ascending and disjoint.
template <typename T>
__device__ T* target(const Segment* segments, int64_t count, const uint32_t* offsets, int64_t i) {
  int64_t low = 0, high = count;  // the last segment that begins at or before i is low − 1
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (segments[middle].first <= i)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == 0 || i >= segments[low - 1].last) return nullptr;
  return reinterpret_cast<T*>(segments[low - 1].address) + offsets[i];
}

template <typename T>
__global__ void compare(const Segment* segments, int64_t count, const uint32_t* offsets, const T* expected, int64_t n, Index* first) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const T* live = target<T>(segments, count, offsets, i);
    if (live != nullptr && *live != expected[i]) atomicMin(first, static_cast<Index>(i));
  }
}

template <typename T>
__global__ void write(const Segment* segments, int64_t count, const uint32_t* offsets, const T* values, int64_t n, const Index* first) {
  if (*first != kNone) return;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    T* live = target<T>(segments, count, offsets, i);
    if (live != nullptr) *live = values[i];
  }
}

template <typename T>
int scatter(const Segment* segments, int64_t count, const uint32_t* offsets, const void* expected, const void* values, int64_t n,
            Index* first, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(first, 0xFF, sizeof *first, stream);
  if (cleared != cudaSuccess || n == 0) return cleared;
  const unsigned blocks = vds::blocks_for(n, kThreads);
  compare<T><<<blocks, kThreads, 0, stream>>>(segments, count, offsets, static_cast<const T*>(expected), n, first);
  write<T><<<blocks, kThreads, 0, stream>>>(segments, count, offsets, static_cast<const T*>(values), n, first);
  return cudaGetLastError();
}

}  // namespace

VDS_API int vds_abi_version() { return vds::kAbiVersion; }

VDS_API const char* vds_cuda_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

// Everything but the counts is a device address. *first receives −1, or the index of the first element that was not as expected.
// Returns a cudaError_t.
VDS_API int vds_cuda_scatter(int width, const void* segments, int64_t count, const void* offsets, const void* expected,
                             const void* values, int64_t n, void* first, void* stream) {
  const Segment* rows = static_cast<const Segment*>(segments);
  const uint32_t* places = static_cast<const uint32_t*>(offsets);
  Index* outcome = static_cast<Index*>(first);
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  switch (width) {
    case 1: return scatter<uint8_t>(rows, count, places, expected, values, n, outcome, queue);
    case 2: return scatter<uint16_t>(rows, count, places, expected, values, n, outcome, queue);
    case 4: return scatter<uint32_t>(rows, count, places, expected, values, n, outcome, queue);
    case 8: return scatter<uint64_t>(rows, count, places, expected, values, n, outcome, queue);
    default: return vds::kUnknownWidth;
  }
}
