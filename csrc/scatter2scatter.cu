// Multiply rows with the packed weights of their experts, which are decoded inside the loop (Hopper).
//
//   out[row, feature] = sum_c x[row, c] W[e][feature, c]       forward:    c over K, features N
//   out[row, feature] = sum_c x[row, c] W[e][c, feature]       transposed: c over N, features K (dX)
//
// The weight is the left operand of wgmma, in registers. The warps that multiply decode it from nibbles or
// from bytes of e4m3, so no decoded weight exists in memory. Rows are the right operand; a producer warpgroup
// gathers them into swizzled shared memory. A tile is 128 features by up to kMaxRows rows of one expert
// (qfuse::tile_map), and its number of rows is rounded up to one of a few specializations. An adapter is
// one more stage, in which x is its projection onto the rank and W is the adapter's other factor.
//
// The codebook is held as bf16, as one plane of low bytes and one of high bytes, and prmt looks up four
// nibbles at a time. A scale is the sum of two bf16; the product with it is rounded once. The host writes
// scales in that form (kernels/expert_scales_triton.py), and stretches the codebook by the factor with which
// bf16 holds its values best (kernels/scatter2scatter_cuda.py). bf16 holds every e4m3 exactly.

#include "hopper.cuh"
#include "wgmma.cuh"

constexpr int kFeatures = 128;  // features of a tile; each consumer warpgroup has 64
constexpr int kDepth = 64;      // length of the sum in a stage
constexpr int kRowBytes = 128;  // bytes of a row of x in a stage

// What the codes are: two nibbles in a byte, of which the first is the high or the low one, or a byte each.
enum Codes { kHighFirst, kLowFirst, kE4M3 };

// A form of the kernel, and how it lays out shared memory. Of 64 elements of a row of the weight, each
// 64 / kScales_ share a scale.
template <bool kTransposed_, int kMaxRows_, int kStages_, int kScales_, Codes kCodes_>
struct Form {
  static constexpr bool kTransposed = kTransposed_;
  static constexpr Codes kCodes = kCodes_;
  static constexpr int kMaxRows = kMaxRows_, kStages = kStages_, kScales = kScales_;
  static constexpr int kX = kMaxRows * kRowBytes;
  // A stage has a part of so many packed rows, in chunks of 16 bytes. The pitch of a transposed one avoids
  // bank conflicts.
  static constexpr int kPerByte = kCodes == kE4M3 ? 1 : 2;
  static constexpr int kPackedRows = kTransposed ? kDepth : kFeatures;
  static constexpr int kChunks = (kTransposed ? kFeatures : kDepth) / kPerByte / 16;
  static constexpr int kPitch = kChunks * 16 + (kTransposed ? 16 : 0);
  static constexpr int kWeight = kPackedRows * kPitch;
  static constexpr int kScaleBytes = kScales * kFeatures * 4;
  static constexpr int kStage = (kX + kWeight + kScaleBytes + 1023) / 1024 * 1024;
  static constexpr int kOut = kStages * kStage;
  static constexpr int kBarriers = kOut + 2 * kMaxRows * kRowBytes;
};

struct Problem {
  const uint8* x;         // bf16 rows
  const uint8* qweight;   // [E, N, K / 2], or [E, N, K] of bytes
  const uint32* scales;   // [E, K * kScales / 64, N], bf16 pairs
  const uint8* xa;        // bf16 [slots, rank], or null
  const uint16* lora;     // bf16 [E, N, rank], or [E, rank, K] where transposed
  const uint16* bias;     // bf16 [E, features], or null
  uint8* out;             // bf16 rows of `features`
  const int64* order;     // the slot of each grouped row
  const int4* tiles;      // how many there are, then expert, first row and rows of each (qfuse::tile_map)
  int n, k, rank;
  int top_k;  // the row of x is slot / top_k, where slots * top_k < 2^32; 0 where x is in grouped order
};

