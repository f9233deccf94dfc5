// Multiply a few rows with packed weights of 16 codes, read once and never written as values:
// out[m, n] = sum over k of x[m, k] * codebook[code[n, k]] * scale[n, k / block] (+ bias[n])
//             (+ sum over r of projected[m, r] * B[n, r]).
//
// Up to four weights of one width share a launch. `project` computes what their adapters project x onto.
//
// A program takes 16 rows of a weight at a time (a tile), and of these 4096 columns (a stage), of which
// each of the 16 warps has a run of 256. Codes are read into registers, where the next stage of a warp is on
// its way while one is decoded: no warp waits for another before the end of a tile. A lane has 8 bytes of
// each row of a chunk, which are 16 neighbouring codes, and the four lanes of a quad have its 64 together.
// What a lane decodes is at once its part of the first operand of mma.m16n8k16: a product sums over k, so
// any order of k serves as long as the rows of x, the second operand, are read in the same one.
// The sums of 64 products are scaled in fp32. At the end of a tile the warps' sums are added up in the
// order of the warps, so a result is the same every time and does not depend on the other rows of x. A
// tile's rows of B are copied to shared memory during the tile before.
//
// Two codes, a byte, are decoded by one look-up in a table of 256 pairs of values. Each lane has a copy of
// its own, in its own bank of shared memory, so that no two lanes wait for each other.
//
// A ring of up to four stages in shared memory, filled by bulk copies, was slower for each shape and number
// of rows (benchmarks/results/rows-h100.json).

#include "numeric.cuh"

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kTile = 16;                    // rows of the weight
constexpr int kChunk = 64;                   // columns whose products are scaled together
constexpr int kRun = 4;                      // chunks of a warp
constexpr int kChunks = kWarps * kRun;       // of a stage
constexpr int kPitch = kTile + 4;            // sums of a token lie so far apart that lanes write to all banks
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

