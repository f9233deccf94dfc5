// Multiply a few rows with packed weights of 2 to 5 bits on a CPU: y = x W' + bias + (x A') B', in
// float32, rounded once. Where the processor multiplies bfloat16, several rows of x in it meet weights
// rounded to it, as in an eager product: by a matrix unit (amx.h) or by products of pairs (pairs.h).
//
// A block's 16 values, scaled, are a table in registers: each code is one look-up, and nothing is
// written as a weight. x is widened to float32 once and put in the order of the look-ups, those of
// the high nibbles of kLanes bytes, then those of the low ones. Bit planes, and nibbles in blocks too
// small for that, are unpacked to a byte each a few rows at a time (codes.h). A row of weights is summed
// in the same order however many rows are computed together, so results do not depend on other rows.

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "amx.h"
#include "codes.h"
#include "pairs.h"
#include "panel.h"
#include "rounding.h"

namespace {

constexpr int kChunk = 2 * kLanes;
constexpr int kTogether = kLanes == 16 ? 8 : 4;  // rows of x that share a look-up
constexpr int64_t kBlock = 48;                   // rows of weights between two stores of results
constexpr int kMost = 4;                         // rows of weights that share what is read of x
constexpr int64_t kAhead = 512;                  // bytes by which codes are fetched ahead
constexpr int64_t kTilesFrom = 5;                // rows of x from which the matrix unit is used
constexpr int64_t kPairsFrom = 3;                // likewise, for products of pairs
constexpr int64_t kGrain = 1 << 16;              // elements of weights that are worth a thread
constexpr int64_t kSmall = 64;                   // elements in a block from which it has a table
constexpr int64_t kUnpacked = 12;                // rows of weights that are unpacked at a time

// How elements of a row of x lie in a chunk: those of high nibbles and those of low ones apart, the
// ones of even columns first in kHighFirst, or as in the row.
enum Order { kHighFirst, kLowFirst, kNatural };

// How x and the values of codes are multiplied: as float32 of every processor.
struct Widened {
  using Panel = ::Panel;
  using Number = float;
  using Values = Table;
  static constexpr int kLanes = ::kLanes;

  static Values values(Table table) { return table; }
  static Bytes load(const uint8_t* codes) { return load_bytes(codes); }
  static Lanes look_up_high(const Values& values, Bytes codes) { return high(values, codes); }
  static Lanes look_up_low(const Values& values, Bytes codes) { return low(values, codes); }
  static Lanes add(Lanes sum, Lanes weights, const float* x) {
    return fma(weights, ::load(x), sum);
  }
};

// Puts a row in the order of the look-ups, with zeros behind, at `stride` floats from chunk to chunk.
template <int kDtype>
void arrange(const void* row, int64_t columns, Order order, int64_t stride, float* out) {
  const int first = order == kHighFirst ? 0 : kLanes, second = kLanes - first;
  for (int64_t c = 0; c < columns; c += kChunk, out += stride) {
    const auto read = [&](int64_t i) { return c + i < columns ? widen(row, c + i, kDtype) : 0.0f; };
    if (order == kNatural) {
      for (int i = 0; i < kChunk; ++i) out[i] = read(i);
    } else if (c + kChunk <= columns) {
      for (int i = 0; i < kLanes; ++i) {
        out[first + i] = widen(row, c + 2 * i, kDtype);
        out[second + i] = widen(row, c + 2 * i + 1, kDtype);
      }
    } else {
      for (int i = 0; i < kChunk; ++i) out[(i % 2 ? second : first) + i / 2] = read(i);
    }
  }
}

void arrange(const void* row, int64_t columns, Order order, int64_t stride, int dtype, float* out) {
  if (dtype == kFloat32) arrange<kFloat32>(row, columns, order, stride, out);
  else if (dtype == kBFloat16) arrange<kBFloat16>(row, columns, order, stride, out);
  else arrange<kFloat16>(row, columns, order, stride, out);
}

inline const void* at_row(const void* p, int64_t elements, int dtype) {
  return static_cast<const char*>(p) + elements * (dtype == kFloat32 ? 4 : 2);
}

// Finds what elements of a weight of so many columns have.
struct Decoder {
  const QfuseFormat& format;
  const QfuseWeight& weight;
  int64_t columns;

