// Multiply packed weights with x in bfloat16 by products of pairs (AVX512-BF16), on processors that have
// these and no matrix unit, or for so few rows of x that it does not pay.
//
// A block's 16 values, scaled and rounded to bfloat16 as an eager product has them, are a table in a
// register; one look-up gives the values of 32 codes, of the high nibbles or of the low ones.
#pragma once

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define QFUSE_PAIRS 1

#include <cstdint>

#include "panel.h"

namespace pairs {

constexpr int kColumns = 64;  // of 32 bytes of codes

struct Kind {
  using Panel = ::Panel;
  using Number = uint16_t;
  using Values = __m512i;
  static constexpr int kLanes = kColumns / 2;

  static Values values(const Table& table) {
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(table.values);
    return _mm512_broadcast_i64x4(half);  // a look-up reads five bits
  }
  static __m512i load(const uint8_t* codes) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  }
  static __m512bh look_up_high(Values values, __m512i codes) {
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), values);
  }
  static __m512bh look_up_low(Values values, __m512i codes) {
    return (__m512bh)_mm512_permutexvar_epi16(codes, values);
  }
  static Lanes add(Lanes sum, __m512bh weights, const uint16_t* x) {
    return _mm512_dpbf16_ps(sum, weights, (__m512bh)_mm512_loadu_si512(x));
  }
};

// Puts a row in the order of the look-ups; `together` rows take turns by kColumns.
inline void arrange(const uint16_t* row, int64_t columns, bool high_first, int64_t together,
                    uint16_t* out) {
  const int first = high_first ? 0 : Kind::kLanes, second = Kind::kLanes - first;
  for (int64_t c = 0; c < columns; c += kColumns, out += together * kColumns) {
    for (int i = 0; i < Kind::kLanes; ++i) {
      out[first + i] = row[c + 2 * i];
      out[second + i] = row[c + 2 * i + 1];
    }
  }
}

}  // namespace pairs

#endif
