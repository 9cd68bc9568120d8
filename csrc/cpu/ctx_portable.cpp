// The `ctx` codec's tiles for any processor.
#include <algorithm>
#include <cstring>

#include "ctx_kernels.h"
#include "ctx_tile.h"

const vds::ctx::Kernels vds::ctx::kPortable = {kernels_of<uint8_t>(), kernels_of<uint16_t>(), kernels_of<uint32_t>()};
