// Runs the phases of ctx_decode.h and diff_compact.h on a host, one thread after the other, for tests and fuzzing.
// Where a thread of a phase relied on another one of it, running them backwards gives other bits.
#pragma once

namespace vds {

template <int threads>
struct HostTeam {
  bool backwards = false;

  template <typename Phase>
  void operator()(const Phase& phase) const {
    for (int i = 0; i < threads; ++i) phase(backwards ? threads - 1 - i : i);
  }
};

}  // namespace vds
