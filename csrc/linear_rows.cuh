// What the kernels for a few rows share, whatever the codes are: a program's way through tiles, and its results.
//
// Up to four weights of one width share a launch. A program takes one or two strips of 16 rows of a weight at a
// time (a tile), of which each of its 16 warps has some columns, and so much of a strip as is multiplied between
// two steps of the way is a stage. At the end of a tile the warps' sums are added up in the order of the warps,
// so a result is the same every time and does not depend on the other rows of x. A tile's rows of B come with
// its last codes.

#pragma once

#include "numeric.cuh"

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kStrip = 16;               // rows of the weight that an mma takes
constexpr int kLow = (64 << 10) - 1024;  // bytes in front of the look-up table; at most 1024 are the system's
constexpr int kTokens = 8;               // rows of x that one mma takes

template <class Type>
__device__ void multiply(float (&sum)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1);

template <>
__device__ void multiply<BFloat16>(float (&sum)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0,
                                   uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ void multiply<Float16>(float (&sum)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0,
                                  uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Copies 16 bytes to shared memory.
__device__ inline void copy16(uint32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copies the first `count` bytes of a word, and zeros for the rest.
__device__ inline void copy4(uint32 to, const void* from, int count) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(count) : "memory");
}

// Copies 16 bytes that lie beside other codes that are read soon.
__device__ inline void stream16(uint32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Waits for the thread's own copies.
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Programmatic dependent launch: a kernel may begin while the one before it in the stream runs, and waits
// for its results here. Nothing happens where a launch does not ask for it.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void launch_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

constexpr int kWeights = 4;  // at most, of a launch

struct Weight {
  const uint8* qweight;
  const void* absmax;
  const float *nested_codebook, *nested_absmax, *nested_offset;
  const void *bias, *lora_b;
  void* out;
};

// x and B are aligned to 16 bytes, and so are their rows.
struct Call {
  const void* x;
  const float* projected;  // [m, columns], of which weight i reads rank[i] from first[i] on
  Weight weights[kWeights];
  int64 n[kWeights], end[kWeights];  // rows, and tiles up to the last of each; those that are missing have none
  int64 first[kWeights], rank[kWeights], columns, wide, room;  // B is fp32 where `wide`; `room`: bytes of its longest row
  int64 k, m;
  int64 strips, sums, lora;  // where they are in shared memory, from the look-up table on
};

// Stages of a program in its order, `parts` to a tile of `kRows` rows. Of `paired` weights it takes the same tile
// of both, one after the other.
template <int kRows, bool kPaired>
struct Walk {
  int left, part = 0, tile = blockIdx.x, weight = 0, begin = 0, end, n;

  __device__ Walk(const Call& a, int stages) : left(stages), end(static_cast<int>(a.end[0])) {
    n = static_cast<int>(a.n[0]);
    settle(a);
  }
  __device__ void settle(const Call& a) {
    if (kPaired || tile < end) return;
    while (weight < kWeights - 1 && tile >= end) begin = end, end = static_cast<int>(a.end[++weight]);
    n = static_cast<int>(a.n[weight]);
  }
  // Whether the tile is done.
  __device__ bool next(const Call& a, int parts) {
    --left;
    if (++part < parts) return false;
    part = 0;
    if (kPaired) weight ^= 1;
    if (!kPaired || weight == 0) tile += gridDim.x;
    settle(a);
    return true;
  }
  // The first row of the tile in its weight.
  __device__ int row() const { return kRows * (tile - begin); }
};

__device__ inline float dot(const float4& a, float b0, float b1, float b2, float b3, float sum) {
  sum = __fmaf_rn(a.x, b0, sum), sum = __fmaf_rn(a.y, b1, sum);
  return __fmaf_rn(a.w, b3, __fmaf_rn(a.z, b2, sum));
}

// The products of a row of B, in shared memory, with what x was projected onto.
template <class Type>
__device__ float adapter(const char* b, const float* projected, int rank, bool wide) {
  float sum = 0;
  const float4* const from = reinterpret_cast<const float4*>(projected);
  if (wide) {
#pragma unroll 2
    for (int r = 0; r < rank / 4; ++r) {
      const float4 values = reinterpret_cast<const float4*>(b)[r];
      sum = dot(from[r], values.x, values.y, values.z, values.w, sum);
    }
  } else {
#pragma unroll 2
    for (int r = 0; r < rank / 8; ++r) {
      const uint4 words = reinterpret_cast<const uint4*>(b)[r];
      const auto low = [](uint32 word) { return Type::decode(static_cast<uint16>(word)); };
      const auto high = [](uint32 word) { return Type::decode(static_cast<uint16>(word >> 16)); };
      sum = dot(from[2 * r], low(words.x), high(words.x), low(words.y), high(words.y), sum);
      sum = dot(from[2 * r + 1], low(words.z), high(words.z), low(words.w), high(words.w), sum);
    }
  }
  return sum;
}

// A value of the look-up table, `kFrom` bytes from an address. The table is written anew behind barriers alone, and
// addresses come of codes that were waited for, so the compiler moves no look-up across that.
template <int kFrom = 0>
__device__ uint32 look_up(uint32 address) {
  uint32 value;
  asm("ld.shared.u32 %0, [%1+%2];" : "=r"(value) : "r"(address), "n"(kFrom));
  return value;
}

// Two values that lie beside each other.
__device__ inline uint2 look_up_two(uint32 address) {
  uint2 value;
  asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}

// Puts together four of the bytes of two words: a place from 8 on stands for the sign of a byte.
__device__ inline uint32 permute(uint32 low, uint32 high, uint32 places) {
  uint32 word;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(low), "r"(high), "r"(places));
  return word;
}

// Asks for the rows of B of a tile of `kRows` rows, of which the first of `n` is `tile`.
template <int kRows>
__device__ void copy_adapter(uint32 to, const Call& a, int which, int tile, int n) {
  const int length = static_cast<int>(a.rank[which]) * (a.wide ? 4 : 2), bytes = min(kRows, n - tile) * length;
  const char* const b = static_cast<const char*>(a.weights[which].lora_b) + static_cast<int64>(tile) * length;
#pragma unroll 1
  for (int i = threadIdx.x * 16; i < bytes; i += kThreads * 16) copy16(to + i, b + i);
}

// Sums [kWarps][m][kPitch] of the warps of a tile, in shared memory.
template <class Type, int kTiles, bool kGated, int kHeight>
struct Sums {
  static constexpr int kRows = kStrip * kHeight, kPitch = kRows + 4;

  // Puts what a lane has of those of its warp there, and begins anew: `to` is the first sum's place.
  static __device__ void put(float* to, int m, int member, float (&total)[kHeight][kTiles][4]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int token = t * kTokens + odd;
        if (token + 2 * member < m)
#pragma unroll
          for (int i = 0; i < 2 * kHeight; ++i) to[token * kPitch + 8 * i] = total[i / 2][t][i % 2 * 2 + odd];
      }
#pragma unroll
    for (int strip = 0; strip < kHeight; ++strip)
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[strip][t][i] = 0;
  }

  // Adds them up for the tile of weight `which` whose first row of `n` is `first`; `b`: its rows of B. Another
  // warp finishes each tile.
  static __device__ void finish(const Call& a, int which, int first, int n, const float* sums, const char* b, float stretch,
                                float& gate) {
    static_assert(kRows * kTiles * kTokens <= kThreads, "a thread has one result");
    const int m = static_cast<int>(a.m);
    const int result = (threadIdx.x + 2 * first) % kThreads, row = result % kRows, token = result / kRows;
    const float* const parts_of = sums + token * kPitch + row;
    const int feature = first + row;
    if (token >= m || feature >= n) return;
    const Weight& weight = a.weights[which];
    const int rank = static_cast<int>(a.rank[which]);
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += parts_of[w * m * kPitch];
    sum *= stretch;
    if (rank > 0)
      sum += adapter<Type>(b + row * rank * (a.wide ? 4 : 2), a.projected + token * a.columns + a.first[which], rank,
                           a.wide);
    using Raw = typename Type::Raw;
    if (weight.bias != nullptr) sum += Type::decode(static_cast<const Raw*>(weight.bias)[feature]);
    if (kGated && which == 0) {
      gate = sum / (1 + __expf(-sum));
    } else {
      if (kGated) sum *= gate;
      static_cast<Raw*>(weight.out)[static_cast<int64>(token) * n + feature] = Type::encode(sum);
    }
  }
};
