// Dequantize on a CPU with what is printed of a format (inductor_q/decode/cpp.py), rounded once.
//
// A part of a row at a time, codes are unpacked to bytes, and vectors of them are decoded and rounded.
// Where neighbours in a vector do not share their scales, or codes that lie together span rows, each
// element finds its own. The file is compiled with -ffp-contract=off and -fwrapv, and its results are
// those of the eager reference, bit for bit.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "lanes.h"
#include "rounding.h"

namespace {

typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

// A vector of codes, each in a byte, before it is known how they are widened.
struct Codes {
  const uint8_t* bytes;
};

struct Weight {
  const void* const* operands;
  const int* dtypes;  // of operands that hold floating-point numbers, as in rounding.h
  int64_t rows;
  int64_t columns;
  const float* table;  // the values of codes, where an operand has them
};

template <class To, class From>
inline To same_bits(From a) {
  static_assert(sizeof(To) == sizeof(From));
  To b;
  std::memcpy(&b, &a, sizeof b);
  return b;
}

inline int32_t to_int(int32_t a) { return a; }
inline Ints to_int(Ints a) { return a; }
inline Ints to_int(Codes codes) {
  if constexpr (sizeof(Bytes) == sizeof(Ints)) return same_bits<Ints>(load_bytes(codes.bytes));
  Ints a;
  for (int j = 0; j < kLanes; ++j) a[j] = codes.bytes[j];
  return a;
}

template <int kBits>
inline Ints sign_extend(Codes codes) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  if (kBits == 8)
    return same_bits<Ints>(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.bytes))));
#endif
  return (to_int(codes) << (32 - kBits)) >> (32 - kBits);
}

inline Ints operator+(Codes codes, int32_t n) { return to_int(codes) + n; }

inline float to_float(float a) { return a; }
inline float to_float(int32_t a) { return static_cast<float>(a); }
inline Floats to_float(Ints a) { return __builtin_convertvector(a, Floats); }
inline Floats to_float(Codes codes) { return to_float(to_int(codes)); }
inline float as_float(int32_t a) { return same_bits<float>(a); }
inline Floats as_float(Ints a) { return same_bits<Floats>(a); }
inline int32_t as_int(float a) { return same_bits<int32_t>(a); }
inline Ints as_int(Floats a) { return same_bits<Ints>(a); }

// Looks up codes in a table; one of up to 32 values has room for 16 or 32.
template <int kSize>
inline Floats look_up(const float* values, Codes codes) {
  const Ints code = to_int(codes);
  if constexpr (kSize <= 32 && sizeof(Bytes) == sizeof(Ints)) {
    const Bytes bytes = same_bits<Bytes>(code);
    const Floats first = same_bits<Floats>(low(table(values), bytes));
    if constexpr (kSize <= 16) return first;
    return code < 16 ? first : same_bits<Floats>(low(table(values + 16), bytes));
  }
  Floats a;
  for (int j = 0; j < kLanes; ++j) a[j] = values[code[j]];
  return a;
}

#include QFUSE_PRINTED

constexpr int64_t kPart = 256;  // columns that are decoded at a time
static_assert(kPart % kTogether == 0);

template <int kDtype>
using Stored = std::conditional_t<kDtype == kFloat32, float, uint16_t>;

#ifdef __AVX512BF16__
// Whether the instructions that round to bfloat16 would flush one of these to zero.
inline bool has_denormals(Floats values) { return _mm512_fpclass_ps_mask(values, 0x20) != 0; }
#endif

template <int kDtype>
inline void store(Floats values, Stored<kDtype>* out) {
  if constexpr (kDtype == kFloat32) {
    std::memcpy(out, &values, sizeof values);
    return;
  }
#ifdef __AVX512BF16__
  if (kDtype == kBFloat16 && !has_denormals(values)) {
    const auto rounded = _mm512_cvtneps_pbh(values);
    std::memcpy(out, &rounded, sizeof rounded);
    return;
  }
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__)
  if (kDtype == kFloat16) {
    const auto rounded = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(out, &rounded, sizeof rounded);
    return;
  }
#endif
  for (int j = 0; j < kLanes; ++j) ::store(out, j, values[j], kDtype);
}

