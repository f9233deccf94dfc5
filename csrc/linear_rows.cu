// Multiply a few rows with a packed weight of 16 codes, read once and never written as values:
// out[m, n] = sum over k of x[m, k] * codebook[code[n, k]] * scale[n, k / block] (+ bias[n]).
//
// A program takes 16 rows of the weight at a time (a tile), and of these 4096 columns (a stage). Stages
// are copied into a ring in shared memory, several ahead. Of a stage each of the 16 warps has a run of 256
// columns. A lane reads 8 bytes of a row, which are 16 neighbouring codes, and the four lanes of a quad
// have the 64 of a chunk together. What a lane decodes is at once its part of the first operand of
// mma.m16n8k16: a product sums over k, so any order of k serves as long as the rows of x, the second
// operand, are read in the same one. The sums of 64 products are scaled in fp32. At the end of a tile the
// warps' sums are added up in the order of the warps, so a result is the same every time and does not
// depend on the other rows of x.
//
// Two codes, a byte, are decoded by one look-up in a table of 256 pairs of values. Each lane has a copy of
// its own, in its own bank of shared memory, so that no two lanes wait for each other.

#include "numeric.cuh"

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kTile = 16;                    // rows of the weight
constexpr int kChunk = 64;                   // columns whose products are scaled together
constexpr int kRun = 4;                      // chunks of a warp
constexpr int kChunks = kWarps * kRun;       // of a stage
constexpr int kBytes = kChunks * kChunk / 2; // of a row in a stage
constexpr int kPitch = kBytes + 32;          // rows lie so far apart that four have all banks
constexpr int kScales = kChunks + 4;         // likewise, for the 16 bytes of a run's scales
constexpr int kEntry = 256;                  // bytes from one entry of the table, in 32 copies, to the next
constexpr int kTable = 256 * kEntry;
constexpr int kTokens = 8;                   // rows of x that one mma takes
constexpr int kMostHeld = 2;                 // as many of these stay in registers

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

