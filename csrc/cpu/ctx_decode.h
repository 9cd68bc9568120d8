// Decodes the tiles of the `ctx` codec. Included once for each instruction set, inside a namespace of its own. Trusts
// nothing but the lengths it is given. Does not allocate.

namespace {

using namespace vds::ctx;

// Where in its block an element of a tile is.
class Places {
 public:
  Places(int64_t row_length, const Tile& tile)
      : first_(tile.row * row_length + tile.column), columns_(static_cast<uint32_t>(tile.columns)),
        skip_(row_length - tile.columns), inverse_(((1ull << 40) + columns_ - 1) / columns_) {}
  int64_t operator()(uint32_t element) const { return first_ + element + row(element) * skip_; }

 private:
  // Exact: element and columns are at most 2^18.
  int64_t row(uint32_t element) const { return static_cast<int64_t>((element * inverse_) >> 40); }
  int64_t first_;
  uint32_t columns_;
  int64_t skip_;
  uint64_t inverse_;
};

// A tile's bytes: states and words from the front, raw bits from the back. Loops work on a copy, which the compiler can
// keep in registers.
template <int lanes>
class Source {
 public:
  Source(const uint8_t* data, int64_t size) : data_(data), end_(data + size), at_(data), size_(size) {}

  // The states that a tile begins with; false where it is too short, or one is too small.
  bool begin() {
    if (end_ - at_ < 4 * lanes) return false;
    std::memcpy(states_, at_, 4 * lanes);
    at_ += 4 * lanes;
    for (int i = 0; i < lanes; ++i)
      if (states_[i] < kFloor) return false;
    return true;
  }

  // The symbol that the first state is at.
  uint32_t first(const uint8_t* slots) const { return slots[states_[0] & (kTotal - 1)]; }

  // The symbol that a state is at, of which it moves on; false where a word is missing.
  bool symbol(int lane, const uint8_t* slots, const uint32_t* codes, uint32_t& symbol) {
    uint32_t& state = states_[lane];
    const uint32_t slot = state & (kTotal - 1);
    symbol = slots[slot];
    state = (codes[symbol] & 0x1FFF) * (state >> kScale) + slot - (codes[symbol] >> 16);
    // Whether a word is due is as good as random: taken without a branch wherever there is one. By masks, for a
    // compiler makes a branch of a choice.
    const uint32_t due = 0u - static_cast<uint32_t>(state < kFloor);
    if (end_ - at_ < 2) return due == 0;
    uint16_t word;
    std::memcpy(&word, at_, 2);
    state = state << (due & 16) | (due & word);
    at_ += due & 2;
    return true;
  }

  // The next `count` raw bits, at most 32.
  bool raw(int count, uint32_t& bits) {
    if (used_ + count > 8 * size_) return false;
    const int64_t byte = used_ >> 3;
    uint64_t window = 0;
    if (size_ - byte >= 8) {
      std::memcpy(&window, end_ - byte - 8, 8);
      window = __builtin_bswap64(window);
    } else {
      for (int64_t i = byte; i < size_; ++i) window |= static_cast<uint64_t>(data_[size_ - 1 - i]) << (8 * (i - byte));
    }
    bits = static_cast<uint32_t>((window >> (used_ & 7)) & ((1ull << count) - 1));
    used_ += count;
    return true;
  }

  // Whether the states are back where coding began, words and raw bits are used up to the last byte, and the bits that
  // fill it are zero.
  bool finished() const {
    for (int i = 0; i < lanes; ++i)
      if (states_[i] != kFloor) return false;
    const int64_t raw_bytes = (used_ + 7) / 8;
    if (at_ - data_ + raw_bytes != size_) return false;
    return used_ % 8 == 0 || data_[size_ - raw_bytes] >> (used_ % 8) == 0;
  }

