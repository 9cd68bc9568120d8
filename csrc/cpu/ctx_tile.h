// Encoding and decoding one tile of the `ctx` codec. Included once for each instruction set, inside a namespace of its own.
// Decoding trusts nothing but the lengths it is given. Does not allocate.

namespace {

using namespace vds::ctx;

// The contexts low ... high.
class Range {
 public:
  Range(uint32_t low, uint32_t high)
      : low_(static_cast<uint8_t>(low)), width_(static_cast<uint8_t>(high - low)) {}

  // Which of 64 contexts lie in it.
  uint64_t members(const uint8_t* contexts) const {
#if defined(__AVX2__)
    const Others others(*this);
    const uint64_t first = static_cast<uint32_t>(_mm256_movemask_epi8(others(contexts)));
    const uint64_t second = static_cast<uint32_t>(_mm256_movemask_epi8(others(contexts + 32)));
    return ~(first | second << 32);
#elif defined(__SSE2__)
    const __m128i low = _mm_set1_epi8(static_cast<char>(low_ + 128)), most = _mm_set1_epi8(static_cast<char>(width_ - 128));
    uint64_t others = 0;
    for (int i = 0; i < 4; ++i) {
      const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(contexts) + i);
      const int outside = _mm_movemask_epi8(_mm_cmpgt_epi8(_mm_sub_epi8(x, low), most));
      others |= static_cast<uint64_t>(static_cast<uint32_t>(outside)) << (16 * i);
    }
    return ~others;
#else
    uint64_t mask = 0;
    for (int i = 0; i < 64; ++i) mask |= static_cast<uint64_t>(static_cast<uint8_t>(contexts[i] - low_) <= width_) << i;
    return mask;
#endif
  }

  // How many of 64 n contexts, n at most 255, do.
  uint32_t count(const uint8_t* contexts, int64_t n) const {
#if defined(__AVX2__)
    const Others others(*this);
    __m256i first = _mm256_setzero_si256(), second = first;  // both count down from zero
    for (int64_t i = 0; i < n; ++i, contexts += 64) {
      first = _mm256_sub_epi8(first, others(contexts));
      second = _mm256_sub_epi8(second, others(contexts + 32));
    }
    const __m256i zero = _mm256_setzero_si256();
    const __m256i sums = _mm256_add_epi64(_mm256_sad_epu8(first, zero), _mm256_sad_epu8(second, zero));
    const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return static_cast<uint32_t>(64 * n - _mm_cvtsi128_si64(half) - _mm_extract_epi64(half, 1));
#else
    uint32_t found = 0;
    for (int64_t i = 0; i < n; ++i) found += static_cast<uint32_t>(__builtin_popcountll(members(contexts + 64 * i)));
    return found;
#endif
  }

 private:
#if defined(__AVX2__)
  // All ones where one of 32 contexts is not in the range: counted from `low`, as a signed number, it is above `most`.
  struct Others {
    explicit Others(const Range& range)
        : low(_mm256_set1_epi8(static_cast<char>(range.low_ + 128))), most(_mm256_set1_epi8(static_cast<char>(range.width_ - 128))) {}
    __m256i operator()(const uint8_t* contexts) const {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(contexts));
      return _mm256_cmpgt_epi8(_mm256_sub_epi8(x, low), most);
    }
    __m256i low, most;
  };
#endif
  uint8_t low_, width_;
};

// The index of the bit of `mask` that has `before` set bits below it; there is one.
inline int select_bit(uint64_t mask, int before) {
#if defined(__BMI2__)
  return static_cast<int>(_tzcnt_u64(_pdep_u64(1ull << before, mask)));
#else
  for (; before > 0; --before) mask &= mask - 1;
  return __builtin_ctzll(mask);
#endif
}

