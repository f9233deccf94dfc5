// Name the integers of kernels, and define the types that values are stored in and how fp32 is rounded
// to them.
//
// Nothing here includes a header of CUDA or of the C library: a user's machine may have none that NVRTC
// could find.

#pragma once

using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;

constexpr uint32 kWarp = 0xffffffffu;

// A storage type has `Raw`, the conversions `encode` and `decode` to and from fp32, and `pack`,
// which rounds two values into one word where two fit.

struct Float32 {
  using Raw = float;
  static __device__ float decode(Raw raw) { return raw; }
  static __device__ Raw encode(float value) { return value; }
};

struct Float16 {
  using Raw = uint16;

  static __device__ float decode(Raw raw) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(raw));
    return value;
  }

  static __device__ Raw encode(float value) {
    Raw raw;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(raw) : "f"(value));
    return raw;
  }

  static __device__ uint32 pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return encode(low) | static_cast<uint32>(encode(high)) << 16;
#endif
  }
};

struct BFloat16 {
  using Raw = uint16;

  static __device__ float decode(Raw raw) {
    return __uint_as_float(static_cast<uint32>(raw) << 16);
  }

  static __device__ Raw encode(float value) {
#if __CUDA_ARCH__ >= 800
    Raw raw;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(raw) : "f"(value));
    return raw;
#else
    const uint32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN
    return static_cast<Raw>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
  }

  static __device__ uint32 pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return encode(low) | static_cast<uint32>(encode(high)) << 16;
#endif
  }
};

// This is an unsigned float of 8 bits with 4 bits of exponent e, whose bias is 11, and 4 of mantissa m.
// Its value is 2^(e-11) * (1 + m/16); codes with e = 0 are subnormal.
struct E4M4 {
  using Raw = uint8;

  // The code is shifted into the exponent and mantissa of fp32, which serves subnormals too. The two
  // biases differ, so the result is too small by a factor of 2^(127-11).
  static __device__ float decode(Raw raw) {
    return __uint_as_float(static_cast<uint32>(raw) << 19) * 0x1p116f;
  }

  // Rounds to nearest even; what is too large becomes 255, the largest code.
  static __device__ Raw encode(float value) {
    if (value < 0x1p-10f) return static_cast<Raw>(__float2int_rn(value * 0x1p14f));
    const uint32 bits = __float_as_uint(value);
    const uint32 code = ((bits + 0x3ffffu + (bits >> 19 & 1u)) >> 19) - (116u << 4);
    return static_cast<Raw>(code < 255u ? code : 255u);
  }
};

// Numbers of eight bits are packed two at a time, into the lower half of a word.

// This is a float of 8 bits with a sign, 4 bits of exponent, whose bias is 7, and 3 of mantissa; it has no
// infinity, and what is too large becomes the largest, 448.
struct E4M3 {
  static __device__ uint32 pack(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return encode(low) | encode(high) << 8;
#endif
  }

  static __device__ uint32 encode(float value) {
    const uint32 bits = __float_as_uint(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fu;  // NaN
    if (magnitude < 121u << 23) return sign | __float2int_rn(__uint_as_float(magnitude) * 0x1p9f);  // subnormal
    const uint32 code = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) >> 20) - (120u << 3);
    return sign | (code < 0x7eu ? code : 0x7eu);
  }
};

// This is a signed integer of 8 bits. What is no number of them has no defined code.
struct Int8 {
  static __device__ uint32 pack(float low, float high) {
    return (__float2int_rn(low) & 0xff) | (__float2int_rn(high) & 0xff) << 8;
  }
};
