// Multiply a few rows with packed weights of 16 codes, read once and never written as values:
// out[m, n] = sum over k of x[m, k] * codebook[code[n, k]] * scale[n, k / block] (+ bias[n])
//             (+ sum over r of projected[m, r] * B[n, r]).
//
// Up to four weights of one width share a launch. `project` computes what their adapters project x onto.
//
// A program takes one or two strips of 16 rows of a weight at a time (a tile), and of these 4096 columns (a
// stage), of which each of the 16 warps has a run of 256. Copies bring a warp's part of a strip to shared
// memory: while one is multiplied the next is under way, and no warp waits for another before the end of a
// tile. Only one strip is under way, since what is asked for last waits behind all before it. A tile of two
// strips does half as often what is done once a tile; a small weight has too few rows for that, and some
// multiprocessors would have no tile.
//
// A lane has 8 bytes of each row of a chunk, which are 16 neighbouring codes, and the four lanes of a quad have
// its 64 together. What a lane decodes is at once its part of the first operand of mma.m16n8k16: a product sums
// over k, so any order of k serves as long as the rows of x, the second operand, are read in the same one.
// The sums of 64 products are scaled in fp32. At the end of a tile the warps' sums are added up in the
// order of the warps, so a result is the same every time and does not depend on the other rows of x. A
// tile's rows of B come with its last codes.
//
// Two codes, a byte, are decoded by one look-up in a table of 256 pairs of values. Each lane has a copy of
// its own, in its own bank of shared memory, so that no two lanes wait for each other. The copies fill half of
// the 256 bytes of an entry, and the other half holds scales.

#include "linear_rows.cuh"
#include "numeric.cuh"

constexpr int kChunk = 64;                // columns whose products are scaled together
constexpr int kRun = 4;                   // chunks of a warp
constexpr int kChunks = kWarps * kRun;    // of a stage
constexpr int kLine = kRun * kChunk / 2;  // bytes of a row of a warp's part of a strip
constexpr int kPart = kStrip * kLine;     // bytes of that part
constexpr int kEntry = 256;               // bytes from one entry of the table, in 32 copies, to the next; it has 256

// The scales of up to four neighbouring chunks of a row take 16 bytes, first as they are stored and then
// decoded. `even`: each chunk has a scale of its own and those of four are aligned.
// A scale is absmax itself; or a code of a table, times the absmax of the 256 that share it, plus an offset.
struct Plain {
  static __device__ void copy(uint32 to, const Weight& weight, uint32 block, int shift, int count, uint32, bool even) {
    const float* const absmax = static_cast<const float*>(weight.absmax);
    if (even) {
      copy16(to, absmax + block);
    } else {
#pragma unroll 1
      for (int i = 0; i < count; ++i) copy4(to + 4 * i, absmax + (block + i >> shift), 4);
    }
  }
  static __device__ float4 decode(const uint4& stored, uint32, int, bool, const float*, float) {
    return make_float4(__uint_as_float(stored.x), __uint_as_float(stored.y), __uint_as_float(stored.z), __uint_as_float(stored.w));
  }
};

// Stored: two words of codes, of which the second is used where a row's codes go on in it, and two absmax alike.
struct Nested {
  static __device__ void copy(uint32 to, const Weight& weight, uint32 block, int shift, int count, uint32 blocks, bool even) {
    const uint8* const absmax = static_cast<const uint8*>(weight.absmax);
    if (even) {
      copy4(to, absmax + block, 4);
      copy4(to + 8, weight.nested_absmax + (block >> 8), 4);
    } else {
      const uint32 first = block >> shift, last = block + count - 1 >> shift, word = first & ~3u, end = (blocks - 1 >> shift) + 1;
      copy4(to, absmax + word, min(4u, end - word));
      if (last >= word + 4) copy4(to + 4, absmax + word + 4, min(4u, end - word - 4));
      copy4(to + 8, weight.nested_absmax + (first >> 8), 4);
      if (last >> 8 != first >> 8) copy4(to + 12, weight.nested_absmax + (last >> 8), 4);
    }
  }
  static __device__ float4 decode(const uint4& stored, uint32 block, int shift, bool even, const float* table, float offset) {
    float scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32 code = stored.x >> 8 * i, outer = stored.z;
      if (!even) {
        const uint32 first = block >> shift, at = block + i >> shift, byte = at - (first & ~3u);
        code = (byte < 4 ? stored.x : stored.y) >> 8 * (byte & 3);
        if (at >> 8 != first >> 8) outer = stored.w;
      }
      scales[i] = table[code & 0xff] * __uint_as_float(outer) + offset;
    }
    return make_float4(scales[0], scales[1], scales[2], scales[3]);
  }
};