  // The scale of the first block of a row; the g-th lies in `far` of each four blocks, if rows are tiled.
  int64_t first_block(int64_t row) const {
    if (!format.by_row) return row * columns >> format.block_shift;
    const int64_t blocks = (columns - 1 >> format.block_shift) + 1;
    if (!format.tiled) return row * blocks;
    return (row >> 7) * ((blocks + 3) / 4 * 512) + (row & 31) * 16 + (row >> 5 & 3) * 4;
  }

  int64_t block(int64_t row, int64_t column) const {
    if (!format.by_row) return row * columns + column >> format.block_shift;
    const int64_t g = column >> format.block_shift;
    return first_block(row) + (format.tiled ? (g >> 2) * 512 + (g & 3) : g);
  }

  float outer(int64_t row, int64_t b) const {
    return weight.outer[format.outer_by_row ? row : b >> format.outer_shift];
  }

  float scale(int64_t row, int64_t column) const {
    const int64_t b = block(row, column);
    if (weight.scale_values == nullptr) return widen(weight.scale, b, weight.scale_dtype);
    const float value = weight.scale_values[static_cast<const uint8_t*>(weight.scale)[b]];
    if (weight.outer == nullptr) return value;
    if (format.divides) return value / outer(row, b);
    const float scaled = value * outer(row, b);
    return weight.offset == nullptr ? scaled : scaled + *weight.offset;
  }

  float zero(int64_t row, int64_t column) const {
    return widen(weight.zero_point, block(row, column), weight.zero_dtype);
  }

  int code(int64_t i) const {
    if (format.planes) {
      const auto* words = static_cast<const uint32_t*>(weight.codes) + i / 32 * format.planes;
      int code = 0;
      for (int p = 0; p < format.planes; ++p) code |= (words[p] >> i % 32 & 1) << p;
      return code;
    }
    const bool is_high = (i % 2 == 0) == (format.high_first != 0);
    const uint8_t byte = static_cast<const uint8_t*>(weight.codes)[i / 2];
    return is_high ? byte >> 4 : byte & 15;
  }