// This is a position in the ring of stages. The phase flips with each round, as that of barriers does.
struct Ring {
  int stage = 0;
  uint32 phase = 0;

  template <int kStages>
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ uint32 permute(uint32 a, uint32 b, uint32 selector) {
  uint32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float unpack(uint16 x) { return __uint_as_float(static_cast<uint32>(x) << 16); }

// The scales of two elements: each is the sum of two bf16, of which `high` is nearly all.
struct Scales {
  uint32 high, low;
};

// Returns v * (high + low), rounded to bf16 once. Before that, only the small product v * low is rounded.
__device__ __forceinline__ uint32 scale(uint32 v, const Scales& s) {
  uint32 small, d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(small) : "r"(v), "r"(s.low));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(v), "r"(s.high), "r"(small));
  return d;
}

// Returns the two e4m3 in the upper bytes of the halves of `codes` as bf16. Their exponent and mantissa, put
// where bf16 has its own, are 2^-120 of the number, also where it is subnormal. Codes above the largest number
// are NaN.
__device__ __forceinline__ uint32 from_e4m3(uint32 codes) {
  const uint32 magnitude = codes >> 4 & 0x07f007f0, tiny = (codes & 0x80008000) | magnitude;
  const uint32 largest = 0x07e007e0, factor = 0x7b807b80;  // 2^120
  uint32 nan, d;
  asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(nan) : "r"(magnitude), "r"(largest));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(tiny), "r"(factor), "r"(nan));
  return d;
}

// Returns where a stage holds a chunk of a packed row. Chunks of bytes change places, unless transposed, so that
// the 16 words that a warp reads of 8 rows lie in different banks.
template <class F>
__device__ __forceinline__ uint32 packed_chunk(int row, int chunk) {
  constexpr bool kSwizzled = F::kCodes == kE4M3 && !F::kTransposed;
  return (kSwizzled ? row ^ (row >> 3 & 1) : row) * F::kPitch + ((kSwizzled ? chunk ^ (row >> 1 & 3) : chunk) << 4);
}

struct Codebook {
  uint32 planes[8];  // the low bytes of the 16 entries in four words, then their high bytes

  // Finds the low and the high bytes of the four entries that the nibbles in the low half of `codes` name.
  __device__ __forceinline__ void look_up(uint32 codes, uint32& low, uint32& high) const {
    const uint32 index = codes & 0x7777;
    const uint32 upper = permute(codes << 4, codes, 0xD9C8);  // bit 3 of each nibble, spread over a byte
    low = blend(upper, permute(planes[2], planes[3], index), permute(planes[0], planes[1], index));
    high = blend(upper, permute(planes[6], planes[7], index), permute(planes[4], planes[5], index));
  }

 private:
  static __device__ __forceinline__ uint32 blend(uint32 mask, uint32 a, uint32 b) {
    return (a & mask) | (b & ~mask);
  }
};

// Loads a word here: the compiler may not move this load down to where its result is used.
__device__ __forceinline__ uint32 load_low_word(const int64* from) {
  uint32 d;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(d) : "l"(from));
  return d;
}

// Loads the expert, the first row and the number of rows of tile t. Groups of `blocks` tiles, each with
// other features, have the same. A tile behind the last one has no rows.
__device__ __forceinline__ int4 load_tile(const Problem& p, int t, int total, int blocks) {
  int4 d{0, 0, 0, 0};
  if (t < total)
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
                 : "l"(p.tiles + 1 + t / blocks));
  return d;
}

// Returns x, though the compiler cannot know that. So it computes here what follows from it, and not
// ahead of a loop that has no register left to keep it in.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// --- the producer: 128 threads that copy -------------------------------------------------------------

