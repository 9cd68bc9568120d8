// The `ctx` codec's tiles for AVX2 and BMI: built with those enabled, called only where the processor has them.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "ctx_kernels.h"
#include "ctx_tile.h"

const vds::ctx::Kernels vds::ctx::kAvx2 = {kernels_of<uint8_t>(), kernels_of<uint16_t>(), kernels_of<uint32_t>()};
