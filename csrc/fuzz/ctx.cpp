// Fuzzes the `ctx` decoder: whatever the bytes are, it stays inside what it was given, and what was encoded comes back.
// Where VDS_FUZZ_DEVICE is defined, so does the device's, run on the host, which refuses the same and finds the same.
// That is slower. An input is ten bytes that choose a block, a model and changes, then either the tiles' bytes, or
// edits of sound ones.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "../cpu/ctx_job.h"
#include "../ctx_decode.h"
#include "../host_team.h"

extern "C" {
int64_t vds_ctx_model_size(int);
int vds_ctx_model(int, const uint8_t*, const uint16_t*, const uint16_t*, void*);
int64_t vds_ctx_memory(const vds::ctx::Job*);
int64_t vds_ctx_encode(vds::ctx::Job*);
int vds_ctx_read_index(const uint8_t*, int64_t, int64_t*, int64_t, int64_t);
int64_t vds_ctx_decode(const vds::ctx::Job*);
}

namespace {

using namespace vds::ctx;

constexpr size_t kHeader = 10;

struct Random {
  uint64_t state;
  uint64_t operator()() {
    state += 0x9E3779B97F4A7C15ull;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>((*this)() % static_cast<uint64_t>(n)); }
};

// Frequencies of some symbols, escapes and the end always among them, that add up to kTotal.
void frequencies(Random& random, uint16_t* table, int symbols, int reserved) {
  int left = static_cast<int>(kTotal);
  for (int s = symbols - reserved; s < symbols; ++s) {
    table[s] = static_cast<uint16_t>(1 + random.below(300));
    left -= table[s];
  }
  for (int64_t i = random.below(60); i >= 0 && left > 0; --i) {
    const int share = static_cast<int>(1 + random.below(1 + left / 2));
    table[random.below(symbols)] += static_cast<uint16_t>(share);
    left -= share;
  }
  table[random.below(4)] += static_cast<uint16_t>(left);
}

// A model as either decoder wants it.
struct Statistics {
  std::vector<char> model;
  std::vector<ClassRow> rows;
};

Statistics model_of(Random& random, int classes) {
  std::vector<uint8_t> last;
  for (int context = 0; context < kContexts - 1 && static_cast<int>(last.size()) < classes - 1; ++context)
    if (random.below(kContexts) < classes || kContexts - 1 - context <= classes - 1 - static_cast<int>(last.size()))
      last.push_back(static_cast<uint8_t>(context));
  last.push_back(kContexts - 1);
  std::vector<uint16_t> gaps(last.size() * kGapSymbols), steps(last.size() * kStepSymbols);
  for (size_t c = 0; c < last.size(); ++c) {
    frequencies(random, &gaps[c * kGapSymbols], kGapSymbols, 2);
    frequencies(random, &steps[c * kStepSymbols], kStepSymbols, 1);
  }
  std::vector<char> model(static_cast<size_t>(vds_ctx_model_size(static_cast<int>(last.size()))));
  if (vds_ctx_model(static_cast<int>(last.size()), last.data(), gaps.data(), steps.data(), model.data()) != 0) abort();
  std::vector<ClassRow> rows(last.size());
  for (size_t c = 0; c < last.size(); ++c) {
    std::copy_n(&gaps[c * kGapSymbols], kGapSymbols, rows[c].gaps);
    std::copy_n(&steps[c * kStepSymbols], kStepSymbols, rows[c].steps);
    rows[c].last = last[c];
  }
  return {model, rows};
}

#if defined(VDS_FUZZ_DEVICE)
// What the device finds in the tiles of a block, one to a strip, in order; -1 where it refuses one.
template <typename T>
int64_t decode_on_device(const std::vector<ClassRow>& rows, const std::vector<T>& old, int64_t height,
                         const std::vector<int64_t>& strips, const std::vector<int64_t>& sizes,
                         const std::vector<uint8_t>& data, int64_t capacity, std::vector<uint32_t>& positions,
                         std::vector<T>& values) {
  const BlockJob block{0, capacity, 0, static_cast<int64_t>(rows.size())};
  const auto shared = std::make_unique<Shared>();
  std::vector<uint32_t> found(static_cast<size_t>(capacity));
  std::vector<T> moved(static_cast<size_t>(capacity));
  Outcome outcome{};
  int64_t at = 0;
  for (size_t t = 0; t < sizes.size(); ++t) {
    const int64_t size = sizes[t] >> 1;
    const std::vector<uint8_t> exact(data.begin() + at, data.begin() + at + size);  // so that its end is seen
    const TileJob job{reinterpret_cast<int64_t>(old.data()),
                      static_cast<int64_t>(old.size()) / height,
                      0,
                      height,
                      strips[2 * t],
                      strips[2 * t + 1],
                      reinterpret_cast<int64_t>(exact.data()),
                      sizes[t],
                      0};
    if (size > 0)
      run_tile(job, &block, rows.data(), &outcome, found.data(), moved.data(), *shared, vds::HostTeam<kTeam>{});
    at += size;
  }
  if (outcome.faults != 0) return -1;
  std::vector<size_t> order(outcome.found);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return found[a] < found[b]; });
  positions.clear();
  values.clear();
  for (const size_t i : order) {
    positions.push_back(found[i]);
    values.push_back(moved[i]);
  }
  return static_cast<int64_t>(outcome.found);
}
#endif