template <class F>
__device__ void produce(const Problem& p, int total, int blocks, uint32 shared, int thread) {
  constexpr bool kTransposed = F::kTransposed;
  constexpr int kMaxRows = F::kMaxRows, kStages = F::kStages, kScales = F::kScales;
  const uint32 full = shared + F::kBarriers, empty = full + 8 * kStages;
  const int chunk = thread & 7, row0 = thread >> 3;  // the thread copies 16 bytes of every 16th row of x
  const int depth = kTransposed ? p.n : p.k;
  const int steps = depth / kDepth, scale_blocks = p.k / kDepth * kScales;
  const int64 pitch = p.k / F::kPerByte;
  constexpr int kChunks = F::kChunks, kAtOnce = 128 / kChunks, kCopies = F::kPackedRows / kAtOnce;
  const int own = thread % kChunks, packed0 = thread / kChunks;
  // The high word of slot * reciprocal is slot / top_k, exactly for slots below 2^32 / top_k.
  const uint32 reciprocal = p.top_k > 1 ? 0xffffffffu / p.top_k + 1 : 0;
  // A warp needs the slots of 4 rows of every 16. Each of its threads loads one or two of them, and
  // shuffles hand them on.
  constexpr int kOwn = (kMaxRows + 127) / 128;
  const int own0 = (thread >> 5) * 4 + (thread & 3) + (thread & 28) * 4;
  const auto slots_of = [&](const int4& tile, uint32(&slots)[kOwn]) {
#pragma unroll
    for (int h = 0; h < kOwn; h++) {
      const int row = tile.y + min(own0 + 128 * h, tile.z - 1);  // behind the last row, that row again
      slots[h] = p.top_k && tile.z ? load_low_word(p.order + row) : row;
    }
  };
  // A tile is loaded two tiles before its data is copied, and its slots one tile before, so that nothing
  // waits for either.
  int4 tile = load_tile(p, blockIdx.x, total, blocks);
  int4 next = load_tile(p, blockIdx.x + gridDim.x, total, blocks);
  uint32 slots[kOwn];
  slots_of(tile, slots);
  Ring ring;
  for (int t = blockIdx.x; t < total; t += gridDim.x) {
    const int feature0 = t % blocks * kFeatures;
    const int passes = (tile.z + 15) / 16;
    int source[kMaxRows / 16];
#pragma unroll
    for (int h = 0; h < kOwn; h++) slots[h] = reciprocal ? __umulhi(slots[h], reciprocal) : slots[h];
#pragma unroll
    for (int j = 0; j < kMaxRows / 16; j++)
      source[j] = __shfl_sync(0xffffffffu, slots[j / 8], j % 8 * 4 + (thread >> 3 & 3));
    slots_of(next, slots);
    const int4 later = load_tile(p, t + 2 * gridDim.x, total, blocks);
    const uint8* weight[kCopies];
    const uint32* scales;
    // A thread copies a chunk of each kAtOnce-th packed row, and the first 32 * kScales threads four scales,
    // of four rows that share a block.
    if (!kTransposed) {
      for (int h = 0; h < kCopies; h++) {
        const int row = min(feature0 + packed0 + kAtOnce * h, p.n - 1);
        weight[h] = p.qweight + (static_cast<int64>(tile.x) * p.n + row) * pitch + own * 16;
      }
      const int row = min(feature0 + (thread & 31) * 4, p.n - 4);
      scales = p.scales + (static_cast<int64>(tile.x) * scale_blocks + (thread >> 5)) * p.n + row;
    } else {
      const int column = min(feature0 / F::kPerByte + own * 16, p.k / F::kPerByte - 16);
      for (int h = 0; h < kCopies; h++)
        weight[h] = p.qweight + (static_cast<int64>(tile.x) * p.n + packed0 + kAtOnce * h) * pitch + column;
      const int block = min(feature0 / kDepth * kScales + (thread >> 4), scale_blocks - 1);
      scales = p.scales + (static_cast<int64>(tile.x) * scale_blocks + block) * p.n + (thread & 15) * 4;
    }
    const int64 weight_step = kTransposed ? kDepth * pitch : kDepth / F::kPerByte;
    const int64 scale_step = kTransposed ? kDepth : static_cast<int64>(kScales) * p.n;
    for (int step = 0; step < steps + (p.xa != nullptr); step++) {
      barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
      const uint32 stage = shared + ring.stage * F::kStage;
      const uint32 to = stage + row0 * kRowBytes + ((chunk ^ (row0 & 7)) << 4);
      if (step < steps) {
        const uint8* column = p.x + static_cast<int64>(step) * kRowBytes + chunk * 16;
#pragma unroll
        for (int j = 0; j < kMaxRows / 16; j++)
          if (j < passes) copy16(to + j * 16 * kRowBytes, column + static_cast<int64>(source[j]) * depth * 2);
#pragma unroll
        for (int h = 0; h < kCopies; h++) {
          copy16(stage + F::kX + packed_chunk<F>(packed0 + kAtOnce * h, own), weight[h]);
          weight[h] += weight_step;
        }
        if (thread < 32 * kScales) copy16(stage + F::kX + F::kWeight + thread * 16, scales);
        scales += scale_step;
      } else {  // the stage of the adapter has zeros behind its rank
#pragma unroll 1
        for (int j = 0; j < passes; j++) {
          const int64 row = tile.y + min(row0 + 16 * j, tile.z - 1);
          const bool real = chunk * 8 < p.rank;
          copy16(to + j * 16 * kRowBytes, p.xa + (row * p.rank + (real ? chunk * 8 : 0)) * 2, real ? 16 : 0);
        }
      }
      copies_arrive(full + ring.stage * 8);
      ring.next<kStages>();
    }
    tile = next;
    next = later;
  }
}

