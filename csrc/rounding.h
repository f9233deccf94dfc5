// Read a number of any dtype as float32; store one, rounded to nearest even, as torch does.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__F16C__) && !defined(__FLT16_MAX__)  // g++ 11 has float16 for x86 in instructions alone
#include <immintrin.h>
#elif defined(__aarch64__)  // whose C++ compilers know the other name for less long
using Half = __fp16;
#else
using Half = _Float16;
#endif

// Those that a result may have come first.
enum Dtype { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kUInt8 = 3, kInt8 = 4 };

inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__F16C__) && !defined(__FLT16_MAX__)
inline uint16_t to_float16(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline float from_float16(uint16_t bits) { return _cvtsh_ss(bits); }
#else
inline uint16_t to_float16(float value) {
  const Half half = static_cast<Half>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline float from_float16(uint16_t bits) {
  Half half;
  std::memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}
#endif

inline void store(void* out, int64_t i, float value, int dtype) {
  if (dtype == kFloat32) static_cast<float*>(out)[i] = value;
  else if (dtype == kBFloat16) static_cast<uint16_t*>(out)[i] = to_bfloat16(value);
  else static_cast<uint16_t*>(out)[i] = to_float16(value);
}

inline float widen(const void* p, int64_t i, int dtype) {
  switch (dtype) {
    case kFloat32: return static_cast<const float*>(p)[i];
    case kBFloat16: {
      const uint32_t bits = uint32_t{static_cast<const uint16_t*>(p)[i]} << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    }
    case kFloat16: return from_float16(static_cast<const uint16_t*>(p)[i]);
    case kUInt8: return static_cast<const uint8_t*>(p)[i];
    default: return static_cast<const int8_t*>(p)[i];
  }
}

// Widens `count` numbers, the i-th and those behind it.
inline void widen(const void* p, int64_t i, int64_t count, int dtype, float* out) {
  const auto each = [=](auto of) {
    for (int64_t j = 0; j < count; ++j) out[j] = widen(p, i + j, decltype(of)::value);
  };
  switch (dtype) {
    case kFloat32: return each(std::integral_constant<int, kFloat32>());
    case kBFloat16: return each(std::integral_constant<int, kBFloat16>());
    case kFloat16: return each(std::integral_constant<int, kFloat16>());
    case kUInt8: return each(std::integral_constant<int, kUInt8>());
    default: return each(std::integral_constant<int, kInt8>());
  }
}