// `contexts` are bytes, which may alias anything: without the promise that they do not, nothing here becomes a vector.
template <typename T>
void read_row(const T* __restrict from, int64_t n, uint8_t* __restrict contexts) {
  for (int64_t i = 0; i < n; ++i) contexts[i] = context(from[i]);
}

// The contexts of a tile in row-major order, and zeros up to a multiple of 64.
template <typename T>
void read_contexts(const Old<T>& old, const Tile& tile, uint8_t* contexts) {
  const T* from = old.bits + tile.row * old.row_length + tile.column;
  const int64_t rows = tile.columns == old.row_length ? 1 : tile.rows, columns = tile.rows * tile.columns / rows;
  for (int64_t row = 0; row < rows; ++row, from += old.row_length, contexts += columns) read_row(from, columns, contexts);
  std::memset(contexts, 0, 64);
}

// Where in its block an element of a tile is.
class Places {
 public:
  Places(int64_t row_length, const Tile& tile)
      : first_(tile.row * row_length + tile.column),
        columns_(static_cast<uint32_t>(tile.columns)),
        skip_(row_length - tile.columns),
        inverse_(((1ull << 40) + columns_ - 1) / columns_) {}
  int64_t operator()(uint32_t element) const { return first_ + element + row(element) * skip_; }

 private:
  // Exact: element and columns are at most 2^18.
  int64_t row(uint32_t element) const { return static_cast<int64_t>((element * inverse_) >> 40); }
  int64_t first_;
  uint32_t columns_;
  int64_t skip_;
  uint64_t inverse_;
};

// A tile's bytes: states and words from the front, raw bits from the back.
class Source {
 public:
  Source(const uint8_t* data, int64_t size) : data_(data), end_(data + size), at_(data), size_(size) {}

  bool states(uint32_t* states, int lanes) {
    if (end_ - at_ < 4 * lanes) return false;
    std::memcpy(states, at_, static_cast<size_t>(4 * lanes));
    at_ += 4 * lanes;
    for (int i = 0; i < lanes; ++i)
      if (states[i] < kFloor) return false;
    return true;
  }

  // The symbol of a state; false where a word is missing.
  bool symbol(uint32_t& state, const uint8_t* slots, const uint32_t* codes, uint32_t& symbol) {
    const uint32_t slot = state & (kTotal - 1);
    symbol = slots[slot];
    state = (codes[symbol] & 0x1FFF) * (state >> kScale) + slot - (codes[symbol] >> 16);
    // Whether a word is due is as good as random: taken without a branch wherever there is one.
    const bool due = state < kFloor;
    if (end_ - at_ < 2) return !due;
    uint16_t word;
    std::memcpy(&word, at_, 2);
    state = due ? state << 16 | word : state;
    at_ += due ? 2 : 0;
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

  // Whether words and raw bits are used up to the last byte, and the bits that fill it are zero.
  bool finished() {
    const int64_t raw_bytes = (used_ + 7) / 8;
    if (at_ - data_ + raw_bytes != size_) return false;
    return used_ % 8 == 0 || data_[size_ - raw_bytes] >> (used_ % 8) == 0;
  }

 private:
  const uint8_t *data_, *end_, *at_;
  int64_t size_, used_ = 0;
};

// Finds the members of a class in order.
class Walk {
 public:
  Walk(const uint8_t* contexts, int64_t elements, const Class& of)
      : contexts_(contexts), last_((elements - 1) >> 6), range_(of.low, of.high), mask_(range_.members(contexts)) {}

  // The element behind `gap` further members, or false when there is none within whole words.
  bool skip(uint32_t gap, uint32_t& element) {
    uint32_t here = static_cast<uint32_t>(__builtin_popcountll(mask_));
    if (gap >= here) {
      gap -= here;
      int64_t word = word_ + 1;
      for (; gap >= 256 && word + 4 <= last_; word += 4) {
        const uint32_t four = range_.count(contexts_ + 64 * word, 4);
        if (gap < four) break;
        gap -= four;
      }
      for (;; ++word) {
        if (word > last_) return false;
        mask_ = range_.members(contexts_ + 64 * word);
        here = static_cast<uint32_t>(__builtin_popcountll(mask_));
        if (gap < here) break;
        gap -= here;
      }
      word_ = word;
    }
    const int bit = select_bit(mask_, static_cast<int>(gap));
    mask_ &= ~1ull << bit;
    element = static_cast<uint32_t>(64 * word_ + bit);
    return true;
  }