// --- the consumers: two warpgroups that decode and multiply ------------------------------------------

// The two warpgroups take turns to issue their products. A warp that multiplies from registers is held up
// until the tensor cores have taken them. Without turns, both would multiply at the same time, then both
// decode at the same time, and leave the tensor cores idle. Narrow tiles wait for weights, not for tensor
// cores, and take no turns.
template <int kMaxRows>
constexpr bool kTurns = kMaxRows > 64;

// Rows g and g + 8 of the 16 rows that a warp has of the left operand are the neighbouring features 2g and
// 2g + 1. One byte of a transposed weight holds both, and so does one word of the output.
struct Place {
  int warpgroup, warp, g, q;

  __device__ explicit Place(int thread)
      : warpgroup(thread >> 7), warp(thread >> 5 & 3), g((thread & 31) >> 2), q(thread & 3) {}
  __device__ __forceinline__ int feature() const { return warpgroup * 64 + warp * 16 + 2 * g; }
};

// Returns the scale of the i-th 16 elements of a feature, twice.
template <class F>
__device__ __forceinline__ Scales of_feature(const uint32* scales, int i, int feature) {
  const uint32 s = scales[i * F::kScales / 4 * kFeatures + feature];
  return {permute(s, s, 0x1010), permute(s, s, 0x3232)};
}

// Returns those of rows n and n + 1 of a transposed stage, for the features of the warp.
template <class F>
__device__ __forceinline__ Scales of_rows(const uint32* scales, const Place& at, int n) {
  const uint32* of_block = scales + (at.warpgroup * F::kScales + at.warp * F::kScales / 4) * kDepth;
  const uint2 s = *reinterpret_cast<const uint2*>(of_block + n);
  return {permute(s.x, s.y, 0x5410), permute(s.x, s.y, 0x7632)};
}

