// Cuts one piece of memory into parts. Does not allocate.
#pragma once

#include <cstdint>

namespace vds {

// Hands out parts of one piece of memory, or only counts them when there is none.
class Arena {
 public:
  explicit Arena(void* memory) : at_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(int64_t n) {
    T* const part = reinterpret_cast<T*>(at_);
    const int64_t size = (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    used_ += size;
    if (at_ != nullptr) at_ += size;
    return part;
  }
  int64_t used() const { return used_; }

 private:
  char* at_;
  int64_t used_ = 0;
};

}  // namespace vds