// Stores two vectors at once where that takes fewer instructions.
template <int kDtype>
inline void store(Floats first, Floats second, Stored<kDtype>* out) {
#ifdef __AVX512BF16__
  if (kDtype == kBFloat16 && !has_denormals(first) && !has_denormals(second)) {
    const auto rounded = _mm512_cvtne2ps_pbh(second, first);
    std::memcpy(out, &rounded, sizeof rounded);
    return;
  }
#endif
  store<kDtype>(first, out);
  store<kDtype>(second, out + kLanes);
}

template <int kDtype>
void decode_part(const Weight weight, int64_t row, int64_t first, int64_t count, int64_t group,
                 Stored<kDtype>* out) {
  const int64_t i = row * weight.columns + first;
  const Unit* __restrict const qweight = static_cast<const Unit*>(weight.operands[0]);
  uint8_t unpacked[kPart];
  const uint8_t* codes = unpacked;
  if constexpr (kTogether == 1) {
    codes = qweight + i;
  } else {
    for (int64_t b = 0; b < count / kTogether; ++b)
#pragma GCC unroll(kTogether > 8 ? 1 : kTogether)
      for (int32_t lane = 0; lane < kTogether; ++lane)
        unpacked[b * kTogether + lane] = static_cast<uint8_t>(code_of(
            qweight, weight, row, i / kTogether + b, lane, first / kTogether + b, lane));
  }
  int64_t next = group - first % group;  // where others begin to share
  for (int64_t j = 0; j < count; next += group) {
    float found[kShared];
    Floats shared[kShared];
    share(weight, i + j, row, first + j, found);
    for (int n = 0; n < kShared; ++n) shared[n] = same_bits<Floats>(splat(found[n]));
    const int64_t end = std::min(count, next);
    for (; j + 2 * kLanes <= end; j += 2 * kLanes)
      store<kDtype>(value_of(weight, {codes + j}, shared),
                    value_of(weight, {codes + j + kLanes}, shared), out + j);
    for (; j < end; j += kLanes) store<kDtype>(value_of(weight, {codes + j}, shared), out + j);
  }
}

// Decodes any part of a row into the columns of `out`, from `at` on.
void decode_elements(const Weight& weight, int64_t row, int64_t first, int64_t count, int dtype,
                     void* out, int64_t at) {
  const Unit* const qweight = static_cast<const Unit*>(weight.operands[0]);
  for (int64_t j = 0; j < count; ++j) {
    const int64_t column = first + j, i = row * weight.columns + column;
    float found[kShared];
    Floats shared[kShared];
    share(weight, i, row, column, found);
    for (int n = 0; n < kShared; ++n) shared[n] = same_bits<Floats>(splat(found[n]));
    uint8_t codes[kLanes] = {static_cast<uint8_t>(
        code_of(qweight, weight, row, i / kTogether, i % kTogether, column / kTogether,
                column % kTogether))};
    ::store(out, at + j, value_of(weight, {codes}, shared)[0], dtype);
  }
}

template <int kDtype>
void decode(const Weight& weight, int64_t out_stride, int64_t group, int threads, void* out) {
  const bool in_parts = weight.columns % kTogether == 0 && group % kLanes == 0;
  if (weight.rows * weight.columns <= 65536) threads = 1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < weight.rows; ++row) {
    for (int64_t first = 0; first < weight.columns; first += kPart) {
      const int64_t count = std::min(kPart, weight.columns - first), at = row * out_stride + first;
      if (in_parts)
        decode_part<kDtype>(weight, row, first, count, group, static_cast<Stored<kDtype>*>(out) + at);
      else
        decode_elements(weight, row, first, count, kDtype, out, at);
    }
  }
}

}  // namespace

// group: how many neighbours in a row share their scales, from each multiple on.
extern "C" void qfuse_dequantize(const void* const* operands, const int* dtypes, int64_t rows,
                                 int64_t columns, int64_t out_stride, int64_t group, int dtype,
                                 int threads, void* out) {
  float table[std::max(kTable, 32)] = {};
  for (int e = 0; e < kTable; ++e)
    table[e] = widen(operands[kTableOperand], e, dtypes[kTableOperand]);
  const Weight weight{operands, dtypes, rows, columns, table};
  if (dtype == kFloat32) decode<kFloat32>(weight, out_stride, group, threads, out);
  else if (dtype == kBFloat16) decode<kBFloat16>(weight, out_stride, group, threads, out);
  else decode<kFloat16>(weight, out_stride, group, threads, out);
}