template <typename T>
void run(const uint8_t* header, const uint8_t* body, size_t size) {
  Random random{static_cast<uint64_t>(header[0]) << 8 | header[1]};
  const Statistics statistics = model_of(random, 1 + header[2] % 16);
  const std::vector<char>& model = statistics.model;
  const int64_t rows = 1 + header[3] % 16;
  std::vector<int64_t> strips;
  int64_t row_length = 0;
  const int64_t count = 1 + header[4] % 4;  // small blocks: one tile a strip
  for (int64_t s = 0; s < count; ++s) {
    const int64_t columns = 1 + random.below(s == 0 ? 1 + 2 * header[5] : 50);
    strips.insert(strips.end(), {row_length, columns});
    row_length += columns;
  }
  const int64_t elements = rows * row_length, every = 1 + header[6] % 200;
  std::vector<T> old(static_cast<size_t>(elements)), before, after;
  std::vector<uint32_t> positions;
  for (int64_t i = 0; i < elements; ++i) {
    T& bits = old[static_cast<size_t>(i)];
    bits = static_cast<T>(sizeof(T) == 2 && random.below(8) ? (random() & 0x8000) | (0x3A00 + random.below(0x400))
                                                            : random());
    if (random.below(every)) continue;
    const T next = static_cast<T>(random.below(9) ? bits + 1 + random.below(3) : random());
    if (next == bits) continue;
    positions.push_back(static_cast<uint32_t>(i));
    before.push_back(bits);
    after.push_back(next);
  }
  const int64_t n = static_cast<int64_t>(positions.size());
  const int64_t grid[4] = {rows, row_length, reinterpret_cast<int64_t>(strips.data()), count},
                room = (16 * n + 100 * count + 64) / 64 * 64;
  const auto block = [&] {
    Job job{};
    job.width = sizeof(T);
    job.model = model.data();
    job.old = old.data();
    job.grid = grid;
    return job;
  };
  Job job = block();
  job.n = n;
  job.positions = positions.data();
  job.before = before.data();
  job.after = after.data();
  job.room = room;
  job.size = vds_ctx_memory(&job);
  const std::unique_ptr<uint8_t[]> memory(new uint8_t[static_cast<size_t>(job.size)]);  // not zeroed: it is large
  job.memory = memory.get();
  const int64_t whole = vds_ctx_encode(&job), index_size = job.index_size;
  if (whole < 0) abort();
  std::vector<uint8_t> coded(memory.get(), memory.get() + whole);
  std::vector<uint8_t> index(memory.get() + room, memory.get() + room + index_size);
  std::vector<int64_t> sizes(static_cast<size_t>(count));
  if (vds_ctx_read_index(index.data(), index_size, sizes.data(), count, whole) != 0) abort();

  const auto decode = [&](const std::vector<uint8_t>& bytes, int64_t capacity, std::vector<uint32_t>& found) {
    const std::vector<uint8_t> exact(bytes.begin(), bytes.end());  // so that its end is seen
    std::vector<T> values(static_cast<size_t>(capacity));
    found.assign(static_cast<size_t>(capacity), 0);
    Job own = block();
    own.n = capacity;
    own.positions = found.data();
    own.after = values.data();
    own.stated = sizes.data();
    own.data = exact.data();
    own.data_size = static_cast<int64_t>(exact.size());
    own.size = vds_ctx_memory(&own);
    const std::unique_ptr<uint8_t[]> scratch(new uint8_t[static_cast<size_t>(own.size)]);
    own.memory = scratch.get();
    const int64_t total = vds_ctx_decode(&own);
#if defined(VDS_FUZZ_DEVICE)
    std::vector<uint32_t> positions;
    std::vector<T> moved;
    if (decode_on_device(statistics.rows, old, rows, strips, sizes, bytes, capacity, positions, moved) != total)
      abort();
    if (total >= 0) {
      found.resize(static_cast<size_t>(total));
      values.resize(static_cast<size_t>(total));
      if (positions != found || moved != values) abort();
    }
#endif
    return total;
  };
  std::vector<uint32_t> found;
  if (decode(coded, n, found) != n || found != positions) abort();

  if (header[7] & 1) {  // bytes of any kind
    coded.assign(body, body + size);
    int64_t left = static_cast<int64_t>(size);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t part = t + 1 == count ? left : left * header[8] / 255;
      sizes[static_cast<size_t>(t)] = part << 1 | (header[9] >> t & 1);
      left -= part;
    }
  } else {  // sound ones, edited: (where, what) pairs
    for (size_t i = 0; i + 2 < size && !coded.empty(); i += 3)
      coded[(static_cast<size_t>(body[i]) << 8 | body[i + 1]) % coded.size()] = body[i + 2];
    for (int64_t t = 0; t < count; ++t) sizes[static_cast<size_t>(t)] ^= header[9] >> t & 1;
    if (count > 1) {
      const int64_t moved = (sizes[0] >> 1) * header[8] / 255;
      sizes[0] -= moved << 1;
      sizes[1] += moved << 1;
    }
  }
  for (size_t i = 0; i + 1 < size && i < 4; i += 2) index[body[i] % index.size()] ^= body[i + 1];
  std::vector<int64_t> stated(static_cast<size_t>(count));
  if (vds_ctx_read_index(index.data(), index_size, stated.data(), count, whole) == 0) {
    int64_t together = 0;
    for (const int64_t one : stated) together += one >> 1;
    if (together != whole) abort();
  }
  const int64_t accepted = decode(coded, n, found);
  if (accepted > n) abort();
  for (int64_t i = 0; i < accepted; ++i)
    if (found[static_cast<size_t>(i)] >= elements ||
        (i && found[static_cast<size_t>(i)] <= found[static_cast<size_t>(i - 1)]))
      abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kHeader) return 0;
  switch (data[7] >> 1 & 3) {
    case 0: run<uint8_t>(data, data + kHeader, size - kHeader); break;
    case 1: run<uint32_t>(data, data + kHeader, size - kHeader); break;
    default: run<uint16_t>(data, data + kHeader, size - kHeader);
  }
  return 0;
}
