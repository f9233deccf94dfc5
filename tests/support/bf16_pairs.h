// PTX's operations on two bf16 in a word, and other names that scatter2scatter.cu has, on the CPU.
#pragma once

#include <algorithm>

#include "cuda.h"

#define __forceinline__ inline

struct alignas(16) int4 { int x, y, z, w; };
inline std::size_t __cvta_generic_to_shared(const void*) { return 0; }
inline unsigned __umulhi(unsigned, unsigned) { return 0; }
template <class T> T __shfl_sync(unsigned, T value, int) { return value; }
inline void __syncthreads() {}

inline double value_of(unsigned bits) { return __uint_as_float(bits << 16); }
// Rounds once, to the nearest and to even; a number below the smallest normal one keeps fewer bits.
inline unsigned rounded(double x) {
  if (std::isnan(x)) return 0x7fff;
  if (x == 0 || std::isinf(x)) return __float_as_uint(static_cast<float>(x)) >> 16;
  const int exponent = std::max(std::ilogb(x), -126) - 7;
  return __float_as_uint(static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent))) >> 16;
}
template <class Operation, class... Pairs>
unsigned each_half(Operation operation, Pairs... pairs) {
  return operation((pairs & 0xffff)...) | operation((pairs >> 16)...) << 16;
}
inline unsigned multiply_pairs(unsigned a, unsigned b) {
  return each_half([](auto x, auto y) { return rounded(value_of(x) * value_of(y)); }, a, b);
}
inline unsigned multiply_and_add_pairs(unsigned a, unsigned b, unsigned c) {
  const auto one = [](auto x, auto y, auto z) { return rounded(value_of(x) * value_of(y) + value_of(z)); };
  return each_half(one, a, b, c);
}
inline unsigned greater_pairs(unsigned a, unsigned b) {
  return each_half([](auto x, auto y) { return value_of(x) > value_of(y) ? 0xffffu : 0u; }, a, b);
}
inline unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) {
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned of = selector >> 4 * i, byte = (of & 4 ? b : a) >> 8 * (of & 3) & 255;
    out |= (of & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return out;
}
