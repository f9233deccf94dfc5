// Vectors of float32 as wide as the processor's, and the look-up of 4-bit codes in a table of 16.
//
// One byte has two codes. `high` and `low` look up those of kLanes bytes, so that a vector has every
// other element of a row: what it is multiplied with is put into that order once. `low` of two tables
// looks up codes of up to 5 bits, which have a byte for themselves.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__)

#include <immintrin.h>
constexpr int kLanes = 16;
using Lanes = __m512;
using Bytes = __m512i;  // a byte in each lane
struct Table {
  __m512 values;
};
inline Lanes load(const float* p) { return _mm512_loadu_ps(p); }
inline Lanes splat(float value) { return _mm512_set1_ps(value); }
inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Lanes a) { return _mm512_reduce_add_ps(a); }
inline Table table(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Bytes load_bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// No mask: permutexvar reads four bits only.
inline Lanes low(Table t, Bytes b) { return _mm512_permutexvar_ps(b, t.values); }
inline Lanes low(Table t, Table more, Bytes b) {
  return _mm512_permutex2var_ps(t.values, b, more.values);
}
inline Lanes high(Table t, Bytes b) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(b, 4), t.values);
}
inline Table affine(Table t, Lanes scale, Lanes before, Lanes behind) {
  return {_mm512_add_ps(_mm512_mul_ps(_mm512_sub_ps(t.values, before), scale), behind)};
}
inline Table scaled(Table t, Lanes scale) { return {_mm512_mul_ps(t.values, scale)}; }

#elif defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>
constexpr int kLanes = 8;
using Lanes = __m256;
using Bytes = __m256i;
struct Table {
  __m256 values[2];
};
inline Lanes load(const float* p) { return _mm256_loadu_ps(p); }
inline Lanes splat(float value) { return _mm256_set1_ps(value); }
inline Lanes mul(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Lanes a) {
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
inline Table table(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
inline Bytes load_bytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
// permutevar8x32 reads three bits; the fourth, brought up to the sign, chooses the half.
inline Lanes halves(Table t, Bytes code, Bytes sign) {
  const Lanes first = _mm256_permutevar8x32_ps(t.values[0], code);
  const Lanes second = _mm256_permutevar8x32_ps(t.values[1], code);
  return _mm256_blendv_ps(first, second, _mm256_castsi256_ps(sign));
}
inline Lanes low(Table t, Bytes b) { return halves(t, b, _mm256_slli_epi32(b, 28)); }
inline Lanes low(Table t, Table more, Bytes b) {
  return _mm256_blendv_ps(low(t, b), low(more, b), _mm256_castsi256_ps(_mm256_slli_epi32(b, 27)));
}
inline Lanes high(Table t, Bytes b) {
  return halves(t, _mm256_srli_epi32(b, 4), _mm256_slli_epi32(b, 24));
}
inline Table affine(Table t, Lanes scale, Lanes before, Lanes behind) {
  for (Lanes& v : t.values)
    v = _mm256_add_ps(_mm256_mul_ps(_mm256_sub_ps(v, before), scale), behind);
  return t;
}
inline Table scaled(Table t, Lanes scale) {
  for (Lanes& v : t.values) v = _mm256_mul_ps(v, scale);
  return t;
}

#elif defined(__ARM_NEON) && defined(__aarch64__)

#include <arm_neon.h>
constexpr int kLanes = 4;
using Lanes = float32x4_t;
using Bytes = uint32x4_t;
struct Table {
  float32x4_t values[4];
};
inline Lanes load(const float* p) { return vld1q_f32(p); }
inline Lanes splat(float value) { return vdupq_n_f32(value); }
inline Lanes mul(Lanes a, Lanes b) { return vmulq_f32(a, b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return vfmaq_f32(c, a, b); }
inline float sum(Lanes a) { return vaddvq_f32(a); }
inline Table table(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
inline Bytes load_bytes(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word))));
}
// The table is 64 bytes: a value's are the four from four times its code on.
inline Lanes look_up(Table t, uint32x4_t code) {
  uint8x16x4_t bytes;
  for (int i = 0; i < 4; ++i) bytes.val[i] = vreinterpretq_u8_f32(t.values[i]);
  const uint32x4_t index = vmlaq_n_u32(vdupq_n_u32(0x03020100u), code, 0x04040404u);
  return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(index)));
}
inline Lanes low(Table t, Bytes b) { return look_up(t, vandq_u32(b, vdupq_n_u32(15))); }
inline Lanes low(Table t, Table more, Bytes b) {
  return vbslq_f32(vtstq_u32(b, vdupq_n_u32(16)), low(more, b), low(t, b));
}
inline Lanes high(Table t, Bytes b) { return look_up(t, vshrq_n_u32(b, 4)); }
inline Table affine(Table t, Lanes scale, Lanes before, Lanes behind) {
  for (Lanes& v : t.values) v = vaddq_f32(vmulq_f32(vsubq_f32(v, before), scale), behind);
  return t;
}
inline Table scaled(Table t, Lanes scale) {
  for (Lanes& v : t.values) v = vmulq_f32(v, scale);
  return t;
}

#else  // any processor: the compiler's vectors, and a table in memory

constexpr int kLanes = 4;
typedef float Lanes __attribute__((vector_size(16)));
struct Bytes {
  uint8_t of[kLanes];
};
struct Table {
  float values[16];
};
inline Lanes load(const float* p) {
  Lanes a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
inline Lanes splat(float value) { return Lanes{value, value, value, value}; }
inline Lanes mul(Lanes a, Lanes b) { return a * b; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return a * b + c; }
inline float sum(Lanes a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline Table table(const float* p) {
  Table t;
  std::memcpy(t.values, p, sizeof t.values);
  return t;
}
inline Bytes load_bytes(const uint8_t* p) {
  Bytes b;
  std::memcpy(b.of, p, kLanes);
  return b;
}
inline Lanes low(const Table& t, Bytes b) {
  return Lanes{t.values[b.of[0] & 15], t.values[b.of[1] & 15], t.values[b.of[2] & 15],
               t.values[b.of[3] & 15]};
}
inline Lanes low(const Table& t, const Table& more, Bytes b) {
  const Lanes first = low(t, b), second = low(more, b);
  Lanes found = first;
  for (int i = 0; i < kLanes; ++i) found[i] = b.of[i] & 16 ? second[i] : first[i];
  return found;
}
inline Lanes high(const Table& t, Bytes b) {
  return Lanes{t.values[b.of[0] >> 4], t.values[b.of[1] >> 4], t.values[b.of[2] >> 4],
               t.values[b.of[3] >> 4]};
}
inline Table affine(Table t, Lanes scale, Lanes before, Lanes behind) {
  for (float& v : t.values) v = (v - before[0]) * scale[0] + behind[0];
  return t;
}
inline Table scaled(Table t, Lanes scale) {
  for (float& v : t.values) v *= scale[0];
  return t;
}

#endif