 private:
  const uint8_t *data_, *end_, *at_;
  int64_t size_, used_ = 0;
  uint32_t states_[lanes];
};

// The positions in its block of a class's elements that change, ascending; their number, or -1.
template <typename T, int lanes>
__attribute__((noinline)) int64_t decode_gaps(Source<lanes>& whole, const Class& of, const Members& members,
                                              const Places& places, const T* block, uint32_t* positions) {
  Source<lanes> source = whole;
  uint32_t rank = ~0u, word = 0;
  bool sound = false;
  const auto decode = [&](int lane, int64_t i) {  // whether there is another
    uint32_t gap, raw = 0;
    if (!source.symbol(lane, of.gap_slots, of.gap_codes, gap)) return false;
    if (gap >= kExact) {
      if (gap == kGapEnd) {
        sound = true;
        return false;
      }
      const bool escape = gap == kGapEscape;
      if (!source.raw(escape ? kGapBits : raw_bits(gap), raw)) return false;
      gap = escape ? raw : from_magnitude(gap, raw);
    }
    rank += gap + 1;
    if (rank >= members.total()) return false;
    const int64_t place = places(members.element<lanes == 1 ? 32 : 8>(rank, word));
    __builtin_prefetch(block + place);
    positions[i] = static_cast<uint32_t>(place);
    return true;
  };
  for (int64_t i = 0;; i += lanes)
#pragma GCC unroll 4
    for (int lane = 0; lane < lanes; ++lane)
      if (!decode(lane, i + lane)) {
        whole = source;
        return sound ? i + lane : -1;
      }
}

// The new values of n elements of a class at these positions.
template <typename T, int lanes>
__attribute__((noinline)) bool decode_values(Source<lanes>& whole, const Class& of, const T* block,
                                             const uint32_t* positions, int64_t n, T* values, uint64_t* marks) {
  Source<lanes> source = whole;
  const auto decode = [&](int lane, int64_t i) {
    uint32_t symbol, raw;
    if (!source.symbol(lane, of.step_slots, of.step_codes, symbol)) return false;
    T z = static_cast<T>(symbol);
    if (symbol >= 2 * kExact) {
      const bool escape = symbol == kStepEscape;
      if (!source.raw(escape ? 8 * static_cast<int>(sizeof(T)) : raw_bits(symbol >> 1), raw)) return false;
      const uint32_t size = from_magnitude(symbol >> 1, raw);
      if (!escape && size >= kSign<T>) return false;
      z = escape ? static_cast<T>(raw) : static_cast<T>(size << 1 | (symbol & 1));
    }
    const uint32_t position = positions[i];
    values[i] = stepped(block[position], z);
    marks[position >> 6] |= 1ull << (position & 63);
    return true;
  };
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)  // whole rounds, of which the compiler knows which state each symbol takes
#pragma GCC unroll 4
    for (int lane = 0; lane < lanes; ++lane)
      if (!decode(lane, i + lane)) return false;
  for (int lane = 0; i < n; ++lane, ++i)
    if (!decode(lane, i)) return false;
  whole = source;
  return true;
}

// Puts n changes at distinct positions in order. `before` has room for a count for each word of marks.
template <typename T>
void order_changes(const Changed<T>& found, int64_t n, int64_t words, uint32_t* before, uint32_t* positions,
                   T* values) {
  uint32_t count = 0;
  for (int64_t w = 0; w < words; ++w) {
    before[w] = count;
    count += static_cast<uint32_t>(__builtin_popcountll(found.marks[w]));
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t position = found.positions[i], w = position >> 6;
    const uint32_t to =
        before[w] + static_cast<uint32_t>(__builtin_popcountll(found.marks[w] & ((1ull << (position & 63)) - 1)));
    positions[to] = position;
    values[to] = found.values[i];
  }
}

template <typename T, int lanes>
int64_t decode_tile(const Model& model, const Old<T>& old, const Tile& tile, const Tile& next, const uint8_t* data,
                    int64_t size, const Scratch& scratch, const Changed<T>& out, int64_t room) {
  Source<lanes> source(data, size);
  if (!source.begin()) return -1;
  Old<T> block = old;
  Tile whole = tile;
  join_rows(block, whole);
  read_contexts(block, whole, scratch.contexts);
  Ahead<T> ahead(old, next);
  const Places places(old.row_length, tile);
  const int64_t elements = tile.rows * tile.columns;
  int64_t total = 0;
  for (uint32_t c = 0; c < model.classes; ++c) {
    const Class& of = model.of[c];
    if (source.first(of.gap_slots) == kGapEnd) {
      uint32_t end;
      if (!source.symbol(0, of.gap_slots, of.gap_codes, end)) return -1;
      continue;
    }
    const Members members(of, scratch.contexts, elements, scratch, ahead);
    const int64_t n = decode_gaps(source, of, members, places, old.bits, scratch.elements);
    if (n < 0 || n > room - total) return -1;
    std::memcpy(out.positions + total, scratch.elements, static_cast<size_t>(n) * sizeof *out.positions);
    if (!decode_values(source, of, old.bits, scratch.elements, n, out.values + total, out.marks)) return -1;
    total += n;
  }
  return source.finished() ? total : -1;
}

}  // namespace