// Decodes features 2g and 2g + 1 of a stage of the weight. They become the left operands of four wgmmas,
// of which the i-th begins at a[4 * i].
template <class F>
__device__ __forceinline__ void decode_nibbles(const Codebook& codebook, const uint8* weight, const uint32* scales,
                                               const Place& at, uint32 (&a)[16]) {
  // They join the bytes of the first and of the second element of each of two packed bytes, or of both
  // elements of one.
  constexpr bool kLow = F::kCodes == kLowFirst;
  constexpr uint32 kFirsts = kLow ? 0x6240 : 0x7351, kSeconds = kLow ? 0x7351 : 0x6240;
  constexpr uint32 kByte0 = kLow ? 0x5140 : 0x4051, kByte1 = kLow ? 0x7362 : 0x6273;
  uint32 low, high;
  if (!F::kTransposed) {
    const uint32 own = at.q | (4 + at.q) << 4;  // selects byte q of two words: elements 2q and 2q + 1 of 8
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const uint4* words = reinterpret_cast<const uint4*>(weight + (at.feature() + row) * (kDepth / 2));
      const uint4 u = words[0], v = words[1];
      const uint32 codes[4] = {permute(u.x, u.y, own), permute(u.z, u.w, own), permute(v.x, v.y, own),
                               permute(v.z, v.w, own)};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const Scales s = of_feature<F>(scales, i, at.feature() + row);
        codebook.look_up(codes[i], low, high);
        a[4 * i + row] = scale(permute(low, high, kByte0), s);
        a[4 * i + row + 2] = scale(permute(low, high, kByte1), s);
      }
    }
  } else {
    const uint8* bytes = weight + at.warpgroup * 32 + at.warp * 8 + at.g;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int n = i * 16 + half * 8 + 2 * at.q;
        const uint32 codes = bytes[n * F::kPitch] | static_cast<uint32>(bytes[(n + 1) * F::kPitch]) << 8;
        const Scales s = of_rows<F>(scales, at, n);
        codebook.look_up(codes, low, high);
        a[4 * i + 2 * half] = scale(permute(low, high, kFirsts), s);
        a[4 * i + 2 * half + 1] = scale(permute(low, high, kSeconds), s);
      }
  }
}

// Does the same where codes are bytes of e4m3.
template <class F>
__device__ __forceinline__ void decode_bytes(const uint8* weight, const uint32* scales, const Place& at,
                                             uint32 (&a)[16]) {
  if (!F::kTransposed) {
    // Of 8 elements in a row, bytes 2q and 2q + 1 are those of one word; a half each.
    const uint32 own = at.q & 1 ? 0x3424 : 0x1404;
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const int feature = at.feature() + row;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const Scales s = of_feature<F>(scales, i, feature);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint8* from = weight + packed_chunk<F>(feature, i) + half * 8 + (at.q >> 1) * 4;
          const uint32 codes = permute(*reinterpret_cast<const uint32*>(from), 0, own);
          a[4 * i + 2 * half + row] = scale(from_e4m3(codes), s);
        }
      }
    }
  } else {
    const uint8* bytes = weight + at.feature();
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int n = i * 16 + half * 8 + 2 * at.q;
        const uint32 upper = *reinterpret_cast<const uint16*>(bytes + n * F::kPitch);
        const uint32 lower = *reinterpret_cast<const uint16*>(bytes + (n + 1) * F::kPitch);
        const Scales s = of_rows<F>(scales, at, n);
        a[4 * i + 2 * half] = scale(from_e4m3(permute(upper, lower, 0x4202)), s);
        a[4 * i + 2 * half + 1] = scale(from_e4m3(permute(upper, lower, 0x5212)), s);
      }
  }
}

template <class F>
__device__ __forceinline__ void decode(const Codebook& codebook, const uint8* weight, const uint32* scales,
                                       const Place& at, uint32 (&a)[16]) {
  if constexpr (F::kCodes == kE4M3)
    decode_bytes<F>(weight, scales, at, a);
  else
    decode_nibbles<F>(codebook, weight, scales, at, a);
}

