// Turn bit planes into codes and codes into bit planes, by transpositions among four lanes and inside
// the registers of one.
//
// A block of 32 codes of K bits is K words: bit e of word p is bit p of code e. Four neighbouring
// lanes (a quad) work on four blocks. Where words are loaded and stored, lane t has those of the t-th
// block. Where values are computed, it has the elements 8t to 8t + 7 of all four blocks. So both what
// it reads and what it writes are contiguous. Every step below is its own inverse.

#pragma once

#include "numeric.cuh"

// After the transposition, a code of K bits lies in a field of a lane's word that has this many bits.
template <int K>
constexpr int kField = K <= 2 ? 2 : K <= 4 ? 4 : 8;

// This transposes a 4 x 4 matrix of bytes, of which each lane of a quad holds a row.
struct QuadTranspose {
  uint32 first, second;

  __device__ explicit QuadTranspose(int lane)
      : first(lane & 1 ? 0x3715u : 0x6240u), second(lane & 2 ? 0x3276u : 0x5410u) {}

  __device__ uint32 operator()(uint32 word) const {
    word = __byte_perm(word, __shfl_xor_sync(kWarp, word, 1), first);
    return __byte_perm(word, __shfl_xor_sync(kWarp, word, 2), second);
  }
};

// Takes the bits of `kMask` from `a`, and the others from `b`: the compiler would need two instructions.
template <uint32 kMask>
__device__ uint32 choose(uint32 a, uint32 b) {
#ifdef __CUDA_ARCH__
  uint32 word;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(word) : "r"(a), "r"(b), "n"(kMask));
  return word;
#else
  return (a & kMask) | (b & ~kMask);
#endif
}

// Exchanges the bits of `a` outside of `kMask` with those bits of `b` that lie `kShift` lower.
template <int kShift, uint32 kMask>
__device__ void exchange(uint32& a, uint32& b) {
  const uint32 low = choose<kMask>(a, b << kShift);
  b = choose<kMask>(a >> kShift, b);
  a = low;
}

// Transposes matrices of kWords x kWords bits, of which each word holds one row. It turns planes into
// fields of kWords bits: field i of word r is then the code of element kWords * i + r.
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
