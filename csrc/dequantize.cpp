// Dequantize 4-bit codebook weights on a CPU: out[r, c] = codebook[code] * scale, rounded once.
//
// The function is plain C over raw pointers, so that it builds in a second at first use and needs no
// headers of torch. The codebook is an argument, since tables live in Python only. It is compiled with
// -ffp-contract=off, and its results are those of the eager reference, bit for bit.

#include <cmath>
#include <cstdint>

#include "rounding.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define QFUSE_AVX512 1
#endif

namespace {

struct Scales {
  const void* absmax;            // floats, or uint8 codes where scales are nested
  const float* nested_codebook;  // nullptr where they are not
  const float* nested_absmax;
  const float* nested_offset;
  int nested_shift;              // log2 of the nested blocksize, as a division costs what decode32 does

  float at(int64_t b) const {
    if (nested_codebook == nullptr) return static_cast<const float*>(absmax)[b];
    const float value = nested_codebook[static_cast<const uint8_t*>(absmax)[b]];
    return value * nested_absmax[b >> nested_shift] + nested_offset[0];
  }
};

#ifdef QFUSE_AVX512
// Decodes 8 packed bytes to 16 values, in order. Each byte becomes a 64-bit lane with its two codes.
inline __m512 decode16(const uint8_t* packed, __m512 table, __m512 scale, bool high_first) {
  const __m512i bytes =
      _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed)));
  const __m512i high = _mm512_srli_epi64(bytes, 4);  // no mask: permutexvar reads four bits only
  const __m512i first = high_first ? high : bytes;
  const __m512i second = high_first ? bytes : high;
  const __m512i codes = _mm512_or_si512(first, _mm512_slli_epi64(second, 32));
  return _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scale);
}

inline __m256i round_bfloat16(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

template <int kDtype>
inline void decode32(const uint8_t* packed, __m512 table, __m512 scale, bool high_first, bool tiny,
                     char* out) {
  const __m512 a = decode16(packed, table, scale, high_first);
  const __m512 b = decode16(packed + 8, table, scale, high_first);
  if constexpr (kDtype == kFloat32) {
    _mm512_storeu_ps(out, a);
    _mm512_storeu_ps(out + 64, b);
  } else if constexpr (kDtype == kBFloat16) {
#ifdef __AVX512BF16__
    if (!tiny) {  // the instruction would flush denormals to zero
      _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(b, a));
      return;
    }
#endif
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), round_bfloat16(a));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32), round_bfloat16(b));
  } else {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(a, kNearest));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32), _mm512_cvtps_ph(b, kNearest));
  }
}

template <int kDtype>
void decode_row_fast(const uint8_t* packed, const float* codebook, const Scales& scales,
                     int64_t block, int64_t start, int64_t cols, bool high_first, char* out) {
  constexpr int kSize = kDtype == kFloat32 ? 4 : 2;
  const __m512 table = _mm512_loadu_ps(codebook);
  const uint8_t* source = packed + start / 2;
  int64_t b = start / block;
  int64_t left = block - start % block;  // divided once a row: a division costs what decode32 does
  for (int64_t c = 0; c < cols; ++b, left = block) {
    const float block_scale = scales.at(b);
    const bool tiny = std::fabs(block_scale) < 1e-30f;
    const __m512 scale = _mm512_set1_ps(block_scale);
    const int64_t end = c + left < cols ? c + left : cols;
    for (; c < end; c += 32)
      decode32<kDtype>(source + c / 2, table, scale, high_first, tiny, out + c * kSize);
  }
}
#endif

void decode_row(const uint8_t* packed, const float* codebook, const Scales& scales, int64_t block,
                int64_t start, int64_t cols, bool high_first, int dtype, void* out) {
  int64_t current = -1;
  float scale = 0.0f;
  for (int64_t c = 0; c < cols; ++c) {
    const int64_t i = start + c;
    if (i / block != current) scale = scales.at(current = i / block);
    const bool high = (i % 2 == 0) == high_first;
    const uint8_t byte = packed[i / 2];
    store(out, c, codebook[high ? byte >> 4 : byte & 15] * scale, dtype);
  }
}

}  // namespace

extern "C" void qfuse_dequantize_4bit(
    const uint8_t* packed, const float* codebook, const void* absmax, const float* nested_codebook,
    const float* nested_absmax, const float* nested_offset, int64_t nested_block, int64_t block,
    int64_t rows, int64_t cols, int64_t out_stride, int high_first, int dtype, void* out) {
  const Scales scales{absmax, nested_codebook, nested_absmax, nested_offset,
                      __builtin_ctzll(static_cast<unsigned long long>(nested_block))};
  const int64_t size = dtype == kFloat32 ? 4 : 2;
#pragma omp parallel for schedule(static) if (rows * cols > 65536)
  for (int64_t r = 0; r < rows; ++r) {
    char* row = static_cast<char*>(out) + r * out_stride * size;
    const int64_t start = r * cols;
#ifdef QFUSE_AVX512
    if (cols % 32 == 0 && block % 32 == 0) {
      if (dtype == kFloat32)
        decode_row_fast<kFloat32>(packed, codebook, scales, block, start, cols, high_first, row);
      else if (dtype == kBFloat16)
        decode_row_fast<kBFloat16>(packed, codebook, scales, block, start, cols, high_first, row);
      else
        decode_row_fast<kFloat16>(packed, codebook, scales, block, start, cols, high_first, row);
      continue;
    }
#endif
    decode_row(packed, codebook, scales, block, start, cols, high_first, dtype, row);
  }
}