  // How many members lie before `element`, which does not lie before an earlier one asked for.
  uint32_t before(uint32_t element) {
    const int64_t word = element >> 6;
    if (word_ < word) {
      count_ += static_cast<uint32_t>(__builtin_popcountll(mask_));
      for (++word_; word_ < word;) {
        const int64_t n = word - word_ < 255 ? word - word_ : 255;
        count_ += range_.count(contexts_ + 64 * word_, n);
        word_ += n;
      }
      mask_ = range_.members(contexts_ + 64 * word_);
    }
    return count_ + static_cast<uint32_t>(__builtin_popcountll(mask_ & ((1ull << (element & 63)) - 1)));
  }

 private:
  const uint8_t* contexts_;
  int64_t last_, word_ = 0;
  Range range_;
  uint32_t count_ = 0;
  uint64_t mask_;
};

// The elements of one class, ascending; their number, or -1.
template <int lanes>
int64_t decode_gaps(Source& source, uint32_t* states, const Class& of, const uint8_t* contexts, int64_t elements, uint32_t* found) {
  Walk walk(contexts, elements, of);
  for (int64_t i = 0;; ++i) {
    uint32_t gap, raw = 0;
    if (!source.symbol(states[i & (lanes - 1)], of.gap_slots, of.gap_codes, gap)) return -1;
    if (gap == kGapEnd) return i;
    if (gap >= kExact) {
      const bool escape = gap == kGapEscape;
      if (!source.raw(escape ? kGapBits : raw_bits(gap), raw)) return -1;
      gap = escape ? raw : from_magnitude(gap, raw);
    }
    if (i == elements || !walk.skip(gap, found[i]) || found[i] >= elements) return -1;
  }
}

template <typename T, int lanes>
bool decode_steps(Source& source, uint32_t* states, const Class& of, const Places& places, const T* block, const uint32_t* found,
                  int64_t n, const Changed<T>& out) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t symbol, raw;
    if (!source.symbol(states[i & (lanes - 1)], of.step_slots, of.step_codes, symbol)) return false;
    T z = static_cast<T>(symbol);
    if (symbol >= 2 * kExact) {
      const bool escape = symbol == kStepEscape;
      if (!source.raw(escape ? 8 * static_cast<int>(sizeof(T)) : raw_bits(symbol >> 1), raw)) return false;
      const uint32_t size = from_magnitude(symbol >> 1, raw);
      if (!escape && size >= kSign<T>) return false;
      z = escape ? static_cast<T>(raw) : static_cast<T>(size << 1 | (symbol & 1));
    }
    const int64_t place = places(found[i]);
    out.positions[i] = static_cast<uint32_t>(place);
    out.steps[i] = oriented(unfold_step(z), block[place]);
  }
  return true;
}

template <typename T, int lanes>
int64_t decode_tile(const Model& model, const Old<T>& old, const Tile& tile, const uint8_t* data, int64_t size,
                    const Scratch& scratch, const Changed<T>& out, int64_t room) {
  Source source(data, size);
  uint32_t states[lanes];
  if (!source.states(states, lanes)) return -1;
  read_contexts(old, tile, scratch.contexts);
  const Places places(old.row_length, tile);
  const int64_t elements = tile.rows * tile.columns;
  int64_t total = 0;
  for (uint32_t c = 0; c < model.classes; ++c) {
    const Class& of = model.of[c];
    const int64_t n = decode_gaps<lanes>(source, states, of, scratch.contexts, elements, scratch.elements);
    if (n < 0 || n > room - total) return -1;
    const Changed<T> own{out.positions + total, out.steps + total};
    if (!decode_steps<T, lanes>(source, states, of, places, old.bits, scratch.elements, n, own)) return -1;
    total += n;
  }
  for (int i = 0; i < lanes; ++i)
    if (states[i] != kFloor) return -1;
  return source.finished() ? total : -1;
}