// Copies 16 bytes to shared memory, or writes as many zeros.
__device__ inline void copy16(uint32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// A scale is absmax itself; or a code of a table, times the absmax of the 256 that share it, plus an offset.
struct Plain {
  using Raw = float;
  float raw[2];

  __device__ void load(int i, const Raw* absmax, const float*, uint32 block) { raw[i] = absmax[block]; }
  __device__ float decode(int i, const float*, float) const { return raw[i]; }
};

struct Nested {
  using Raw = uint8;
  Raw raw[2];
  float outer[2];

  __device__ void load(int i, const Raw* absmax, const float* nested_absmax, uint32 block) {
    raw[i] = absmax[block], outer[i] = nested_absmax[block >> 8];
  }
  __device__ float decode(int i, const float* table, float offset) const {
    return table[raw[i]] * outer[i] + offset;
  }
};

// `codes` are the 16 values as they are stored, four a word, and `factor` the bits of what fp32 products of
// theirs are multiplied with: arguments, so that no tensor has to live as long as what is launched again.
// x is aligned to 16 bytes, and so are its rows; k is a multiple of 64. A block has 2^shift chunks.
template <class Type, class Scale, int kTiles, int kDepth>
__global__ void __launch_bounds__(kThreads, 1)
    linear(const typename Type::Raw* x, const uint8* qweight, const typename Scale::Raw* absmax,
           const float* nested_codebook, const float* nested_absmax, const float* nested_offset,
           const typename Type::Raw* bias, typename Type::Raw* out, int64 n, int64 k, int64 m, int64 stride,
           int64 shift, int64 codes0, int64 codes1, int64 codes2, int64 codes3, int64 factor) {
  constexpr int kColumns = kTokens * kTiles;
  extern __shared__ char shared[];
  char* const ring = shared + kTable;                                               // [kDepth][kTile][kPitch]
  float* const scales = reinterpret_cast<float*>(ring + kDepth * kTile * kPitch);   // [2][kTile][kScales]
  float* const scale_table = scales + 2 * kTile * kScales;                          // [256]
  float* const sums = scale_table + 256;                                            // [kWarps][kTile][kColumns]

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane >> 2, member = lane & 3;
  const int chunks = static_cast<int>(k / kChunk), parts = (chunks + kChunks - 1) / kChunks;
  const int tiles = static_cast<int>((n + kTile - 1) / kTile);
  const int mine = tiles > blockIdx.x ? (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  const int stages = mine * parts;

  // A thread copies 16 bytes of every fourth row. Every stage has the same number of copies in flight
  // behind it, empty ones at the end.
  constexpr int kPieces = kBytes / 16, kApart = kThreads / kPieces;
  const int64 row_bytes = k / 2;
  const int at = threadIdx.x % kPieces * 16, top = threadIdx.x / kPieces;
  const uint8* source = qweight + (static_cast<int64>(blockIdx.x) * kTile + top) * row_bytes + at;
  const int64 next_tile = static_cast<int64>(gridDim.x) * kTile * row_bytes - static_cast<int64>(parts) * kBytes;
  const uint32 target = static_cast<uint32>(__cvta_generic_to_shared(ring)) + top * kPitch + at;
  int copied = 0, copy_part = 0, left = static_cast<int>(n) - blockIdx.x * kTile - top;
  uint32 slot = 0;
  const auto copy = [&] {
    if (copied < stages) {
      const int bytes = copy_part * kBytes + at < row_bytes ? 16 : 0;
#pragma unroll
      for (int i = 0; i < kTile / kApart; ++i)
        copy16(target + slot + i * kApart * kPitch, source + i * kApart * row_bytes, i * kApart < left ? bytes : 0);
      source += kBytes;
      if (++copy_part == parts) copy_part = 0, source += next_tile, left -= gridDim.x * kTile;
    }
    ++copied;
    slot = slot == (kDepth - 1) * kTile * kPitch ? 0 : slot + kTile * kPitch;
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int i = 0; i < kDepth - 1; ++i) copy();

  // A warp decodes the scales of one row of a stage, a lane two of them, one stage ahead.
  Scale ahead;
  int scale_part = 0, feature = blockIdx.x * kTile + warp;
  uint32 block = static_cast<uint32>(feature) * chunks + 2 * lane;  // in chunks
  bool inside[2];
  const auto load_scales = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      inside[i] = feature < n && scale_part * kChunks + 2 * lane + i < chunks;
      if (inside[i]) ahead.load(i, absmax, nested_absmax, (block + i) >> shift);
    }
    block += kChunks;
    if (++scale_part == parts)
      scale_part = 0, feature += gridDim.x * kTile, block += gridDim.x * kTile * chunks - parts * kChunks;
  };
  load_scales();

  // The copies of an entry are 128 bytes; a thread begins with another part of them than its neighbour.
  {
    const int entry = threadIdx.x / 2;
    const auto value = [&](int code) {
      const int64 four = code < 8 ? (code < 4 ? codes0 : codes1) : (code < 12 ? codes2 : codes3);
      return static_cast<uint32>(four >> 16 * (code & 3)) & 0xffffu;
    };
    const uint32 pair = value(entry >> 4) | value(entry & 15) << 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<uint4*>(shared + entry * kEntry + ((2 * i + threadIdx.x) & 7) * 16) =
          make_uint4(pair, pair, pair, pair);
  }
  if (nested_codebook != nullptr && threadIdx.x < 256) scale_table[threadIdx.x] = nested_codebook[threadIdx.x];
  const float offset = nested_offset != nullptr ? *nested_offset : 0.0f, stretch = __uint_as_float(static_cast<uint32>(factor));
  __syncthreads();
  const auto store_scales = [&](int stage) {
    float* const to = scales + ((stage & 1) * kTile + warp) * kScales + 2 * lane;
    float decoded[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) decoded[i] = inside[i] ? ahead.decode(i, scale_table, offset) : 0.0f;
    *reinterpret_cast<float2*>(to) = make_float2(decoded[0], decoded[1]);
  };
  store_scales(0);
  load_scales();

  // The address of an entry is its byte behind the lane's own, so one instruction makes it.
  const uint32 own = lane * 4;
  const auto pair = [&](uint32 word, int byte) {
    return *reinterpret_cast<const uint32*>(shared + __byte_perm(word, own, 0x5504u | byte << 4));
  };
  constexpr bool kHeld = kTiles <= kMostHeld;
  uint4 held[kHeld ? kRun : 1][kTiles][2];
  const auto tokens_of = [&](int chunk, int t, uint4 (&tokens)[2]) {
    const int token = t * kTokens + quad;
    tokens[0] = tokens[1] = make_uint4(0, 0, 0, 0);
    if (token < m && chunk < chunks) {
      const uint4* source = reinterpret_cast<const uint4*>(x + token * stride + chunk * kChunk + 16 * member);
      tokens[0] = __ldg(source), tokens[1] = __ldg(source + 1);
    }
  };

  int tile = blockIdx.x, part = 0, held_part = -1;
  float total[kTiles][4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    if (kHeld && held_part != part) {
#pragma unroll
      for (int c = 0; c < (kHeld ? kRun : 0); ++c)
#pragma unroll
        for (int t = 0; t < kTiles; ++t) tokens_of(part * kChunks + warp * kRun + c, t, held[c][t]);
      held_part = part;
    }
    asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 2) : "memory");
    __syncthreads();  // the stage is there, and nobody reads the one before
    copy();
    store_scales(stage + 1);
    load_scales();

    const char* const from = ring + stage % kDepth * (kTile * kPitch) + quad * kPitch + warp * (kRun * kChunk / 2) + 8 * member;
    const float* const scale = scales + ((stage & 1) * kTile + quad) * kScales + warp * kRun;
    const float4 low = *reinterpret_cast<const float4*>(scale), high = *reinterpret_cast<const float4*>(scale + 8 * kScales);
    const float factors[2][kRun] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
    for (int c = 0; c < kRun; ++c) {
      uint32 values[2][8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 words = *reinterpret_cast<const uint2*>(from + half * 8 * kPitch + c * (kChunk / 2));
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const uint32 word = w ? words.y : words.x;
#pragma unroll
          for (int byte = 0; byte < 4; ++byte) values[half][4 * w + byte] = pair(word, byte);
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        uint4 loaded[2];
        if (!kHeld) tokens_of(part * kChunks + warp * kRun + c, t, loaded);
        const uint4(&tokens)[2] = kHeld ? held[kHeld ? c : 0][t] : loaded;
        float sum[4] = {};
        multiply<Type>(sum, values[0][0], values[1][0], values[0][1], values[1][1], tokens[0].x, tokens[0].y);
        multiply<Type>(sum, values[0][2], values[1][2], values[0][3], values[1][3], tokens[0].z, tokens[0].w);
        multiply<Type>(sum, values[0][4], values[1][4], values[0][5], values[1][5], tokens[1].x, tokens[1].y);
        multiply<Type>(sum, values[0][6], values[1][6], values[0][7], values[1][7], tokens[1].z, tokens[1].w);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[t][i] = __fmaf_rn(sum[i], factors[i / 2][c], total[t][i]);
      }
    }
    if (++part < parts) continue;

    float* const to = sums + warp * kTile * kColumns;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[(quad + 8 * (i / 2)) * kColumns + t * kTokens + 2 * member + i % 2] = total[t][i];
        total[t][i] = 0;
      }
    __syncthreads();
    // What is added up here is written again behind the next stage's barrier.
    for (int i = threadIdx.x; i < kTile * kColumns; i += kThreads) {
      const int row = i % kTile, token = i / kTile;
      const int64 feature = static_cast<int64>(tile) * kTile + row;
      if (token < m && feature < n) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += sums[(w * kTile + row) * kColumns + token];
        sum *= stretch;
        if (bias != nullptr) sum += Type::decode(bias[feature]);
        out[token * n + feature] = Type::encode(sum);
      }
    }
    part = 0, tile += gridDim.x;
  }
}