// k is a multiple of 64. A block has 2^shift chunks. `codes` are the 16 values as they are stored, four a word,
// and `factor` the bits of what fp32 products of theirs are multiplied with: arguments, so that no tensor has to
// live as long as what is launched again.
struct Arguments : Call {
  int64 shift, codes[4], factor;
  int64 tables;  // where those of scales are, as the places before
};

// `kTiles` mmas share a decoded weight, and a tile has `kHeight` strips. Where `kGated`, there are two weights
// of one shape, and out is silu(first) * second.
template <class Type, class Scale, int kTiles, bool kGated, int kHeight>
__global__ void __launch_bounds__(kThreads, 1) linear(const __grid_constant__ Arguments a) {
  // Rows of B are needed for the tile that is being finished, for the next, and for the one that is asked for.
  constexpr int kSlots = 3;
  using Results = Sums<Type, kTiles, kGated, kHeight>;
  constexpr int kRows = Results::kRows, kPitch = Results::kPitch;
  extern __shared__ char shared[];
  // An address in the table has its entry as second byte and nothing of the table's own in the two lower ones.
  const uint32 start = static_cast<uint32>(__cvta_generic_to_shared(shared)), table = start + kLow + 0xffff & ~0xffffu;
  char* const origin = shared + (table - start);
  float* const scale_tables = reinterpret_cast<float*>(origin + a.tables);  // [kWeights][256]
  float* const offsets = scale_tables + kWeights * 256;                     // [kWeights]
  float* const sums = reinterpret_cast<float*>(origin + a.sums);            // [2][kWarps][m][kPitch]
  char* const strips = origin + a.strips;                                   // [kWarps][kPart]
  char* const lora = origin + a.lora;                                       // [kSlots][kRows][room]

  const int lane = threadIdx.x & 31, warp = __shfl_sync(kWarp, static_cast<int>(threadIdx.x) >> 5, 0);
  const int quad = lane >> 2, member = lane & 3;
  const int m = static_cast<int>(a.m), chunks = static_cast<int>(a.k / kChunk), parts = (chunks + kChunks - 1) / kChunks;
  const int tiles = static_cast<int>(a.end[kGated ? 0 : kWeights - 1]), shift = static_cast<int>(a.shift);
  const int mine = tiles > blockIdx.x ? (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  const int stages = mine * (kGated ? 2 : 1) * parts, room = static_cast<int>(a.room) * kRows;
  const int64 row_bytes = a.k / 2;

  // What is small comes first: what is asked for later waits behind it.
  float table_value[kWeights];
#pragma unroll
  for (int i = 0; i < kWeights; ++i) {
    const Weight& weight = a.weights[i];
    table_value[i] = 0;
    if (weight.nested_codebook != nullptr) table_value[i] = threadIdx.x < 256 ? weight.nested_codebook[threadIdx.x] : *weight.nested_offset;
  }

  // What a warp multiplies with: its run of columns of x, read anew where the part changes. Of more than 8 rows
  // (`kEarly`), a chunk is asked for as soon as the last strip is through with the one before.
  constexpr bool kEarly = kTiles > 1;
  int held_part = -1;
  uint4 held[kRun][kTiles][2];
  const auto hold = [&](int c, int part) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int token = t * kTokens + quad, chunk = part * kChunks + warp * kRun + c;
      const auto* const x = static_cast<const typename Type::Raw*>(a.x) + token * a.k + chunk * kChunk + 16 * member;
      held[c][t][0] = held[c][t][1] = make_uint4(0, 0, 0, 0);
      if (token < m && chunk < chunks) {
        held[c][t][0] = __ldg(reinterpret_cast<const uint4*>(x));
        held[c][t][1] = __ldg(reinterpret_cast<const uint4*>(x) + 1);
      }
    }
  };
  const auto hold_all = [&](int part) {
    if (held_part == part) return;
    held_part = part;
#pragma unroll
    for (int c = 0; c < kRun; ++c) hold(c, part);
  };
  if (a.projected == nullptr) hold_all(0);  // else this launch may be early

  // Between two entries of the table are 128 bytes, which hold the scales of 8 rows.
  const auto scales_at = [&](int place, int row) { return kEntry * ((place * kWarps + warp) * (kRows / 8) + row / 8) + 128 + row % 8 * 16; };
  const bool even = shift == 0 && chunks % kRun == 0;

  // Asks for a warp's codes of a strip, with the first of a stage for scales, and with the last of a tile for
  // the tile's rows of B. A lane asks for the scales of one row.
  const int seat = lane >> 3, piece = lane & 7;
  const int64 own_bytes = seat * row_bytes + warp * kLine + piece * 16;
  const uint32 seats = static_cast<uint32>(__cvta_generic_to_shared(strips)) + warp * kPart + seat * kLine + ((piece ^ seat * 2) << 4);
  Walk<kRows, kGated> far(a, stages);
  int far_place = 0, far_slot = 0;
  const auto ask = [&](int strip) {
    if (far.left == 0) return;
    const Weight& weight = a.weights[far.weight];
    const int tile = far.row(), first = tile + strip * kStrip, there = far.n - first, chunk = far.part * kChunks + warp * kRun;
    if (strip == 0) {
      if (lane < kRows && lane < there && chunk < chunks)
        Scale::copy(table + scales_at(far_place, lane), weight, static_cast<uint32>(tile + lane) * chunks + chunk, shift,
                    min(kRun, chunks - chunk), static_cast<uint32>(far.n) * chunks, even);
      far_place ^= 1;
    }
    const uint8* const from = weight.qweight + (first * row_bytes + far.part * (kWarps * kLine)) + own_bytes;
    if (there >= kStrip && chunks - chunk >= kRun) {
#pragma unroll
      for (int i = 0; i < 4; ++i) stream16(seats + i * 4 * kLine, from + i * 4 * row_bytes);
    } else if (piece / 2 < chunks - chunk) {
#pragma unroll 1
      for (int i = 0; 4 * i + seat < min(there, kStrip); ++i) stream16(seats + i * 4 * kLine, from + i * 4 * row_bytes);
    }
    if (strip == kHeight - 1) {
      if (room > 0 && far.part == parts - 1)
        copy_adapter<kRows>(static_cast<uint32>(__cvta_generic_to_shared(lora)) + far_slot * room, a, far.weight, tile, far.n);
      if (far.next(a, parts)) far_slot = far_slot == kSlots - 1 ? 0 : far_slot + 1;
    }
  };
  ask(0);

  // The copies of an entry are 128 bytes; a thread begins with another part of them than its neighbour.
  {
    const int entry = threadIdx.x / 2;
    const auto value = [&](int code) {
      return static_cast<uint32>(a.codes[code >> 2] >> 16 * (code & 3)) & 0xffffu;
    };
    const uint32 pair = value(entry >> 4) | value(entry & 15) << 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<uint4*>(origin + entry * kEntry + ((2 * i + threadIdx.x) & 7) * 16) =
          make_uint4(pair, pair, pair, pair);
  }
