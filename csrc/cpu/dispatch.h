// Builds one source for AVX2 and for the baseline; the loader picks at run time. Wider vectors gain nothing: memory is
// the limit. Only where the toolchain can (GCC-compatible, x86-64, glibc); elsewhere the compiler's baseline is the
// only build.
#pragma once

#include <cstdlib>  // defines __GLIBC__ where it applies

#if defined(__x86_64__) && defined(__GNUC__) && defined(__GLIBC__)
#define VDS_DISPATCHED 1
#define VDS_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define VDS_DISPATCHED 0
#define VDS_CLONES
#endif

#define VDS_API extern "C" __attribute__((visibility("default")))