// Copies 16 bytes to shared memory.
__device__ inline void copy16(uint32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
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

// x and B are aligned to 16 bytes, and so are their rows; k is a multiple of 64. A block has 2^shift chunks.
// `codes` are the 16 values as they are stored, four a word, and `factor` the bits of what fp32 products of
// theirs are multiplied with: arguments, so that no tensor has to live as long as what is launched again.
struct Arguments {
  const void* x;
  const float* projected;  // [m, columns], of which weight i reads rank[i] from first[i] on
  Weight weights[kWeights];
  int64 n[kWeights], end[kWeights];  // rows, and tiles up to the last of each; those that are missing have none
  int64 first[kWeights], rank[kWeights], columns, wide, room;  // B is fp32 where `wide`; `room`: bytes of its longest row
  int64 k, m, shift, codes[4], factor;
};

// Tiles of a program in its order. Of `paired` weights it takes the same tile of both, one after the other.
template <bool kPaired>
struct Walk {
  int tile = blockIdx.x, weight = 0;

  __device__ void settle(const Arguments& a) {
    if (!kPaired)
      while (weight < kWeights - 1 && tile >= a.end[weight]) ++weight;
  }
  __device__ void next(const Arguments& a) {
    if (kPaired) weight ^= 1;
    if (!kPaired || weight == 0) tile += gridDim.x;
    settle(a);
  }
  // The first row of the tile in its weight.
  __device__ int row(const Arguments& a) const {
    return kTile * (kPaired || weight == 0 ? tile : tile - static_cast<int>(a.end[weight - 1]));
  }
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

// Reads 16 bytes of what nobody reads again, or makes zeros.
__device__ inline uint4 stream16(const void* from, bool there) {
  uint4 words = make_uint4(0, 0, 0, 0);
  if (there)
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
  return words;
}

// The quarter of each chunk that a lane of a quad has.
__device__ inline int quarter(int member) { return (member & 1) * 2 + (member >> 1); }

// A quad's lanes have read the halves of two chunks, one after the other, 16 bytes each: a load of the
// device's memory takes time for each line it touches, so few wide ones are better. Gives every lane its
// quarter of both.
__device__ inline void trade(const uint4& read, bool second, uint2 (&words)[2]) {
  const uint32 x = __shfl_xor_sync(kWarp, second ? read.x : read.z, 2);
  const uint32 y = __shfl_xor_sync(kWarp, second ? read.y : read.w, 2);
  words[0] = second ? make_uint2(x, y) : make_uint2(read.x, read.y);
  words[1] = second ? make_uint2(read.z, read.w) : make_uint2(x, y);
}

// Where `kGated`, there are two weights of one shape, and out is silu(first) * second.
template <class Type, class Scale, int kTiles, bool kGated>
__global__ void __launch_bounds__(kThreads, 1) linear(const __grid_constant__ Arguments a) {
  constexpr int kColumns = kTokens * kTiles;
  extern __shared__ char shared[];
  float* const scale_tables = reinterpret_cast<float*>(shared + kTable);             // [kWeights][256]
  float* const offsets = scale_tables + kWeights * 256;                              // [kWeights]
  float* const sums = offsets + kWeights;                                            // [2][kWarps][kColumns][kPitch]
  char* const lora = reinterpret_cast<char*>(sums + 2 * kWarps * kColumns * kPitch);  // [2][kTile][room]

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane >> 2, member = lane & 3;
  const int m = static_cast<int>(a.m), chunks = static_cast<int>(a.k / kChunk), parts = (chunks + kChunks - 1) / kChunks;
  const int tiles = static_cast<int>(a.end[kGated ? 0 : kWeights - 1]);
  const int mine = tiles > blockIdx.x ? (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  const int turns = mine * (kGated ? 2 : 1), stages = turns * parts;

  // The codes of the next stage, and its scales: a lane loads those of its quad's two rows for one chunk.
  Walk<kGated> reading;
  reading.settle(a);
  uint4 codes[kRun / 2][2];
  Scale scales;
  int of;
  bool inside[2];
  const int64 row_bytes = a.k / 2;
  int read = 0, read_part = 0;
  const uint8* source;
  int rows_left, chunks_left;
  const auto aim = [&] {
    of = reading.weight;
    const Weight& weight = a.weights[of];
    const int feature = reading.row(a) + quad, chunk = read_part * kChunks + warp * kRun;
    rows_left = read < stages ? static_cast<int>(a.n[of]) - feature : 0;
    chunks_left = chunks - chunk;
    source = weight.qweight + feature * row_bytes + chunk * (kChunk / 2) + 16 * member;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      inside[i] = 8 * i < rows_left && member < chunks_left;
      const uint32 block = static_cast<uint32>(feature + 8 * i) * chunks + chunk + member;
      if (inside[i])
        scales.load(i, static_cast<const typename Scale::Raw*>(weight.absmax), weight.nested_absmax, block >> a.shift);
    }
    ++read;
    if (++read_part == parts) read_part = 0, reading.next(a);
  };
  const auto fetch = [&](int pair) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      codes[pair][i] = stream16(source + i * 8 * row_bytes + pair * kChunk, 8 * i < rows_left && 2 * pair + member / 2 < chunks_left);
  };
  aim();
#pragma unroll
  for (int pair = 0; pair < kRun / 2; ++pair) fetch(pair);

  // A tile's rows of B, while the one before is computed.
  const int room = static_cast<int>(a.room) * kTile;
  const auto copy_adapter = [&](const Walk<kGated>& at, int slot) {
    const int row = at.row(a), rank = static_cast<int>(a.rank[at.weight]);
    const int length = rank * (a.wide ? 4 : 2), there = min(kTile, static_cast<int>(a.n[at.weight]) - row) * length;
    const char* const b = static_cast<const char*>(a.weights[at.weight].lora_b) + static_cast<int64>(row) * length;
    const uint32 to = static_cast<uint32>(__cvta_generic_to_shared(lora)) + slot * room;
    for (int i = threadIdx.x * 16; i < there; i += kThreads * 16) copy16(to + i, b + i);
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  Walk<kGated> walk;
  walk.settle(a);
  if (room > 0 && stages > 0) copy_adapter(walk, 0);

  // The copies of an entry are 128 bytes; a thread begins with another part of them than its neighbour.
  {
    const int entry = threadIdx.x / 2;
    const auto value = [&](int code) {
      return static_cast<uint32>(a.codes[code >> 2] >> 16 * (code & 3)) & 0xffffu;
    };
    const uint32 pair = value(entry >> 4) | value(entry & 15) << 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<uint4*>(shared + entry * kEntry + ((2 * i + threadIdx.x) & 7) * 16) =
          make_uint4(pair, pair, pair, pair);
  }
  // All of them are asked for before the first is waited for.
  float table[kWeights];
#pragma unroll
  for (int i = 0; i < kWeights; ++i) {
    const Weight& weight = a.weights[i];
    if (threadIdx.x < 256)
      table[i] = weight.nested_codebook != nullptr ? weight.nested_codebook[threadIdx.x] : 0.0f;
    else
      table[i] = weight.nested_offset != nullptr ? *weight.nested_offset : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kWeights; ++i)
    if (threadIdx.x < 256)
      scale_tables[i * 256 + threadIdx.x] = table[i];
    else if (threadIdx.x == 256)
      offsets[i] = table[i];
  const float stretch = __uint_as_float(static_cast<uint32>(a.factor));
  __syncthreads();

  // A lane decodes the scales of one chunk for its quad, and asks for the next ones.
  float factors[2][kRun];
  const auto decode_scales = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float decoded = inside[i] ? scales.decode(i, scale_tables + of * 256, offsets[of]) : 0.0f;
#pragma unroll
      for (int c = 0; c < kRun; ++c) factors[i][c] = __shfl_sync(kWarp, decoded, c, 4);
    }
    aim();
  };
  decode_scales();

  // The address of an entry is its byte behind the lane's own, so one instruction makes it.
  const uint32 own = lane * 4;
  const auto values_of = [&](uint32 word, int byte) {
    return *reinterpret_cast<const uint32*>(shared + __byte_perm(word, own, 0x5504u | byte << 4));
  };
  constexpr bool kHeld = kTiles <= kMostHeld;
  uint4 held[kHeld ? kRun : 1][kTiles][2];
  const auto* const x = static_cast<const typename Type::Raw*>(a.x);
  const auto tokens_of = [&](int chunk, int t, uint4 (&tokens)[2]) {
    const int token = t * kTokens + quad;
    tokens[0] = tokens[1] = make_uint4(0, 0, 0, 0);
    if (token < m && chunk < chunks) {
      const uint4* source = reinterpret_cast<const uint4*>(x + token * a.k + chunk * kChunk + 16 * quarter(member));
      tokens[0] = __ldg(source), tokens[1] = __ldg(source + 1);
    }
  };

  int part = 0, held_part = -1, turn = 0;
  wait_for_previous();  // only weights were read so far
  float gate = 0;
  float total[kTiles][4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    if (kHeld && held_part != part) {
#pragma unroll
      for (int c = 0; c < (kHeld ? kRun : 0); ++c)
#pragma unroll
        for (int t = 0; t < kTiles; ++t) tokens_of(part * kChunks + warp * kRun + c, t, held[c][t]);
      held_part = part;
    }
#pragma unroll
    for (int pair = 0; pair < kRun / 2; ++pair) {
      uint2 words[2][2];  // of each row's two chunks
#pragma unroll
      for (int i = 0; i < 2; ++i) trade(codes[pair][i], member >= 2, words[i]);
      fetch(pair);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = 2 * pair + half;
        uint32 values[2][8];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int byte = 0; byte < 4; ++byte) {
            values[i][byte] = values_of(words[i][half].x, byte);
            values[i][4 + byte] = values_of(words[i][half].y, byte);
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
    }
    decode_scales();  // here, so that nothing waits for codes before more are asked for
    if (++part < parts) continue;

    float* const to = sums + (turn * kWarps + warp) * kColumns * kPitch;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = t * kTokens + 2 * member + i % 2;
        if (token < m) to[token * kPitch + quad + 8 * (i / 2)] = total[t][i];
        total[t][i] = 0;
      }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    // Behind the barrier sums and B of this turn are there, and nobody reads those of the one before,
    // whose place the next one takes.
    __syncthreads();
    const Weight& weight = a.weights[walk.weight];
    static_assert(kTile * kColumns <= kThreads, "a thread has one result");
    const int row = threadIdx.x % kTile, token = threadIdx.x / kTile, feature = walk.row(a) + row;
    const int n = static_cast<int>(a.n[walk.weight]), rank = static_cast<int>(a.rank[walk.weight]), which = walk.weight;
    const char* const b = lora + turn * room;
    const float* const from = sums + turn * kWarps * kColumns * kPitch + token * kPitch + row;
    part = 0, turn ^= 1, walk.next(a);
    if (room > 0 && stage + 1 < stages) copy_adapter(walk, turn);
    if (token < m && feature < n) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += from[w * kColumns * kPitch];
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
  }
}