  float element(int64_t row, int64_t column) const {
    const float value = weight.values[code(row * columns + column)], by = scale(row, column);
    if (format.zero == kNone) return value * by;
    const float point = zero(row, column);
    return format.zero == kCode ? (value - point) * by : value * by + point;
  }
};

// Multiplies R rows of weights with M rows of x, into kTogether sums for each row of weights.
template <class Kind, int R, int M, int kZero>
void multiply(const Panel& panel, const typename Kind::Number* x, float* sums) {
  constexpr int kHalf = Kind::kLanes, kChunk = 2 * kHalf;
  // Loops over r and m are unrolled before anything else, so that totals are registers.
  Lanes totals[R][M];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) totals[r][m] = splat(0.0f);
  const uint8_t* codes = panel.codes;
  const int64_t row_bytes = panel.columns / 2, groups = panel.columns / panel.step;
  for (int64_t g = 0; g < groups; ++g) {
    typename Kind::Values values[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      values[r] = Kind::values(scaled<kZero>(panel, g + r * groups));
      __builtin_prefetch(codes + r * row_bytes + kAhead);
    }
    for (int64_t i = 0; i < panel.step; i += kChunk, x += M * kChunk, codes += kHalf) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const auto bytes = Kind::load(codes + r * row_bytes);
        const auto one = Kind::look_up_high(values[r], bytes);
        const auto two = Kind::look_up_low(values[r], bytes);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          totals[r][m] = Kind::add(totals[r][m], one, x + m * kChunk);
          totals[r][m] = Kind::add(totals[r][m], two, x + m * kChunk + kHalf);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[r * kTogether + m] = sum(totals[r][m]);
}

template <class Kind, int R, int M>
void multiply(const Panel& panel, const typename Kind::Number* x, float* sums) {
  if (panel.zero == kNone) multiply<Kind, R, M, kNone>(panel, x, sums);
  else if (panel.zero == kCode) multiply<Kind, R, M, kCode>(panel, x, sums);
  else multiply<Kind, R, M, kValue>(panel, x, sums);
}

template <class Kind, int R, int M>
void multiply(const codes::Panel& panel, const typename Kind::Number* x, float* sums) {
  codes::multiply<Kind, R, M>(panel, x, kTogether, sums);
}

// Multiplies one row of numbers, arranged, with M rows of x.
template <int M>
void multiply_dense(const float* row, int64_t chunks, const float* x, float* sums) {
  Lanes totals[M];
  for (Lanes& total : totals) total = splat(0.0f);
  for (int64_t i = 0; i < chunks; ++i, row += kChunk, x += M * kChunk) {
    const Lanes one = load(row), two = load(row + kLanes);
    for (int m = 0; m < M; ++m) {
      totals[m] = fma(one, load(x + m * kChunk), totals[m]);
      totals[m] = fma(two, load(x + m * kChunk + kLanes), totals[m]);
    }
  }
  for (int m = 0; m < M; ++m) sums[m] = sum(totals[m]);
}

// How many rows of weights share what is read of `count` rows of x: registers hold all sums.
constexpr int rows_of_weights(int count) {
  return kLanes == 16 ? (count > 4 ? 3 : 4) : (count > 2 ? 2 : 4);
}

template <class Kind>
using Multiply = void (*)(const typename Kind::Panel&, const typename Kind::Number*, float*);
using MultiplyDense = void (*)(const float*, int64_t, const float*, float*);

// The functions for 1 to kTogether rows of x.
template <class Kind, size_t... I>
constexpr std::array<Multiply<Kind>, kTogether> several(std::index_sequence<I...>) {
  return {multiply<Kind, rows_of_weights(I + 1), I + 1>...};
}
template <class Kind, size_t... I>
constexpr std::array<Multiply<Kind>, kTogether> single(std::index_sequence<I...>) {
  return {multiply<Kind, 1, I + 1>...};
}
template <size_t... I>
constexpr std::array<MultiplyDense, kTogether> dense(std::index_sequence<I...>) {
  return {multiply_dense<I + 1>...};
}
template <class Kind>
constexpr auto kSeveral = several<Kind>(std::make_index_sequence<kTogether>());
template <class Kind>
constexpr auto kSingle = single<Kind>(std::make_index_sequence<kTogether>());
constexpr auto kDense = dense(std::make_index_sequence<kTogether>());

// Whether codes are unpacked before they are multiplied.
bool unpacks(const QfuseFormat& format, int64_t columns, int64_t step) {
  if (step % kLanes || format.zero != kNone) return false;
  return format.planes ? columns % codes::kPlaneBlock == 0 : step < kSmall;
}

// An input, arranged in tiles of kTogether rows: chunk by chunk, and in a chunk row by row. Where
// weights meet it in bfloat16, it is arranged for that, and for adapters like this.
class Input {
 public:
  Input(const void* x, int64_t count, int64_t columns, int64_t step, int dtype,
        const QfuseFormat& format, bool has_adapters)
      : count(count),
        columns(columns),
        chunks((columns + kChunk - 1) / kChunk),
        order(unpacks(format, columns, step) ? kNatural
              : format.high_first                          ? kHighFirst
                                                           : kLowFirst) {
    const bool by_nibbles = order != kNatural && !format.planes;
#ifdef QFUSE_AMX
    if (by_nibbles && dtype == kBFloat16 && count >= kTilesFrom && count <= amx::kMostCount &&
        columns > 0 && step % amx::kColumns == 0 && amx::allowed())
      tiles_ = std::make_unique<amx::Rows>(static_cast<const uint16_t*>(x), count, columns,
                                           order == kHighFirst);
    if (tiles_ != nullptr && !has_adapters) return;
#endif
#ifdef QFUSE_PAIRS
    if (dtype == kBFloat16 && count >= kPairsFrom && columns > 0 &&
        (order == kNatural || (by_nibbles && step % pairs::kColumns == 0))
#ifdef QFUSE_AMX
        && tiles_ == nullptr
#endif
    ) {
      arrange_pairs(static_cast<const uint16_t*>(x));
      if (!has_adapters) return;
    }
#endif
    values_.reserve(count * chunks * kChunk);
    at::parallel_for(0, count, kGrain / (columns + 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) {
        const int64_t first = m / kTogether * kTogether, together = in_tile(first);
        float* place = values_.data() + first * chunks * kChunk + (m - first) * kChunk;
        arrange(at_row(x, m * columns, dtype), columns, order, together * kChunk, dtype, place);
      }
    });
  }

  int64_t in_tile(int64_t first) const { return std::min<int64_t>(count - first, kTogether); }
  const float* tile(int64_t first) const { return values_.data() + first * chunks * kChunk; }
#ifdef QFUSE_AMX
  const amx::Rows* tiles() const { return tiles_.get(); }
#endif
#ifdef QFUSE_PAIRS
  bool in_pairs() const { return pairs_.data() != nullptr; }
  const uint16_t* pairs(int64_t first) const {
    return reinterpret_cast<const uint16_t*>(pairs_.data()) + first * chunks * kChunk;
  }
#endif

  const int64_t count, columns, chunks;
  const Order order;