// What a tile will be coded as: symbols in the order of decoding, and raw bits.
class Symbols {
 public:
  Symbols(uint32_t* codes, uint8_t* raw) : codes_(codes), raw_(raw) {}

  // A code is frequency | first slot << 16; the lane goes between them.
  void add(uint32_t code, int64_t lane) { codes_[count_++] = code | static_cast<uint32_t>(lane) << 13; }
  // At most 32 bits. `raw_` has room for 8 bytes more than are used.
  void add_raw(uint32_t bits, int count) {
    window_ |= static_cast<uint64_t>(bits) << filled_;
    filled_ += count;
    std::memcpy(raw_ + raw_bytes_, &window_, 8);
    const int whole = filled_ & ~7;
    raw_bytes_ += whole >> 3;
    window_ >>= whole;
    filled_ -= whole;
  }

  // Writes the tile and returns its size, or -1 if it takes more than `room`. `words` has room for one word a symbol.
  int64_t write(int lanes, uint16_t* words, uint8_t* out, int64_t room) {
    if (filled_ > 0) raw_[raw_bytes_++] = static_cast<uint8_t>(window_);
    uint32_t states[kMaxLanes] = {kFloor, kFloor, kFloor, kFloor};
    int64_t emitted = 0;
    for (int64_t i = count_; i-- > 0;) {
      const uint32_t frequency = codes_[i] & 0x1FFF, start = codes_[i] >> 16;
      uint32_t state = states[codes_[i] >> 13 & 7];
      const bool due = static_cast<uint64_t>(state) >= static_cast<uint64_t>(frequency) << (32 - kScale);
      words[emitted] = static_cast<uint16_t>(state);
      emitted += due;
      state = due ? state >> 16 : state;
      const uint32_t quotient = state / frequency;
      states[codes_[i] >> 13 & 7] = (quotient << kScale) + (state - quotient * frequency) + start;
    }
    if (4 * lanes + 2 * emitted + raw_bytes_ > room) return -1;
    uint8_t* at = out;
    std::memcpy(at, states, static_cast<size_t>(4 * lanes));
    at += 4 * lanes;
    for (int64_t i = emitted; i-- > 0; at += 2) std::memcpy(at, words + i, 2);
    for (int64_t i = raw_bytes_; i-- > 0;) *at++ = raw_[i];
    return at - out;
  }

 private:
  uint32_t* codes_;
  uint8_t* raw_;
  int64_t count_ = 0, raw_bytes_ = 0;
  uint64_t window_ = 0;
  int filled_ = 0;
};

// Turns gaps and steps into symbols of a model, escaping those that it gives no frequency.
class Coder {
 public:
  Coder(const Model& model, int lanes, Symbols& symbols) : model_(model), last_lane_(lanes - 1), symbols_(symbols) {}
  void gap(uint32_t c, uint32_t gap, int64_t i) {
    const Magnitude m = magnitude(gap);
    put(model_.of[c].gap_codes, m.symbol, m.bits, m.raw, kGapEscape, kGapBits, gap, i);
  }
  void end(uint32_t c, int64_t i) { symbols_.add(model_.of[c].gap_codes[kGapEnd], i & last_lane_); }
  template <typename T>
  void step(uint32_t c, T z, int64_t i) {
    const Magnitude m = magnitude(z >> 1);
    put(model_.of[c].step_codes, m.symbol << 1 | (z & 1), m.bits, m.raw, kStepEscape, 8 * static_cast<int>(sizeof(T)), z, i);
  }

