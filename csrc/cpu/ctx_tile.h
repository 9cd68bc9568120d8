// What is done with a tile of the `ctx` codec. Included once for each instruction set.
#include "ctx_members.h"

#include "ctx_decode.h"
#include "ctx_encode.h"

namespace {

template <typename T>
constexpr TileKernels<T> kernels_of() {
  return {{decode_tile<T, 1>, decode_tile<T, kMaxLanes>}, order_changes<T>, encode_tile<T>, tally_tile<T>};
}

}  // namespace
