// Runs the phases of commit_phases.h, ctx_decode.h and diff_compact.h on a host, one thread after the other, for tests
// and fuzzing. Where a thread of a phase relied on another one of it, running them backwards gives other bits.
#pragma once

#include <cstdint>
#include <vector>

namespace vds {

template <int threads>
struct HostTeam {
  bool backwards = false;

  template <typename Phase>
  void operator()(const Phase& phase) const {
    for (int i = 0; i < threads; ++i) phase(backwards ? threads - 1 - i : i);
  }
};

// The same of a whole grid.
struct HostGrid {
  struct Own {
    std::vector<int64_t> values;
    explicit Own(const HostGrid& grid) : values(static_cast<size_t>(grid.count)) {}
    int64_t& operator[](int64_t thread) { return values[static_cast<size_t>(thread)]; }
  };

  int64_t count;
  bool backwards = false;

  int64_t threads() const { return count; }

  template <typename Phase>
  void last(const Phase& phase) const {
    for (int64_t i = 0; i < count; ++i) phase(backwards ? count - 1 - i : i);
  }

  template <typename Phase>
  void operator()(const Phase& phase) const {
    last(phase);
  }
};

}  // namespace vds