#pragma unroll
  for (int i = 0; i < kWeights; ++i)
    if (threadIdx.x < 256)
      scale_tables[i * 256 + threadIdx.x] = table_value[i];
    else if (threadIdx.x == 256)
      offsets[i] = table_value[i];
  const float stretch = __uint_as_float(static_cast<uint32>(a.factor));
  __syncthreads();

  // A lane decodes the scales of a row, for all.
  int place = 0;
  const auto decode_scales = [&](const Walk<kRows, kGated>& at) {
    if (lane < kRows) {
      const int row = at.row() + lane, chunk = at.part * kChunks + warp * kRun, count = row < at.n ? chunks - chunk : 0;
      char* const here = origin + scales_at(place, lane);
      const float4 decoded = Scale::decode(*reinterpret_cast<const uint4*>(here), static_cast<uint32>(row) * chunks + chunk,
                                           shift, even, scale_tables + at.weight * 256, offsets[at.weight]);
      *reinterpret_cast<float4*>(here) = make_float4(count > 0 ? decoded.x : 0.0f, count > 1 ? decoded.y : 0.0f,
                                                     count > 2 ? decoded.z : 0.0f, count > 3 ? decoded.w : 0.0f);
    }
  };

  const uint32 own = table + lane * 4;
  const auto values_of = [&](uint32 word, int byte) { return look_up(__byte_perm(word, own, 0x7604u | byte << 4)); };
  // Rows of a warp's part lie 128 bytes apart; their 16 bytes change places, so that a quad's lanes and those
  // of its neighbours read from all banks.
  const char* const codes = strips + warp * kPart + quad * kLine + member * 8;
  const int turned = (quad & 3) * 32;
  int turn = 0, lora_slot = 0;
  Walk<kRows, kGated> walk(a, stages);
  wait_for_previous();  // only weights were read so far
  if (kEarly) hold_all(0);
  float gate = 0;
  float total[kHeight][kTiles][4] = {};
  while (walk.left > 0) {
    if (!kEarly) hold_all(walk.part);
    const int next_part = walk.part + 1 < parts ? walk.part + 1 : 0;
#pragma unroll
    for (int strip = 0; strip < kHeight; ++strip) {
      wait_for_copies();
      __syncwarp();
      if (strip == 0) decode_scales(walk);
      uint2 words[kRun][2];
#pragma unroll
      for (int c = 0; c < kRun; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) words[c][i] = *reinterpret_cast<const uint2*>(codes + i * 8 * kLine + (turned ^ c * 32));
      __syncwarp();
      float factors[2][kRun];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(origin + scales_at(place, strip * kStrip + quad + 8 * i));
        factors[i][0] = four.x, factors[i][1] = four.y, factors[i][2] = four.z, factors[i][3] = four.w;
      }
      ask((strip + 1) % kHeight);
#pragma unroll
      for (int c = 0; c < kRun; ++c) {
        uint32 values[2][8];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int byte = 0; byte < 4; ++byte) {
            values[i][byte] = values_of(words[c][i].x, byte);
            values[i][4 + byte] = values_of(words[c][i].y, byte);
          }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint4(&tokens)[2] = held[c][t];
          float sum[4] = {};
          multiply<Type>(sum, values[0][0], values[1][0], values[0][1], values[1][1], tokens[0].x, tokens[0].y);
          multiply<Type>(sum, values[0][2], values[1][2], values[0][3], values[1][3], tokens[0].z, tokens[0].w);
          multiply<Type>(sum, values[0][4], values[1][4], values[0][5], values[1][5], tokens[1].x, tokens[1].y);
          multiply<Type>(sum, values[0][6], values[1][6], values[0][7], values[1][7], tokens[1].z, tokens[1].w);
#pragma unroll
          for (int i = 0; i < 4; ++i) total[strip][t][i] = __fmaf_rn(sum[i], factors[i / 2][c], total[strip][t][i]);
        }
        if (kEarly && strip == kHeight - 1 && parts > 1) hold(c, next_part);
      }
    }
    place ^= 1;
    const int which = walk.weight, first = walk.row(), n = walk.n;
    if (!walk.next(a, parts)) continue;

    Results::put(sums + ((turn * kWarps + warp) * m + 2 * member) * kPitch + quad, m, member, total);
    // Behind the barrier sums and B of this turn are there, and nobody reads those of the one before,
    // whose place the next one takes.
    __syncthreads();
    const float* const here = sums + turn * kWarps * m * kPitch;
    const char* const b = lora + lora_slot * room;
    turn ^= 1, lora_slot = lora_slot == kSlots - 1 ? 0 : lora_slot + 1;
    Results::finish(a, which, first, n, here, b, stretch, gate);
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
  // One row has too few loads under way by itself.
#pragma unroll (kRows > 1 ? 1 : 4)
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
