// Which elements of a tile are members of a class, as a bit mask with counts. Included once for each instruction set,
// inside a namespace of its own. Does not allocate.

namespace {

using namespace vds::ctx;

// The index of the bit of `mask` that has `before` set bits below it; there is one.
inline int select_bit(uint64_t mask, uint32_t before) {
#if defined(__BMI2__)
  return static_cast<int>(_tzcnt_u64(_pdep_u64(1ull << before, mask)));
#else
  for (; before > 0; --before) mask &= mask - 1;
  return __builtin_ctzll(mask);
#endif
}

// Which of 64 contexts are low ... high, as a bit mask.
class Range {
 public:
  Range(uint32_t low, uint32_t high) {
#if defined(__AVX2__)
    // Counted from `low`, as a signed number, a context outside the range is above `most`.
    shift_ = _mm256_set1_epi8(static_cast<char>(128 - low));
    most_ = _mm256_set1_epi8(static_cast<char>(high - low - 128));
#else
    low_ = static_cast<uint8_t>(low);
    width_ = static_cast<uint8_t>(high - low);
#endif
  }

  uint64_t operator()(const uint8_t* contexts) const {
#if defined(__AVX2__)
    const __m256i* const from = reinterpret_cast<const __m256i*>(contexts);
    const auto others = [&](int i) {
      const __m256i counted = _mm256_add_epi8(shift_, _mm256_loadu_si256(from + i));
      return static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpgt_epi8(counted, most_))));
    };
    return ~(others(0) | others(1) << 32);
#else
    uint64_t mask = 0;
    for (int i = 0; i < 64; ++i) mask |= static_cast<uint64_t>(static_cast<uint8_t>(contexts[i] - low_) <= width_) << i;
    return mask;
#endif
  }

 private:
#if defined(__AVX2__)
  __m256i shift_, most_;
#else
  uint8_t low_, width_;
#endif
};

// The old values of the tile or piece that is next, asked for line by line while one is worked on: reading them is what
// memory has to do, and sorting elements into classes what the processor has to. The nearest cache is left to what is
// in hand.
template <typename T>
class Ahead {
 public:
  Ahead(const Old<T>& old, const Tile& tile)
      : at_(reinterpret_cast<const char*>(old.bits + tile.row * old.row_length + tile.column)),
        row_(static_cast<int64_t>(sizeof(T)) *
             (tile.columns == old.row_length ? tile.rows * tile.columns : tile.columns)),
        skip_(static_cast<int64_t>(sizeof(T)) * (old.row_length - tile.columns)), left_(row_) {}
  void line() {
    __builtin_prefetch(at_, 0, 2);
    at_ += 64;
    left_ -= 64;
    if (left_ <= 0) {  // what was asked for beyond the row is not much
      at_ += left_ + skip_;
      left_ = row_;
    }
  }

 private:
  const char* at_;
  int64_t row_, skip_, left_;
};

// The members of one class. Bit e mod 64 of word ⌊e / 64⌋ is element e.
class Members {
 public:
  // `contexts` of a tile's elements, with anything behind them up to a multiple of 64.
  template <typename T>
  Members(const Class& of, const uint8_t* contexts, int64_t elements, const Scratch& scratch, Ahead<T>& ahead)
      : masks_(scratch.masks), before_(scratch.before) {
    const Range range(of.low, of.high);
    const int64_t words = (elements + 63) / 64;
    uint32_t total = 0;
    const auto add = [&](int64_t word, uint64_t valid) {
      const uint64_t mask = range(contexts + 64 * word) & valid;
      scratch.masks[word] = mask;
      scratch.before[word] = total;
      total += static_cast<uint32_t>(__builtin_popcountll(mask));
    };
    int64_t word = 0;
    for (; word + 4 < words; word += 4) {  // a line of memory takes as long as four words do
      ahead.line();
      for (int64_t i = 0; i < 4; ++i) add(word + i, ~0ull);
    }
    for (; word + 1 < words; ++word) add(word, ~0ull);
    add(word, ~0ull >> (64 * words - elements));
    std::fill_n(scratch.before + words, kAhead + 1, total);
    total_ = total;
  }

  uint32_t total() const { return total_; }

  // How many lie before `element`.
  uint32_t rank(uint32_t element) const {
    const uint32_t word = element >> 6;
    return before_[word] + static_cast<uint32_t>(__builtin_popcountll(masks_[word] & ((1ull << (element & 63)) - 1)));
  }

