// Dequantize k-bit weights on a CPU: out[r, c] = codebook[code] * scale, rounded once.
//
// A block of 32 elements is K words: bit j of word p is bit p of the j-th code. With AVX-512, half a
// word serves as a mask, and the codebook fills one or two registers. Without it, the loops have
// constant bounds and no branches, so that the compiler can vectorize them. The codebook and the values
// of 8-bit scales are arguments, since tables live in Python only. The file is compiled with
// -ffp-contract=off, and the results are those of the eager reference, bit for bit.

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "rounding.h"

namespace {

constexpr int kBlock = 32;
constexpr int kLargestCodebook = 32;

struct Weight {
  const uint32_t* words;
  const float* codebook;
  const void* absmax;        // uint8 codes of scale_table, or floats where there is none
  const float* scale_table;  // 256 values, or nullptr

  float scale(int64_t b) const {
    if (scale_table == nullptr) return static_cast<const float*>(absmax)[b];
    return scale_table[static_cast<const uint8_t*>(absmax)[b]];
  }
};

template <int K>
inline void decode_block(const Weight& weight, const float* table, int64_t b, float* values) {
  uint32_t words[K];
  std::memcpy(words, weight.words + b * K, sizeof words);
  const float scale = weight.scale(b);
#ifdef __AVX512F__
  const __m512 low = _mm512_loadu_ps(table), high = _mm512_loadu_ps(table + 16);
  for (int half = 0; half < 2; ++half) {
    __m512i code = _mm512_setzero_si512();
    for (int p = 0; p < K; ++p) {
      const __mmask16 set = static_cast<__mmask16>(words[p] >> (16 * half));
      code = _mm512_mask_or_epi32(code, set, code, _mm512_set1_epi32(1 << p));
    }
    const __m512 value = K <= 4 ? _mm512_permutexvar_ps(code, low)
                                : _mm512_permutex2var_ps(low, code, high);
    _mm512_storeu_ps(values + 16 * half, _mm512_mul_ps(value, _mm512_set1_ps(scale)));
  }
#else
  uint32_t codes[kBlock];
  for (int j = 0; j < kBlock; ++j) {
    uint32_t code = 0;
    for (int p = 0; p < K; ++p) code |= ((words[p] >> j) & 1u) << p;
    codes[j] = code;
  }
  for (int j = 0; j < kBlock; ++j) values[j] = table[codes[j]] * scale;
#endif
}

template <int kDtype>
inline void store_block(const float* values, char* out) {
  if constexpr (kDtype == kFloat32) {
    std::memcpy(out, values, kBlock * sizeof(float));
  } else {
    uint16_t rounded[kBlock];
    for (int j = 0; j < kBlock; ++j)
      rounded[j] = kDtype == kBFloat16 ? to_bfloat16(values[j]) : to_float16(values[j]);
    std::memcpy(out, rounded, sizeof rounded);
  }
}

template <int K, int kDtype>
void decode_row(const Weight& weight, int64_t start, int64_t cols, char* out) {
  constexpr int64_t kSize = kDtype == kFloat32 ? 4 : 2;
  float table[kLargestCodebook] = {}, values[kBlock];
  std::memcpy(table, weight.codebook, sizeof(float) << K);
  int64_t c = 0;
  while (c < cols) {
    const int64_t b = (start + c) / kBlock;
    const int64_t first = (start + c) % kBlock;
    decode_block<K>(weight, table, b, values);
    if (first == 0 && cols - c >= kBlock) {
      store_block<kDtype>(values, out + c * kSize);
      c += kBlock;
      continue;
    }
    for (int64_t j = first; j < kBlock && c < cols; ++j, ++c) store(out, c, values[j], kDtype);
  }
}

template <int K, int kDtype>
void decode(const Weight& weight, int64_t rows, int64_t cols, int64_t out_stride, char* out) {
  constexpr int64_t kSize = kDtype == kFloat32 ? 4 : 2;
#pragma omp parallel for schedule(static) if (rows * cols > 65536)
  for (int64_t r = 0; r < rows; ++r)
    decode_row<K, kDtype>(weight, r * cols, cols, out + r * out_stride * kSize);
}

template <int K>
void decode_as(const Weight& weight, int64_t rows, int64_t cols, int64_t out_stride, int dtype,
               char* out) {
  if (dtype == kFloat32) decode<K, kFloat32>(weight, rows, cols, out_stride, out);
  else if (dtype == kBFloat16) decode<K, kBFloat16>(weight, rows, cols, out_stride, out);
  else decode<K, kFloat16>(weight, rows, cols, out_stride, out);
}

}  // namespace

// Dequantizes codes of k bits, from 2 to 5. For any other k it writes nothing.
extern "C" void qfuse_dequantize_kbit(const uint32_t* words, const float* codebook,
                                      const void* absmax, const float* scale_table, int64_t rows,
                                      int64_t cols, int64_t out_stride, int k, int dtype,
                                      void* out) {
  const Weight weight{words, codebook, absmax, scale_table};
  char* target = static_cast<char*>(out);
  switch (k) {
    case 2: return decode_as<2>(weight, rows, cols, out_stride, dtype, target);
    case 3: return decode_as<3>(weight, rows, cols, out_stride, dtype, target);
    case 4: return decode_as<4>(weight, rows, cols, out_stride, dtype, target);
    case 5: return decode_as<5>(weight, rows, cols, out_stride, dtype, target);
    default: return;
  }
}
