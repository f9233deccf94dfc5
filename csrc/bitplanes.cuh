// Bit planes and codes: transpositions, done among four lanes and inside a lane's registers.
//
// A block of 32 codes of K bits is K words: bit e of word p is bit p of code e. Four neighbouring
// lanes (a quad) work on four blocks: in memory, lane t owns the words of the t-th; in
// arithmetic, it owns elements 8t .. 8t+7 of all four, so that what it reads and what it writes are
// both contiguous. Every step below is its own inverse.

#pragma once

#include "numeric.cuh"

// Bits of a lane's word in which a code of K bits lies, once transposed.
template <int K>
constexpr int kField = K <= 2 ? 2 : K <= 4 ? 4 : 8;

// A 4 x 4 matrix of bytes, a row a lane, transposed among the lanes of a quad.
struct QuadTranspose {
  uint32 first, second;

  __device__ explicit QuadTranspose(int lane)
      : first(lane & 1 ? 0x3715u : 0x6240u), second(lane & 2 ? 0x3276u : 0x5410u) {}

  __device__ uint32 operator()(uint32 word) const {
    word = __byte_perm(word, __shfl_xor_sync(kWarp, word, 1), first);
    return __byte_perm(word, __shfl_xor_sync(kWarp, word, 2), second);
  }
};

// Exchange the bits of `a` outside of `kMask` with those of `b` that lie `kShift` lower.
template <int kShift, uint32 kMask>
__device__ void exchange(uint32& a, uint32& b) {
  const uint32 low = (a & kMask) | (b << kShift & ~kMask);
  b = (a >> kShift & kMask) | (b & ~kMask);
  a = low;
}

// kWords x kWords matrices of bits, a row a word, transposed: planes to fields of kWords bits. Field
// i of word r is then the code of element kWords * i + r.
template <int kWords>
__device__ void transpose_bits(uint32 (&words)[kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; w += 2) exchange<1, 0x55555555u>(words[w], words[w + 1]);
  if constexpr (kWords >= 4) {
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      if ((w & 2) == 0) exchange<2, 0x33333333u>(words[w], words[w + 2]);
  }
  if constexpr (kWords >= 8) {
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      if ((w & 4) == 0) exchange<4, 0x0f0f0f0fu>(words[w], words[w + 4]);
  }
}
