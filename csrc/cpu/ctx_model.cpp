// Lays out the models of the `ctx` codec, and counts what their classes are made from. Does not code, and does not
// allocate.
#include <cstring>

#include "ctx_kernels.h"
#include "dispatch.h"

namespace {

using namespace vds::ctx;

bool fill(const uint16_t* frequencies, int symbols, uint8_t* slots, uint32_t* codes) {
  uint32_t start = 0;
  for (int s = 0; s < symbols; ++s) {
    const uint32_t frequency = frequencies[s];
    if (frequency > kTotal - start) return false;
    codes[s] = frequency == 0 ? 0 : frequency | start << 16;
    std::memset(slots + start, s, frequency);
    start += frequency;
  }
  return start == kTotal;
}

template <typename T>
void survey(const T* old, int64_t count, const T* before, const T* after, int64_t n, uint64_t* members,
            uint64_t* steps) {
  constexpr int64_t kTurns =
      4;  // most weights have one of a few contexts, and a count that was just written is slow to read
  uint64_t counts[kTurns][kContexts] = {};
  for (int64_t i = 0; i < count; ++i) ++counts[i % kTurns][context(old[i])];
  for (const auto& turn : counts)
    for (int c = 0; c < kContexts; ++c) members[c] += turn[c];
  for (int64_t i = 0; i < n; ++i) {
    const T z = fold_step(oriented(static_cast<T>(rank_of(after[i]) - rank_of(before[i])), before[i]));
    ++steps[context(before[i]) * kStepSymbols + (magnitude(z >> 1).symbol << 1 | (z & 1))];
  }
}

}  // namespace

VDS_API int64_t vds_ctx_model_size(int classes) {
  return static_cast<int64_t>(sizeof(Model)) + (classes - 1) * static_cast<int64_t>(sizeof(Class));
}

// Lays out a model of 1 to 16 classes from the last context of each and the frequencies of its symbols. Returns 0, or
// -1 if the contexts do not ascend to 255 or a class's frequencies do not add up to 4096.
VDS_API int vds_ctx_model(int classes, const uint8_t* last, const uint16_t* gaps, const uint16_t* steps, void* out) {
  Model& model = *static_cast<Model*>(out);
  if (classes < 1 || classes > kMaxClasses || last[classes - 1] != kContexts - 1) return -1;
  model.classes = static_cast<uint32_t>(classes);
  int low = 0;
  for (int c = 0; c < classes; ++c) {
    Class& of = model.of[c];
    if (last[c] < low || !fill(gaps + c * kGapSymbols, kGapSymbols, of.gap_slots, of.gap_codes) ||
        !fill(steps + c * kStepSymbols, kStepSymbols, of.step_slots, of.step_codes))
      return -1;
    of.low = static_cast<uint32_t>(low);
    of.high = last[c];
    for (; low <= last[c]; ++low) model.class_of[low] = static_cast<uint8_t>(c);
  }
  return 0;
}

// Adds elements per context to members [256], and the step symbols of n changes per context of the old value to steps
// [256, 249].
VDS_API int vds_ctx_survey(int width, const void* old, int64_t elements, const void* before, const void* after,
                           int64_t n, uint64_t* members, uint64_t* steps) {
#define VDS_CTX_SURVEY(T)                                                                                       \
  (survey(static_cast<const T*>(old), elements, static_cast<const T*>(before), static_cast<const T*>(after), n, \
          members, steps),                                                                                      \
   0)
  VDS_CTX_WIDTHS(VDS_CTX_SURVEY, -1)
#undef VDS_CTX_SURVEY
}
