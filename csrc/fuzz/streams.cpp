// Fuzzes the decoders of the gap and the step stream: they stay inside what they were given, and what they accept is
// exactly what the encoders write. An input is one byte that chooses the stream, four for the counts, then the stream.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
int64_t vds_gaps_size(const uint32_t*, int64_t);
void vds_encode_gaps(const uint32_t*, int64_t, uint8_t*);
int vds_decode_gaps(const uint8_t*, int64_t, int64_t, int64_t, uint32_t*);
int64_t vds_steps_size(const uint16_t*, const uint16_t*, int64_t);
void vds_encode_steps(const uint16_t*, const uint16_t*, int64_t, uint8_t*);
int vds_decode_steps(const uint8_t*, int64_t, int64_t, uint16_t*);
void vds_apply_steps(const uint16_t*, const uint16_t*, int64_t, uint16_t*);
}

namespace {

void gaps(int64_t changed, int64_t count, const std::vector<uint8_t>& stream) {
  std::vector<uint32_t> positions(static_cast<size_t>(changed));
  if (vds_decode_gaps(stream.data(), static_cast<int64_t>(stream.size()), changed, count, positions.data()) != 0)
    return;
  for (const uint32_t position : positions)
    if (position >= count) abort();
  std::vector<uint8_t> again(stream.size());
  if (vds_gaps_size(positions.data(), changed) != static_cast<int64_t>(stream.size())) abort();
  vds_encode_gaps(positions.data(), changed, again.data());
  if (again != stream) abort();
}

void steps(int64_t changed, const std::vector<uint8_t>& stream) {
  const size_t n = static_cast<size_t>(changed);
  std::vector<uint16_t> found(n), zeros(n), moved(n);
  if (vds_decode_steps(stream.data(), static_cast<int64_t>(stream.size()), changed, found.data()) != 0) return;
  vds_apply_steps(zeros.data(), found.data(), changed, moved.data());
  std::vector<uint8_t> again(stream.size());
  if (vds_steps_size(zeros.data(), moved.data(), changed) != static_cast<int64_t>(stream.size())) abort();
  vds_encode_steps(zeros.data(), moved.data(), changed, again.data());
  if (again != stream) abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 5) return 0;
  const int64_t changed = data[1] | data[2] << 8, count = changed + (data[3] | data[4] << 8);
  const std::vector<uint8_t> stream(data + 5, data + size);
  if (data[0] & 1)
    gaps(changed, count, stream);
  else
    steps(changed, stream);
  return 0;
}
