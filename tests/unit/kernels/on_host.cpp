// The kernels of csrc/cuda that are made of phases, run on a host, one thread after the other, behind the same
// functions. Addresses are the host's and streams mean nothing.
#include <memory>

#include "../../../csrc/commit_phases.h"
#include "../../../csrc/ctx_decode.h"
#include "../../../csrc/diff_compact.h"
#include "../../../csrc/host_team.h"

#define VDS_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kUnknownWidth = 1;
constexpr int64_t kGrid = 96;  // threads; few, so that each has several elements
bool backwards = false;

template <typename T>
int decode(const void* tiles, int64_t count, const void* blocks, int64_t block_count, const void* models,
           void* positions, void* values, void* outcomes) {
  using namespace vds::ctx;
  std::memset(outcomes, 0, static_cast<size_t>(block_count) * sizeof(Outcome));
  for (int64_t i = 0; i < count; ++i) {
    const auto shared = std::make_unique<Shared>();
    std::memset(static_cast<void*>(shared.get()), 0xA5, sizeof(Shared));  // as little to be relied on as a device's
    run_tile(static_cast<const TileJob*>(tiles)[i], static_cast<const BlockJob*>(blocks),
             static_cast<const ClassRow*>(models), static_cast<Outcome*>(outcomes), static_cast<uint32_t*>(positions),
             static_cast<T*>(values), *shared, vds::HostTeam<vds::ctx::kTeam>{backwards});
  }
  return 0;
}

template <typename T>
int scatter(const void* segments, int64_t count, const void* offsets, const void* expected, const void* values,
            int64_t n, void* first) {
  const vds::commit::Update<T> update{static_cast<const vds::Segment*>(segments),
                                      count,
                                      static_cast<const uint32_t*>(offsets),
                                      static_cast<const T*>(expected),
                                      static_cast<const T*>(values),
                                      n};
  vds::commit::run(update, static_cast<vds::commit::Index*>(first), vds::HostGrid{kGrid, backwards});
  return 0;
}

template <typename T>
int mark(const void* before, const void* after, int64_t n, void* masks, void* counts) {
  using namespace vds::diff;
  uint32_t sums[vds::diff::kTeam], adders[kAdders];
  const bool aligned = (reinterpret_cast<uintptr_t>(before) | reinterpret_cast<uintptr_t>(after)) % 16 == 0;
  for (int64_t tile = 0; tile < tiles_of(n); ++tile)
    mark_tile(tile, static_cast<const T*>(before), static_cast<const T*>(after), n, aligned,
              static_cast<uint8_t*>(masks), static_cast<uint32_t*>(counts), sums,
              vds::HostTeam<vds::diff::kTeam>{backwards});
  add_up(static_cast<uint32_t*>(counts), tiles_of(n), adders, vds::HostTeam<kAdders>{backwards});
  return 0;
}

template <typename T>
int write(void* before, const void* after, int64_t n, const void* masks, const void* counts, bool advance,
          void* positions, void* old_out, void* new_out) {
  using namespace vds::diff;
  uint32_t sums[vds::diff::kTeam];
  const Columns<T> out{static_cast<uint32_t*>(positions), static_cast<T*>(old_out), static_cast<T*>(new_out)};
  for (int64_t tile = 0; tile < tiles_of(n); ++tile)
    write_tile(tile, static_cast<T*>(before), static_cast<const T*>(after), static_cast<const uint8_t*>(masks),
               static_cast<const uint32_t*>(counts), advance, out, sums, vds::HostTeam<vds::diff::kTeam>{backwards});
  return 0;
}

}  // namespace

VDS_API int vds_abi_version() { return vds::kAbiVersion; }
VDS_API const char* vds_cuda_error(int) { return "invalid argument"; }
VDS_API void vds_run_backwards(int whether) { backwards = whether != 0; }

VDS_API int vds_cuda_scatter(int width, const void* segments, int64_t count, const void* offsets, const void* expected,
                             const void* values, int64_t n, void* first, void*) {
  switch (width) {
    case 1: return scatter<uint8_t>(segments, count, offsets, expected, values, n, first);
    case 2: return scatter<uint16_t>(segments, count, offsets, expected, values, n, first);
    case 4: return scatter<uint32_t>(segments, count, offsets, expected, values, n, first);
    case 8: return scatter<uint64_t>(segments, count, offsets, expected, values, n, first);
    default: return kUnknownWidth;
  }
}

VDS_API int vds_cuda_ctx_decode(int width, const void* tiles, int64_t count, const void* blocks, int64_t block_count,
                                const void* models, void* positions, void* values, void* outcomes, void*) {
  switch (width) {
    case 1: return decode<uint8_t>(tiles, count, blocks, block_count, models, positions, values, outcomes);
    case 2: return decode<uint16_t>(tiles, count, blocks, block_count, models, positions, values, outcomes);
    case 4: return decode<uint32_t>(tiles, count, blocks, block_count, models, positions, values, outcomes);
    default: return kUnknownWidth;
  }
}

VDS_API int vds_cuda_diff_mark(int width, const void* before, const void* after, int64_t n, void* masks, void* counts,
                               void*) {
  switch (width) {
    case 1: return mark<uint8_t>(before, after, n, masks, counts);
    case 2: return mark<uint16_t>(before, after, n, masks, counts);
    case 4: return mark<uint32_t>(before, after, n, masks, counts);
    case 8: return mark<uint64_t>(before, after, n, masks, counts);
    default: return kUnknownWidth;
  }
}

VDS_API int vds_cuda_diff_write(int width, void* before, const void* after, int64_t n, const void* masks,
                                const void* counts, int advance, void* positions, void* old_out, void* new_out, void*) {
  switch (width) {
    case 1: return write<uint8_t>(before, after, n, masks, counts, advance != 0, positions, old_out, new_out);
    case 2: return write<uint16_t>(before, after, n, masks, counts, advance != 0, positions, old_out, new_out);
    case 4: return write<uint32_t>(before, after, n, masks, counts, advance != 0, positions, old_out, new_out);
    case 8: return write<uint64_t>(before, after, n, masks, counts, advance != 0, positions, old_out, new_out);
    default: return kUnknownWidth;
  }
}
