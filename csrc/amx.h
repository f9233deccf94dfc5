// Multiply 16 rows of packed weights with up to 32 rows of x in bfloat16, on the matrix units of a
// processor that has them (AMX).
//
// 64 columns are two tiles of weights, what the high nibbles of 32 bytes mean and what the low ones
// do, rounded to bfloat16 as an eager product has them. Tiles of one block are written while those of
// the block before are multiplied, since a tile is not forwarded from writes that are on their way.
#pragma once

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && \
    defined(__AVX512BF16__) && defined(__AVX512BW__)
#define QFUSE_AMX 1

#include <ATen/Parallel.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "panel.h"

namespace amx {

constexpr int kRows = 16;      // of weights
constexpr int kColumns = 64;   // of two tiles
constexpr int kCount = 16;     // rows of x in a tile
constexpr int kMostCount = 32;

// Whether the system lets this process use the tiles; asked for once.
inline bool allowed() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return is_allowed;
}

// x as the matrix unit reads it: for each 64 columns the tile of the high nibbles' elements and that
// of the low ones', with pairs of neighbours side by side.
class Rows {
 public:
  Rows(const uint16_t* x, int64_t count, int64_t columns, bool high_first)
      : count(count), columns(columns) {
    values_.reserve((count * columns + 1) / 2);
    const int64_t first = high_first ? 0 : kHalf, second = kHalf - first;
    at::parallel_for(0, count, (1 << 16) / (columns + 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) {
        const int64_t start = m / kCount * kCount, width = in_tile(start);
        uint32_t* pairs = tile(start) + m - start;
        for (int64_t c = 0; c < columns; c += kColumns, pairs += kColumns / 2 * width) {
          for (int64_t i = 0; i < kHalf; ++i) {
            uint64_t four;
            std::memcpy(&four, x + m * columns + c + 4 * i, 8);
            pairs[(first + i) * width] = (four & 0xffff) | (four >> 16 & 0xffff0000);
            pairs[(second + i) * width] = (four >> 16 & 0xffff) | (four >> 32 & 0xffff0000);
          }
        }
      }
    });
  }

  int64_t in_tile(int64_t start) const { return std::min<int64_t>(count - start, kCount); }
  uint32_t* tile(int64_t start) const {
    return reinterpret_cast<uint32_t*>(values_.data()) + start * columns / 2;
  }

  const int64_t count, columns;

 private:
  static constexpr int64_t kHalf = kColumns / 4;  // pairs in a tile
  Buffer values_;
};

// The shapes of tiles, which hold for a thread until it releases them.
class Shapes {
 public:
  explicit Shapes(const Rows& x) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    const auto set = [&](int tile, int64_t bytes) {
      shapes.bytes[tile] = static_cast<uint16_t>(bytes);
      shapes.rows[tile] = kRows;
    };
    const int64_t first = x.in_tile(0), second = x.count > kCount ? x.in_tile(kCount) : first;
    for (int tile : {0, 1, 6}) set(tile, 4 * first);
    for (int tile : {2, 3, 7}) set(tile, 4 * second);
    for (int tile : {4, 5}) set(tile, 64);
    _tile_loadconfig(&shapes);
  }
  Shapes(const Shapes&) = delete;
  ~Shapes() { _tile_release(); }
};

// Two tiles of weights.
struct alignas(64) Weights {
  __m512i high[kRows], low[kRows];
};

template <int kZero>
inline void decode(const Panel& panel, int64_t rows, int64_t column, Weights& out) {
  const int64_t groups = panel.columns / panel.step, group = column / panel.step;
  const uint8_t* codes = panel.codes + column / 2;
  for (int64_t r = 0; r < rows; ++r, codes += panel.columns / 2) {
    const Table values = scaled<kZero>(panel, group + r * groups);
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(values.values);
    const __m512i table = _mm512_broadcast_i64x4(half);  // a look-up reads five bits
    const __m512i bytes =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    out.high[r] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table);
    out.low[r] = _mm512_permutexvar_epi16(bytes, table);
  }
}

inline void multiply(const Weights& weights, const Rows& x, int64_t column) {
  _tile_loadd(4, weights.high, 64);
  _tile_loadd(5, weights.low, 64);
  const int64_t width = x.in_tile(0), tile = kColumns / 4 * width;
  const uint32_t* first = x.tile(0) + column / 2 * width;
  _tile_loadd(6, first, 4 * width);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(6, first + tile, 4 * width);
  _tile_dpbf16ps(1, 5, 6);
  if (x.count <= kCount) return;
  const int64_t rest = x.in_tile(kCount);
  const uint32_t* second = x.tile(kCount) + column / 2 * rest;
  _tile_loadd(7, second, 4 * rest);
  _tile_dpbf16ps(2, 4, 7);
  _tile_loadd(7, second + kColumns / 4 * rest, 4 * rest);
  _tile_dpbf16ps(3, 5, 7);
}

template <int kZero>
void sum_up(const Panel& panel, int64_t rows, const Rows& x) {
  Weights weights[2];
  if (rows < kRows) std::memset(weights, 0, sizeof weights);
  for (int64_t c = 0, i = 0; c <= panel.columns; c += kColumns, ++i) {
    if (c < panel.columns) decode<kZero>(panel, rows, c, weights[i % 2]);
    if (c > 0) multiply(weights[(i + 1) % 2], x, c - kColumns);
  }
}

// Multiplies at most kRows rows of weights with x: sums[r * count + m].
inline void multiply(const Panel& panel, int64_t rows, const Rows& x, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (panel.zero == kNone) sum_up<kNone>(panel, rows, x);
  else if (panel.zero == kCode) sum_up<kCode>(panel, rows, x);
  else sum_up<kValue>(panel, rows, x);
  alignas(64) float parts[4][kRows * kCount];
  const int64_t first = x.in_tile(0), second = x.count - first;
  _tile_stored(0, parts[0], 4 * first);
  _tile_stored(1, parts[1], 4 * first);
  if (second > 0) {
    _tile_stored(2, parts[2], 4 * second);
    _tile_stored(3, parts[3], 4 * second);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t m = 0; m < first; ++m)
      sums[r * x.count + m] = parts[0][r * first + m] + parts[1][r * first + m];
    for (int64_t m = 0; m < second; ++m)
      sums[r * x.count + first + m] = parts[2][r * second + m] + parts[3][r * second + m];
  }
}

}  // namespace amx

#endif
