// Codes in a byte each, in the order of the elements: unpacked from nibbles or bit planes, and
// multiplied with rows of x.
//
// What multiplies reads unpacked codes from a near cache, so it is one for every packing, and looks up
// as many codes as a vector has lanes, in a table of 16 or 32 values. Each such vector is scaled by
// itself: blocks may be as small as it is.
#pragma once

#include <cstdint>
#include <cstring>

#include "pairs.h"
#include "panel.h"

namespace codes {

constexpr int kPlaneBlock = 32;  // codes whose bits lie in as many words as a code has bits
constexpr int kColumns = 2 * kLanes;

template <bool kHighFirst>
void unpack_nibbles(const uint8_t* packed, int64_t columns, uint8_t* out) {
  for (int64_t i = 0; i < columns / 2; ++i) {
    out[2 * i] = kHighFirst ? packed[i] >> 4 : packed[i] & 15;
    out[2 * i + 1] = kHighFirst ? packed[i] & 15 : packed[i] >> 4;
  }
}

// Bit e of word p of a block is bit p of code e. Codes of kAtOnce blocks are written, of which there
// may be fewer.
#if defined(__AVX512VBMI__) && defined(__GFNI__) && defined(__AVX512BW__)
constexpr int kAtOnce = 2;
// The bytes of eight codes, from the highest plane's down, are a matrix of bits, which is transposed.
template <int kBits>
inline void unpack_blocks(const uint32_t* words, int64_t blocks, uint8_t* out) {
  constexpr int64_t kEach = 0x0101010101010101, kFirst = 0x0004080c10000000;
  constexpr int64_t kSecond = kFirst + 4 * kBits * kEach;
  constexpr uint64_t kFound = kEach * uint64_t{0xff << (8 - kBits) & 0xff};
  const __m512i places =
      _mm512_setr_epi64(kFirst, kFirst + kEach, kFirst + 2 * kEach, kFirst + 3 * kEach, kSecond,
                        kSecond + kEach, kSecond + 2 * kEach, kSecond + 3 * kEach);
  const __mmask16 there = blocks > 1 ? (1 << 2 * kBits) - 1 : (1 << kBits) - 1;
  const __m512i loaded = _mm512_maskz_loadu_epi32(there, words);
  const __m512i planes = _mm512_maskz_permutexvar_epi8(kFound, places, loaded);
  const __m512i units = _mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201));
  _mm512_storeu_si512(out, _mm512_gf2p8affine_epi64_epi8(units, planes, 0));
}
#elif defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int kAtOnce = 1;
template <int kBits>
inline void unpack_blocks(const uint32_t* words, int64_t, uint8_t* out) {
  __m256i codes = _mm256_maskz_set1_epi8(words[0], 1);
#pragma GCC unroll 8
  for (int p = 1; p < kBits; ++p)
    codes = _mm256_mask_add_epi8(codes, words[p], codes, _mm256_set1_epi8(1 << p));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), codes);
}
#else
constexpr int kAtOnce = 1;
typedef uint8_t Block __attribute__((vector_size(kPlaneBlock)));
typedef uint32_t Words __attribute__((vector_size(kPlaneBlock)));

// Puts the byte of a word that has the bit of code e into lane e.
inline Block spread(Words word) {
#define QFUSE_EIGHT(byte) byte, byte, byte, byte, byte, byte, byte, byte
#define QFUSE_LANES QFUSE_EIGHT(0), QFUSE_EIGHT(1), QFUSE_EIGHT(18), QFUSE_EIGHT(19)
#ifdef __clang__
  return __builtin_shufflevector((Block)word, (Block)word, QFUSE_LANES);
#else
  return __builtin_shuffle((Block)word, Block{QFUSE_LANES});
#endif
#undef QFUSE_LANES
#undef QFUSE_EIGHT
}

template <int kBits>
inline void unpack_blocks(const uint32_t* words, int64_t, uint8_t* out) {
  constexpr uint32_t kLow = 0x08040201u, kHigh = 0x80402010u;  // a bit in each byte
  const Block bits = (Block)Words{kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh};
  Block codes = {};
#pragma GCC unroll 8
  for (int p = kBits - 1; p >= 0; --p) {
    const Block found = (Block)((spread(Words{} + words[p]) & bits) != 0);
    codes = codes + codes - found;
  }
  std::memcpy(out, &codes, sizeof codes);
}
#endif

template <int kBits>
void unpack_planes(const uint32_t* words, int64_t columns, uint8_t* out) {
  constexpr int64_t kStep = kAtOnce * kPlaneBlock;
  for (int64_t c = 0; c < columns; c += kStep, words += kAtOnce * kBits) {
    __builtin_prefetch(words + 128);
    unpack_blocks<kBits>(words, (columns - c) / kPlaneBlock, out + c);
  }
}