 private:
#ifdef QFUSE_PAIRS
  void arrange_pairs(const uint16_t* x) {
    const int64_t padded = chunks * kChunk;
    auto* const out = reinterpret_cast<uint16_t*>(pairs_.reserve((count * padded + 1) / 2));
    at::parallel_for(0, count, kGrain / (columns + 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) {
        const int64_t first = m / kTogether * kTogether, together = in_tile(first);
        uint16_t* const tile = out + first * padded;
        if (order == kNatural)
          codes::arrange(x + m * columns, columns, together, tile + (m - first) * kChunk);
        else
          pairs::arrange(x + m * columns, columns, order == kHighFirst, together,
                         tile + (m - first) * pairs::kColumns);
      }
    });
  }
  Buffer pairs_;
#endif
  Buffer values_;
#ifdef QFUSE_AMX
  std::unique_ptr<amx::Rows> tiles_;
#endif
};

// Multiplies rows of one weight with an input: sums[r * count + m].
class Product {
 public:
  Product(const QfuseFormat& format, const QfuseWeight& weight, const Input& x, int64_t step)
      : weight(weight),
        decoder_{format, weight, x.columns},
        x_(x),
        step_(step),
        groups_(step > 0 ? (x.chunks * kChunk + step - 1) / step : 0) {
    std::copy_n(weight.values, format.values, values_.data());
  }

  // Computes at most kBlock rows.
  void packed(int64_t row, int64_t rows, float* sums) {
    if (x_.order == kNatural) return unpacked(row, rows, sums);
    if (decoder_.format.planes || step_ % kChunk) return one_by_one(row, rows, sums);
    find_scales(row, rows);
    const auto panel = [&](int64_t r) {
      return Panel{static_cast<const uint8_t*>(weight.codes) + (row + r) * x_.columns / 2,
                   x_.columns,
                   step_,
                   scales_.data() + r * groups_,
                   zeros_.data() + r * groups_,
                   decoder_.format.zero,
                   table(values_.data())};
    };
#ifdef QFUSE_AMX
    if (x_.tiles() != nullptr) {
      for (int64_t r = 0; r < rows; r += amx::kRows)
        amx::multiply(panel(r), std::min<int64_t>(rows - r, amx::kRows), *x_.tiles(),
                      sums + r * x_.count);
      return;
    }
#endif
#ifdef QFUSE_PAIRS
    if (x_.in_pairs())
      return multiply_tiles<pairs::Kind>(rows, panel, [&](int64_t m) { return x_.pairs(m); }, sums);
#endif
    multiply_tiles<Widened>(rows, panel, [&](int64_t m) { return x_.tile(m); }, sums);
  }

  // Adds the adapter's product and the bias to one row's sums. `projected`: [rank, count].
  void finish(int64_t row, const float* projected, int dtype, float* sums) const {
    for (int64_t j = 0; j < weight.rank; ++j) {
      const float factor = widen(weight.b, row * weight.rank + j, weight.adapter_dtype);
      for (int64_t m = 0; m < x_.count; ++m) sums[m] += factor * projected[j * x_.count + m];
    }
    if (weight.bias == nullptr) return;
    const float bias = widen(weight.bias, row, dtype);
    for (int64_t m = 0; m < x_.count; ++m) sums[m] += bias;
  }

  const QfuseWeight& weight;

 private:
  template <class Kind, class PanelOf, class Tile>
  void multiply_tiles(int64_t rows, const PanelOf& panel, const Tile& tile, float* sums) const {
    float part[kMost * kTogether];
    for (int64_t m = 0; m < x_.count; m += kTogether) {
      const int64_t together = x_.in_tile(m), most = rows_of_weights(static_cast<int>(together));
      for (int64_t r = 0, now; r < rows; r += now) {
        now = rows - r < most ? 1 : most;
        (now == 1 ? kSingle<Kind> : kSeveral<Kind>)[together - 1](panel(r), tile(m), part);
        for (int64_t i = 0; i < now; ++i)
          std::copy_n(part + i * kTogether, together, sums + (r + i) * x_.count + m);
      }
    }
  }

