// Encodes the tiles of the `ctx` codec, or counts their symbols. Included once for each instruction set, inside a
// namespace of its own. Does not allocate.

namespace {

using namespace vds::ctx;

// ⌈2^64 / q⌉, with which ⌊x / q⌋ is the upper half of a product: it exceeds 2^64 / q by less than 1, and x, below 2^32,
// times that is less than 2^64 / q. A division would take half of the time of a symbol.
struct Reciprocals {
  constexpr Reciprocals() : of() {
    for (uint64_t q = 2; q <= kTotal; ++q) of[q] = ~0ull / q + 1;
  }
  uint32_t quotient(uint32_t x, uint32_t q) const {
    return q == 1 ? x : static_cast<uint32_t>(static_cast<unsigned __int128>(x) * of[q] >> 64);
  }
  uint64_t of[kTotal + 1];
};
constexpr Reciprocals kReciprocals;

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

  // Writes the tile and returns its size, or -1 if it takes more than `room` or the model cannot say it. `words` has
  // room for one word a symbol.
  int64_t write(int lanes, uint16_t* words, uint8_t* out, int64_t room) {
    if (filled_ > 0) raw_[raw_bytes_++] = static_cast<uint8_t>(window_);
    uint32_t states[kMaxLanes] = {kFloor, kFloor, kFloor, kFloor};
    int64_t emitted = 0;
    for (int64_t i = count_; i-- > 0;) {
      const uint32_t frequency = codes_[i] & 0x1FFF, start = codes_[i] >> 16;
      if (frequency == 0) return -1;  // the model has neither the symbol nor an escape
      uint32_t state = states[codes_[i] >> 13 & 7];
      const bool due = static_cast<uint64_t>(state) >= static_cast<uint64_t>(frequency) << (32 - kScale);
      words[emitted] = static_cast<uint16_t>(state);
      emitted += due;
      state = due ? state >> 16 : state;
      const uint32_t quotient = kReciprocals.quotient(state, frequency);
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
    put(model_.of[c].step_codes, m.symbol << 1 | (z & 1), m.bits, m.raw, kStepEscape, 8 * static_cast<int>(sizeof(T)),
        z, i);
  }

 private:
  void put(const uint32_t* codes, uint32_t symbol, int bits, uint32_t raw, uint32_t escape, int escape_bits,
           uint32_t whole, int64_t i) {
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

// Turns the elements of a tile's changes into gaps: how many members of their class lie between them. Piece by piece,
// so that what is looked at for each class is in the nearest cache.
template <typename T>
void find_gaps(const Model& model, const Old<T>& old, const Tile& tile, const Tile& next, const TileChanges<T>& changes,
               const Scratch& scratch) {
  struct {
    uint32_t at, members, previous;  // the change that is next, the members so far, the rank of the change before
  } progress[kMaxClasses];
  for (uint32_t c = 0; c < model.classes; ++c) progress[c] = {changes.begin_of(c), 0, ~0u};
  uint32_t first = 0;  // element of the piece
  each_piece(old, tile, Ahead<T>(old, next), [&](const Old<T>& block, const Tile& piece, Ahead<T> ahead) {
    const uint32_t size = static_cast<uint32_t>(piece.rows * piece.columns);
    read_contexts(block, piece, scratch.contexts);
    for (uint32_t c = 0; c < model.classes; ++c) {
      auto [at, before, previous] = progress[c];
      const uint32_t end = changes.ends[c];
      if (at == end) continue;
      const Members members(model.of[c], scratch.contexts, size, scratch, ahead);
      for (; at < end && changes.elements[at] - first < size; ++at) {
        const uint32_t rank = before + members.rank(changes.elements[at] - first);
        changes.elements[at] = rank - previous - 1;
        previous = rank;
      }
      progress[c] = {at, before + members.total(), previous};
    }
    first += size;
  });
}

// Hands the changes of a tile to a coder, class by class: all gaps, the end, all steps.
template <typename T, typename C>
void code_changes(const Model& model, const Old<T>& old, const Tile& tile, const Tile& next,
                  const TileChanges<T>& changes, const Scratch& scratch, C& coder) {
  find_gaps(model, old, tile, next, changes, scratch);
  for (uint32_t c = 0; c < model.classes; ++c) {
    const uint32_t begin = changes.begin_of(c), end = changes.ends[c];
    for (uint32_t i = begin; i < end; ++i) coder.gap(c, changes.elements[i], i - begin);
    coder.end(c, end - begin);
    for (uint32_t i = begin; i < end; ++i) coder.step(c, changes.steps[i], i - begin);
  }
}

template <typename T>
int64_t encode_tile(const Model& model, const Old<T>& old, const Tile& tile, const Tile& next,
                    const TileChanges<T>& changes, int lanes, const Scratch& scratch, uint8_t* out, int64_t room) {
  Symbols symbols(scratch.codes, scratch.raw);
  Coder coder(model, lanes, symbols);
  code_changes(model, old, tile, next, changes, scratch, coder);
  return symbols.write(lanes, scratch.words, out, room);
}

template <typename T>
void tally_tile(const Model& model, const Old<T>& old, const Tile& tile, const Tile& next,
                const TileChanges<T>& changes, const Scratch& scratch, uint64_t* gaps, uint64_t* steps) {
  Tally tally(gaps, steps);
  code_changes(model, old, tile, next, changes, scratch, tally);
}

}  // namespace