 private:
  void put(const uint32_t* codes, uint32_t symbol, int bits, uint32_t raw, uint32_t escape, int escape_bits, uint32_t whole, int64_t i) {
    const bool known = codes[symbol] != 0;
    symbols_.add(codes[known ? symbol : escape], i & last_lane_);
    symbols_.add_raw(known ? raw : whole, known ? bits : escape_bits);
  }
  const Model& model_;
  int last_lane_;  // of 1 or kMaxLanes
  Symbols& symbols_;
};

// Counts symbols instead: what a model is made from.
class Tally {
 public:
  Tally(uint64_t* gaps, uint64_t* steps) : gaps_(gaps), steps_(steps) {}
  void gap(uint32_t c, uint32_t gap, int64_t) { ++gaps_[c * kGapSymbols + magnitude(gap).symbol]; }
  void end(uint32_t c, int64_t) { ++gaps_[c * kGapSymbols + kGapEnd]; }
  template <typename T>
  void step(uint32_t c, T z, int64_t) {
    ++steps_[c * kStepSymbols + (magnitude(z >> 1).symbol << 1 | (z & 1))];
  }

 private:
  uint64_t *gaps_, *steps_;
};

// Hands the changes of a tile to a coder, class by class: all gaps, the end, all steps.
template <typename T, typename C>
void code_changes(const Model& model, const uint8_t* contexts, const Tile& tile, const TileChanges<T>& changes, uint32_t* order,
                  C& coder) {
  int64_t ends[kMaxClasses + 1] = {}, next[kMaxClasses];
  for (int64_t i = 0; i < changes.n; ++i) ++ends[model.class_of[context(changes.before[i])] + 1];
  for (int c = 0; c < kMaxClasses; ++c) {
    next[c] = ends[c];
    ends[c + 1] += ends[c];
  }
  for (int64_t i = 0; i < changes.n; ++i) order[next[model.class_of[context(changes.before[i])]]++] = static_cast<uint32_t>(i);
  for (uint32_t c = 0; c < model.classes; ++c) {
    const uint32_t* const own = order + ends[c];
    const int64_t count = ends[c + 1] - ends[c];
    if (count > 0) {
      Walk walk(contexts, tile.rows * tile.columns, model.of[c]);
      uint32_t previous = ~0u;
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t rank = walk.before(changes.elements[own[i]]);
        coder.gap(c, rank - previous - 1, i);
        previous = rank;
      }
    }
    coder.end(c, count);
    for (int64_t i = 0; i < count; ++i) {
      const T before = changes.before[own[i]], after = changes.after[own[i]];
      coder.step(c, fold_step(oriented(static_cast<T>(rank_of(after) - rank_of(before)), before)), i);
    }
  }
}

template <typename T>
int64_t encode_tile(const Model& model, const Old<T>& old, const Tile& tile, const TileChanges<T>& changes, int lanes,
                    const Scratch& scratch, uint8_t* out, int64_t room) {
  read_contexts(old, tile, scratch.contexts);
  Symbols symbols(scratch.codes, scratch.raw);
  Coder coder(model, lanes, symbols);
  code_changes(model, scratch.contexts, tile, changes, scratch.elements, coder);
  return symbols.write(lanes, scratch.words, out, room);
}

template <typename T>
void tally_tile(const Model& model, const Old<T>& old, const Tile& tile, const TileChanges<T>& changes, const Scratch& scratch,
                uint64_t* gaps, uint64_t* steps) {
  read_contexts(old, tile, scratch.contexts);
  Tally tally(gaps, steps);
  code_changes(model, scratch.contexts, tile, changes, scratch.elements, tally);
}

template <typename T>
constexpr TileKernels<T> kernels_of() {
  return {{decode_tile<T, 1>, decode_tile<T, kMaxLanes>}, encode_tile<T>, tally_tile<T>};
}

}  // namespace