  // Where codes are unpacked.
  void unpacked(int64_t row, int64_t rows, float* sums) {
    const int64_t padded = x_.chunks * kChunk, planes = decoder_.format.planes;
    const int64_t row_bytes = x_.columns * (planes ? planes : 4) / 8;
    if (unpacked_.data() == nullptr)
      unpacked_.reserve((kUnpacked * padded + codes::kPlaneBlock) / sizeof(float) + 1);
    auto* const codes = reinterpret_cast<uint8_t*>(unpacked_.data());
    const auto* const packed = static_cast<const uint8_t*>(weight.codes) + row * row_bytes;
    find_scales(row, rows);
    for (int64_t first = 0; first < rows; first += kUnpacked) {
      const int64_t now = std::min(kUnpacked, rows - first);
      for (int64_t r = 0; r < now; ++r)
        codes::unpack(decoder_.format, packed + (first + r) * row_bytes, x_.columns,
                      codes + r * padded);
      const auto panel = [&](int64_t r) {
        return codes::Panel{codes + r * padded, padded, shift_of(step_),
                            scales_.data() + (first + r) * groups_,
                            {table(values_.data()), table(values_.data() + 16)},
                            packed + std::min(first + kUnpacked + r, rows - 1) * row_bytes, row_bytes};
      };
      float* const out = sums + first * x_.count;
      if (decoder_.format.values > 16) multiply_unpacked<32>(now, panel, out);
      else multiply_unpacked<16>(now, panel, out);
    }
  }

  template <int kTable, class PanelOf>
  void multiply_unpacked(int64_t rows, const PanelOf& panel, float* sums) const {
#ifdef QFUSE_PAIRS
    if (x_.in_pairs())
      return multiply_tiles<codes::Pairs<kTable>>(
          rows, panel, [&](int64_t m) { return x_.pairs(m); }, sums);
#endif
    multiply_tiles<codes::Widened<kTable>>(
        rows, panel, [&](int64_t m) { return x_.tile(m); }, sums);
  }

  static int shift_of(int64_t step) {
    int shift = 0;
    while (step >> shift > 1) ++shift;
    return shift;
  }

  void find_scales(int64_t row, int64_t rows) {
    scales_.resize(rows * groups_);
    for (int64_t r = 0; r < rows; ++r) find_scales_of(row + r, scales_.data() + r * groups_);
    if (decoder_.format.zero == kNone) return;
    zeros_.resize(rows * groups_);
    for (int64_t r = 0; r < rows; ++r) find_zeros_of(row + r, zeros_.data() + r * groups_);
  }

  // Whether what a row shares lies as its blocks do.
  bool in_blocks() const { return step_ >> decoder_.format.block_shift == 1; }

  void find_zeros_of(int64_t row, float* out) const {
    const int64_t number = x_.columns / step_, first = decoder_.first_block(row);
    if (in_blocks()) return widen(weight.zero_point, first, number, weight.zero_dtype, out);
    for (int64_t g = 0; g < number; ++g) out[g] = decoder_.zero(row, g * step_);
  }

  void find_scales_of(int64_t row, float* out) const {
    const int64_t number = x_.columns / step_, first = decoder_.first_block(row);
    const QfuseFormat& format = decoder_.format;
    if (!in_blocks()) {
      for (int64_t g = 0; g < number; ++g) out[g] = decoder_.scale(row, g * step_);
      return;
    }
    if (weight.scale_values == nullptr)
      return widen(weight.scale, first, number, weight.scale_dtype, out);
    // As `Decoder::scale`, without what it looks up for each of many; four codes take one load.
    const uint8_t* coded = static_cast<const uint8_t*>(weight.scale) + first;
    const float* const values = weight.scale_values;
    const int64_t far = format.tiled ? 512 : 4;
    int64_t g = 0;
    for (; g + 4 <= number; g += 4, coded += far) {
      uint32_t four;
      std::memcpy(&four, coded, 4);
      for (int i = 0; i < 4; ++i) out[g + i] = values[four >> 8 * i & 255];
    }
    for (; g < number; ++g) out[g] = values[*coded++];
    if (weight.outer == nullptr || number == 0) return;
    const float by = decoder_.outer(row, first);
    const float offset = weight.offset == nullptr ? 0.0f : *weight.offset;
    const int64_t shift = format.outer_shift;
    if (format.divides)
      for (g = 0; g < number; ++g) out[g] /= by;
    else if (first >> shift == first + number - 1 >> shift)
      for (g = 0; g < number; ++g) out[g] = out[g] * by + offset;
    else
      for (g = 0; g < number; ++g) out[g] = out[g] * weight.outer[first + g >> shift] + offset;
  }

