// What the functions of the `ctx` codec are called with. Python declares the same (native/ctx_cpu.py).
#pragma once

#include <cstdint>

namespace vds {
namespace ctx {

// One block. Each function says which fields it reads besides the first six, and which it writes. A record rather than
// arguments, of which Python would convert each at each call.
struct Job {
  int64_t width;      // bytes of an element
  const void* model;  // as vds_ctx_model lays it out
  const void* old;    // values, [rows row_length]
  const void* grid;   // Grid of ctx_grid.h
  void* memory;       // to work in, of vds_ctx_memory bytes
  int64_t size;       // bytes of it

  int64_t n;  // changes, or of how many there is room
  uint32_t* positions;
  const void* before;
  void* after;

  int64_t room;        // bytes that may be written
  int64_t index_size;  // bytes that were, of the index

  const int64_t* stated;  // of each tile: bytes << 1 | whether there are kMaxLanes states
  const uint8_t* wanted;  // of each tile: whether it is; or null, and all are
  const uint8_t* data;
  int64_t data_size;  // bytes

  uint64_t *gaps, *steps;  // counts, [classes, 74] and [classes, 249]
};

}  // namespace ctx
}  // namespace vds