// What the rows of x are projected onto by up to kWeights matrices A [rank, k], each times its factor: a
// program computes one column of [m, columns] for kRows rows of x. The rows of A and x are aligned to 16 bytes.
struct Projections {
  const void *x, *a[kWeights];
  float* out;
  int64 end[kWeights], factors[kWeights], k, m, columns;  // columns up to the last of each, and the factors' bits
};

template <class Type>
__device__ void unpack(float (&values)[8], const uint4& words) {
  const uint32 all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    values[2 * i] = Type::decode(static_cast<uint16>(all[i])), values[2 * i + 1] = Type::decode(static_cast<uint16>(all[i] >> 16));
}

template <class Type, bool kWide, int kRows>
__global__ void __launch_bounds__(kThreads) project(const __grid_constant__ Projections p) {
  launch_next();
  __shared__ float sums[kWarps][kRows];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = blockIdx.x;
  const int first = blockIdx.y * kRows, count = min(kRows, static_cast<int>(p.m) - first);
  int which = 0;
  while (which < kWeights - 1 && column >= p.end[which]) ++which;
  const int64 row = column - (which > 0 ? p.end[which - 1] : 0);
  const char* const a = static_cast<const char*>(p.a[which]) + row * p.k * (kWide ? 4 : 2);
  const int vectors = static_cast<int>(p.k / 8);
  const uint4* const x = static_cast<const uint4*>(p.x) + static_cast<int64>(first) * vectors;
  float total[kRows] = {};
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
    uint4 words[kRows];
#pragma unroll
    for (int t = 0; t < kRows; ++t) words[t] = __ldg(x + (t < count ? t : 0) * vectors + i);
    float weights[8];
    if (kWide) {
      const float4 low = __ldg(reinterpret_cast<const float4*>(a) + 2 * i);
      const float4 high = __ldg(reinterpret_cast<const float4*>(a) + 2 * i + 1);
      weights[0] = low.x, weights[1] = low.y, weights[2] = low.z, weights[3] = low.w;
      weights[4] = high.x, weights[5] = high.y, weights[6] = high.z, weights[7] = high.w;
    } else {
      unpack<Type>(weights, __ldg(reinterpret_cast<const uint4*>(a) + i));
    }
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      float values[8];
      unpack<Type>(values, words[t]);
#pragma unroll
      for (int e = 0; e < 8; ++e) total[t] = __fmaf_rn(values[e], weights[e], total[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kRows; ++t) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) total[t] += __shfl_xor_sync(kWarp, total[t], apart);
    if (lane == 0) sums[warp][t] = total[t];
  }
  __syncthreads();
  if (threadIdx.x < count) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += sums[w][threadIdx.x];
    p.out[(first + threadIdx.x) * p.columns + column] = sum * __uint_as_float(static_cast<uint32>(p.factors[which]));
  }
}
