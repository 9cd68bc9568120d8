// What the loader asks before it trusts the library.
#include "../vds_core.h"
#include "dispatch.h"

VDS_API int vds_abi_version() { return vds::kAbiVersion; }

// The instruction set that VDS_CLONES resolves to on this machine.
VDS_API const char* vds_instruction_set() {
#if VDS_DISPATCHED
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) return "avx2";
#endif
  return "baseline";
}