// Loads the adapter's other factor as the left operand. It comes from global memory, once for each tile.
template <bool kTransposed>
__device__ __forceinline__ void load_adapter(const Problem& p, int expert, int feature0, const Place& at,
                                             uint32 (&a)[16]) {
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int row = 0; row < 2; row++) {
        const int r = i * 16 + half * 8 + 2 * at.q;
        uint32 value = 0;
        if (r < p.rank) {
          if (!kTransposed) {
            const int feature = min(feature0 + at.feature() + row, p.n - 1);
            value = *reinterpret_cast<const uint32*>(
                p.lora + (static_cast<int64>(expert) * p.n + feature) * p.rank + r);
          } else {
            const int feature = min(feature0 + at.feature() + row, p.k - 1);
            const uint16* from = p.lora + (static_cast<int64>(expert) * p.rank + r) * p.k + feature;
            value = from[0] | static_cast<uint32>(from[p.k]) << 16;
          }
        }
        a[4 * i + 2 * half + row] = value;
      }
}

template <class F, int kRows>
__device__ void consume(const Problem& p, const Codebook& codebook, const uint8* memory, uint32 shared, Ring& ring,
                        int4& tile, int t, int tiles, int blocks, int thread) {
  constexpr bool kTransposed = F::kTransposed;
  constexpr int kMaxRows = F::kMaxRows, kStages = F::kStages;
  const uint32 full = shared + F::kBarriers, empty = full + 8 * kStages;
  const Place at(thread);
  const int feature0 = t % blocks * kFeatures;
  const int features = kTransposed ? p.k : p.n;
  const int steps = (kTransposed ? p.n : p.k) / kDepth;
  const int total = steps + (p.xa != nullptr);
  float sum[kRows / 2];
#pragma unroll
  for (int i = 0; i < kRows / 2; i++) sum[i] = 0.f;

  const auto load = [&](int step, const Ring& from, uint32(&a)[16]) {
    barrier_wait(full + from.stage * 8, from.phase);
    fence_async();
    const uint8* weight = memory + from.stage * F::kStage + F::kX;
    if (step < steps)
      decode<F>(codebook, weight, reinterpret_cast<const uint32*>(weight + F::kWeight), at, a);
    else
      load_adapter<kTransposed>(p, tile.x, feature0, Place(opaque(thread)), a);
  };
  // While the products of one stage run, the next stage is decoded.
  const auto advance = [&](int step, const uint32(&now)[16], uint32(&later)[16]) {
    const uint64 x = swizzled_operand(shared + ring.stage * F::kStage);
    if (kTurns<kMaxRows>) turn_wait(at.warpgroup);
    wgmma_fence();
    // This loop has no condition: with one, the compiler would make each product wait for the one before.
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma<kRows>(sum, now + 4 * i, x + 2 * i);
    wgmma_commit();
    if (kTurns<kMaxRows>) turn_give(1 - at.warpgroup);
    Ring ahead = ring;
    ahead.next<kStages>();
    if (step + 1 < total) load(step + 1, ahead, later);
    wgmma_wait();
    if ((thread & 31) == 0) barrier_arrive(empty + ring.stage * 8);
    ring = ahead;
  };
  uint32 even[16], odd[16];
  load(0, ring, even);
  for (int step = 0; step < total; step += 2) {
    advance(step, even, odd);
    if (step + 1 < total) advance(step + 1, odd, even);
  }

  const int4 next = load_tile(p, t + gridDim.x, tiles, blocks);
  thread = opaque(thread);
  // The place is computed anew, so that what only storing needs takes no register in the loop. The result
  // goes through shared memory, so that 64 features of a row are stored as 128 consecutive bytes.
  const Place late(thread);
  const uint32 out = shared + F::kOut + late.warpgroup * kMaxRows * kRowBytes;
  float bias[2] = {0.f, 0.f};
  if (p.bias)
    for (int h = 0; h < 2; h++)
      bias[h] = unpack(p.bias[static_cast<int64>(tile.x) * features + min(feature0 + late.feature() + h, features - 1)]);
  warpgroup_sync(late.warpgroup);  // until all have read the previous tile from there
#pragma unroll
  for (int j = 0; j < kRows / 8; j++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = j * 8 + 2 * late.q + h, byte = late.warp * 32 + late.g * 4;
      const uint32 word = pack(sum[4 * j + h] + bias[0], sum[4 * j + 2 + h] + bias[1]);
      const uint32 to = out + row * kRowBytes + (((byte >> 4) ^ (row & 7)) << 4) + (byte & 15);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
    }
  warpgroup_sync(late.warpgroup);
  const int chunk = thread & 7, column = feature0 + late.warpgroup * 64 + chunk * 8;
  for (int row = (thread & 127) >> 3; row < tile.z; row += 16) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(out + row * kRowBytes + ((chunk ^ (row & 7)) << 4))
                 : "memory");
    const int64 to = tile.y + row;
    if (column < features) *reinterpret_cast<uint4*>(p.out + (to * features + column) * 2) = v;
  }
  tile = next;
}