// Unpacks a row of so many columns, which starts a block where codes lie in planes. It may write up to
// kPlaneBlock bytes more.
inline void unpack(const QfuseFormat& format, const uint8_t* packed, int64_t columns, uint8_t* out) {
  const auto* words = reinterpret_cast<const uint32_t*>(packed);
  switch (format.planes) {
    case 0:
      return format.high_first ? unpack_nibbles<true>(packed, columns, out)
                               : unpack_nibbles<false>(packed, columns, out);
    case 1: return unpack_planes<1>(words, columns, out);
    case 2: return unpack_planes<2>(words, columns, out);
    case 3: return unpack_planes<3>(words, columns, out);
    case 4: return unpack_planes<4>(words, columns, out);
    default: return unpack_planes<5>(words, columns, out);
  }
}

// Puts a row in the order of the elements, whose chunks of kColumns `together` rows take turns by;
// there are zeros behind it.
inline void arrange(const uint16_t* row, int64_t columns, int64_t together, uint16_t* out) {
  for (int64_t c = 0; c < columns; c += kColumns, out += together * kColumns)
    for (int64_t i = 0; i < kColumns; ++i) out[i] = c + i < columns ? row[c + i] : 0;
}

// A few rows of unpacked weights.
struct Panel {
  const uint8_t* codes;
  int64_t columns;      // a multiple of kColumns, and how far a row is from the next
  int shift;            // log2 of the columns that share a scale, at least of kLanes
  const float* scales;  // columns >> shift of each row, rounded up
  Table values[2];      // of the first 16 codes, and of 16 more
  const uint8_t* next;  // packed rows that are unpacked after these
  int64_t row_bytes;    // of such a row
};

// How x and values, of which a table has kTable, are multiplied: as float32 of every processor.
template <int kTable>
struct Widened {
  using Panel = codes::Panel;
  using Number = float;
  struct Weights {
    Lanes one, two;
  };
  static constexpr bool kHasMore = kTable > 16;

  static Weights weights(Lanes one, Lanes two) { return {one, two}; }
  static Lanes add(Lanes sum, Weights weights, const float* x) {
    return fma(weights.two, load(x + kLanes), fma(weights.one, load(x), sum));
  }
};

#ifdef QFUSE_PAIRS
// As bfloat16, to which weights are rounded, in products of pairs.
template <int kTable>
struct Pairs {
  using Panel = codes::Panel;
  using Number = uint16_t;
  using Weights = __m512bh;
  static constexpr bool kHasMore = kTable > 16;

  static Weights weights(Lanes one, Lanes two) { return _mm512_cvtne2ps_pbh(two, one); }
  static Lanes add(Lanes sum, Weights weights, const uint16_t* x) {
    return _mm512_dpbf16_ps(sum, weights, (__m512bh)_mm512_loadu_si512(x));
  }
};
#endif

template <bool kHasMore>
inline Lanes look_up(const Panel& panel, const uint8_t* codes) {
  const Bytes bytes = load_bytes(codes);
  return kHasMore ? low(panel.values[0], panel.values[1], bytes) : low(panel.values[0], bytes);
}

// Multiplies R rows of weights with M rows of x, into `most` sums for each row of weights.
template <class Kind, int R, int M>
void multiply(const Panel& panel, const typename Kind::Number* x, int64_t most, float* sums) {
  Lanes totals[R][M];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) totals[r][m] = splat(0.0f);
  const int64_t groups = (panel.columns - 1 >> panel.shift) + 1;
  const Panel local = panel;
  // While these are multiplied, what comes next is fetched: unpacking alone would wait for memory.
  const uint8_t* next = local.next;
  const int64_t fetched = R * local.row_bytes * kColumns / (local.columns + 1) + 1;
  for (int64_t c = 0; c < local.columns; c += kColumns, x += M * kColumns, next += fetched) {
    __builtin_prefetch(next, 0, 2);
    const float* first = local.scales + (c >> local.shift);
    const float* second = local.scales + (c + kLanes >> local.shift);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const uint8_t* at = local.codes + r * local.columns + c;
      const auto weights =
          Kind::weights(mul(look_up<Kind::kHasMore>(local, at), splat(first[r * groups])),
                        mul(look_up<Kind::kHasMore>(local, at + kLanes), splat(second[r * groups])));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
        totals[r][m] = Kind::add(totals[r][m], weights, x + m * kColumns);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[r * most + m] = sum(totals[r][m]);
}

}  // namespace codes