  // The element of this rank, which is below `total`; its word is not before `word`, which becomes it. It looks at so
  // many words at once.
  template <int ahead>
  uint32_t element(uint32_t rank, uint32_t& word) const {
    static_assert(ahead == 8 || ahead == kAhead, "each has its own instructions");
#if defined(__AVX2__)
    // Counts ascend, so how many of the next ones are not above the rank says where it is, whatever their order in the
    // vectors.
    const __m256i wanted = _mm256_set1_epi32(static_cast<int>(rank));
    for (uint32_t above = 0; above == 0;) {
      const __m256i* const next = reinterpret_cast<const __m256i*>(before_ + word + 1);
      const auto greater = [&](int i) { return _mm256_cmpgt_epi32(_mm256_loadu_si256(next + i), wanted); };
      if (ahead == 8) {
        above = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(greater(0))));
      } else {
        const __m256i first = _mm256_packs_epi32(greater(0), greater(1));
        const __m256i second = _mm256_packs_epi32(greater(2), greater(3));
        above = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_packs_epi16(first, second)));
      }
      word += static_cast<uint32_t>(ahead - __builtin_popcount(above));
    }
#else
    while (before_[word + 1] <= rank) ++word;
#endif
    return 64 * word + static_cast<uint32_t>(select_bit(masks_[word], rank - before_[word]));
  }

 private:
  static constexpr int kAhead = 32;  // words looked at at once
  static_assert(kAhead < kMembersSlack, "counts are read behind the last word");
  const uint64_t* masks_;
  const uint32_t* before_;  // how many lie in earlier words
  uint32_t total_;
};

// `to` are bytes, which may alias anything: without the promise that they do not, nothing here becomes a vector.
template <int n, typename T>
void contexts_of(const T* __restrict from, uint8_t* __restrict to) {
  for (int i = 0; i < n; ++i) to[i] = context(from[i]);
}

// A tile whose rows lie one behind the other is one row of a block that begins with it.
template <typename T>
void join_rows(Old<T>& old, Tile& tile) {
  if (tile.columns != old.row_length) return;
  old = {old.bits + tile.row * old.row_length, tile.rows * tile.columns};
  tile = {0, 1, 0, old.row_length};
}

// The contexts of the elements of a tile, or of a piece of one, in row-major order, and something behind them up to a
// multiple of 64. By steps: what is read behind a row, but inside the rows, is overwritten by the next one.
template <typename T>
void read_contexts(const Old<T>& old, const Tile& tile, uint8_t* contexts) {
  constexpr int64_t step = 32, line = 64 / static_cast<int64_t>(sizeof(T));
  const int64_t columns = tile.columns, ahead = tile.rows == 1 ? 4096 / sizeof(T) : 8 * old.row_length;
  const T* from = old.bits + tile.row * old.row_length + tile.column;
  const T* const end = old.bits + (tile.row + tile.rows) * old.row_length;
  const auto read = [&](auto steps, int64_t i) {
    constexpr int n = decltype(steps)::value * step;
    for (int64_t k = 0; k < n; k += line) __builtin_prefetch(from + ahead + i + k);
    contexts_of<n>(from + i, contexts + i);
    return n;
  };
  for (int64_t row = 0; row < tile.rows; ++row, from += old.row_length, contexts += columns) {
    int64_t i = 0;
    while (i + 4 * step <= columns) i += read(std::integral_constant<int, 4>(), i);
    while (i < columns && i + step <= end - from) i += read(std::integral_constant<int, 1>(), i);
    for (; i < columns; ++i) contexts[i] = context(from[i]);
  }
}

constexpr int64_t kPieceElements = 1 << 13;  // their contexts and masks stay in the nearest cache

// Calls visit(block, piece, what comes behind it) for parts of a tile in row-major order, kPieceElements of it at most.
template <typename T, typename Visit>
void each_piece(Old<T> old, Tile tile, const Ahead<T>& behind, Visit visit) {
  join_rows(old, tile);
  const int64_t height = std::max<int64_t>(1, kPieceElements / tile.columns);
  const int64_t last_row = tile.row + tile.rows, last_column = tile.column + tile.columns;
  const auto piece_at = [&](int64_t row, int64_t column) {
    return Tile{row, std::min(height, last_row - row), column, std::min(kPieceElements, last_column - column)};
  };
  for (Tile piece = piece_at(tile.row, tile.column); piece.rows > 0;) {
    const int64_t column = piece.column + piece.columns;
    const Tile next =
        column < last_column ? piece_at(piece.row, column) : piece_at(piece.row + piece.rows, tile.column);
    visit(old, piece, next.rows > 0 ? Ahead<T>(old, next) : behind);
    piece = next;
  }
}

}  // namespace