// A multiprocessor runs kCtas programs of 384 threads: one where tiles are wide, two where they are narrow.
template <bool kTransposed, int kMaxRows, int kStages, int kCtas, int kScales, Codes kCodes>
__global__ void __launch_bounds__(384, kCtas)
    scatter2scatter(const uint8* x, const uint8* qweight, const uint32* scales, const uint8* xa, const uint16* lora,
                    const uint16* bias, uint8* out, const int64* order, const int4* tiles,
                    const uint32* codebook_planes, int64 n, int64 k, int64 rank, int64 top_k) {
  using F = Form<kTransposed, kMaxRows, kStages, kScales, kCodes>;
  extern __shared__ uint8 raw[];
  const uint32 shared = (shared_address(raw) + 1023) & ~1023u;
  const uint32 full = shared + F::kBarriers, empty = full + 8 * kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      barrier_init(full + i * 8, 128);  // every thread of the producer arrives
      barrier_init(empty + i * 8, 8);   // one thread of every consumer warp arrives
    }
    barrier_init_done();
  }
  __syncthreads();
  const Problem p{x,     qweight,
                  scales, xa,
                  lora,   bias,
                  out,    order,
                  tiles,  static_cast<int>(n),
                  static_cast<int>(k), static_cast<int>(rank), static_cast<int>(top_k)};
  const int blocks = ((kTransposed ? p.k : p.n) + kFeatures - 1) / kFeatures;
  const int total = tiles->x * blocks;
  if (threadIdx.x >= 256) {
    give_registers<kCtas == 1 ? 72 : 48>();
    produce<F>(p, total, blocks, shared, threadIdx.x - 256);
    return;
  }
  take_registers<kCtas == 1 ? 216 : 96>();
  Codebook codebook;
  // The planes come from a lane that the compiler cannot know to be the same for all threads. Otherwise it
  // would keep half of them in uniform registers, which prmt cannot read, and copy them at each look-up.
  if constexpr (kCodes != kE4M3) {
    const uint32 own = codebook_planes[threadIdx.x & 7];
    for (int i = 0; i < 8; i++) codebook.planes[i] = __shfl_sync(0xffffffffu, own, i + (threadIdx.x & 96));
  }
  const uint8* memory = raw + (shared - shared_address(raw));
  if (kTurns<kMaxRows> && threadIdx.x >= 128) turn_give(0);  // warpgroup 0 has the first turn
  Ring ring;
  int4 tile = load_tile(p, blockIdx.x, total, blocks);
  for (int t = blockIdx.x; t < total; t += gridDim.x) {
#define QFUSE_WIDTH(kRows)                                                                                \
  if constexpr (kRows <= kMaxRows)                                                                        \
    if (tile.z <= kRows) {                                                                                \
      consume<F, kRows>(p, codebook, memory, shared, ring, tile, t, total, blocks, threadIdx.x);          \
      continue;                                                                                           \
    }
    QFUSE_WIDTH(16)
    QFUSE_WIDTH(32)
    QFUSE_WIDTH(64)
    QFUSE_WIDTH(96)
    QFUSE_WIDTH(128)
    QFUSE_WIDTH(160)
    QFUSE_WIDTH(192)
    QFUSE_WIDTH(224)
    QFUSE_WIDTH(256)
#undef QFUSE_WIDTH
  }
}