  // Where a block ends inside of a chunk.
  void one_by_one(int64_t row, int64_t rows, float* sums) {
    natural_.resize(x_.columns);
    arranged_.reserve(x_.chunks * kChunk);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < x_.columns; ++c) natural_[c] = decoder_.element(row + r, c);
      arrange<kFloat32>(natural_.data(), x_.columns, x_.order, kChunk, arranged_.data());
      multiply_arranged(x_, arranged_.data(), sums + r * x_.count);
    }
  }

 public:
  static void multiply_arranged(const Input& x, const float* row, float* sums) {
    for (int64_t m = 0; m < x.count; m += kTogether)
      kDense[x.in_tile(m) - 1](row, x.chunks, x.tile(m), sums + m);
  }

 private:
  Decoder decoder_;
  const Input& x_;
  int64_t step_, groups_;
  std::array<float, 32> values_{};
  std::vector<float> scales_, zeros_, natural_;
  Buffer arranged_, unpacked_;
};

// Computes scaling * x A' of every adapter, one after the other: [rank, count] each.
std::vector<float> project(const Input& x, const QfuseWeight* weights, int64_t count) {
  int64_t ranks = 0;
  for (int64_t i = 0; i < count; ++i) ranks += weights[i].rank;
  std::vector<float> projected(ranks * x.count);
  at::parallel_for(0, ranks, kGrain / (x.columns * x.count + 1) + 1, [&](int64_t begin, int64_t end) {
    Buffer arranged;
    arranged.reserve(x.chunks * kChunk);
    int64_t first = 0;
    for (const QfuseWeight* w = weights; w != weights + count; first += w++->rank) {
      for (int64_t j = std::max(begin, first); j < std::min(end, first + w->rank); ++j) {
        const void* row = at_row(w->a, (j - first) * x.columns, w->adapter_dtype);
        arrange(row, x.columns, x.order, kChunk, w->adapter_dtype, arranged.data());
        float* of_row = projected.data() + j * x.count;
        Product::multiply_arranged(x, arranged.data(), of_row);
        for (int64_t m = 0; m < x.count; ++m) of_row[m] *= w->scaling;
      }
    }
  });
  return projected;
}

inline float silu(float value) { return value / (1.0f + std::exp(-value)); }

}  // namespace

// Each weight has a result, or two weights have one, silu(first) * second, where they are `gated`.
// `step` elements from each multiple on share a scale in a row of so many columns.
extern "C" void qfuse_linear_rows(const QfuseFormat* format, const QfuseWeight* weights,
                                  int64_t number, const void* x, int64_t count, int64_t columns,
                                  int64_t step, int dtype, int gated) {
  const bool has_adapters =
      std::any_of(weights, weights + number, [](const QfuseWeight& w) { return w.rank > 0; });
  const Input input(x, count, columns, step, dtype, *format, has_adapters);
  const std::vector<float> projected = project(input, weights, number);
  int64_t rows = 0;
  for (int64_t i = 0; i < (gated ? 1 : number); ++i) rows += weights[i].rows;
  at::parallel_for(0, rows, kGrain / (columns + 1) + 1, [&](int64_t begin, int64_t end) {
#ifdef QFUSE_AMX
    std::optional<amx::Shapes> shapes;
    if (input.tiles() != nullptr) shapes.emplace(*input.tiles());
#endif
    std::vector<float> sums(kBlock * count), gates(gated ? kBlock * count : 0);
    int64_t start = 0;
    const float* low = projected.data();
    for (int64_t i = 0; i < (gated ? 1 : number); ++i) {
      const QfuseWeight& weight = weights[i];
      Product product(*format, weight, input, step);
      Product other(*format, weights[gated ? 1 : i], input, step);
      const float* other_low = low + weight.rank * count;
      const int64_t last = std::min(end - start, weight.rows);
      for (int64_t row = std::max<int64_t>(begin - start, 0); row < last; row += kBlock) {
        const int64_t now = std::min<int64_t>(kBlock, last - row);
        product.packed(row, now, sums.data());
        if (gated) other.packed(row, now, gates.data());
        for (int64_t r = 0; r < now; ++r) {
          float* of_row = sums.data() + r * count;
          product.finish(row + r, low, dtype, of_row);
          if (gated) {
            float* up = gates.data() + r * count;
            other.finish(row + r, other_low, dtype, up);
            for (int64_t m = 0; m < count; ++m) of_row[m] = silu(of_row[m]) * up[m];
          }
          for (int64_t m = 0; m < count; ++m)
            store(weight.out, m * weight.rows + row + r, of_row[m], dtype);
        }
      }
      start += weight.rows;
      low += weight.rank * count;
    }
  });
}
