// Multiply a few rows with packed k-bit weights, read once and never written as values:
// out[m, n] = sum over k of x[m, k] * codebook[code[n, k]] * absmax[n, k / 32] (+ bias[n])
//             (+ sum over r of projected[m, r] * B[n, r]).
//
// A program goes its way as that of linear_rows.cu, and a warp has 256 columns of a stage's 4096. So a row of its
// part of a strip has 8 blocks of 32 codes, each of K bit planes (bitplanes.cuh).
//
// mma.m16n8k16 sums over k, of which each lane of a quad has a part, and only the sum of one block can be scaled.
// So the four lanes of a quad share each block: a lane takes a byte of each plane, which are the bits of 8
// neighbouring codes, and it takes them of four blocks (a chunk) to fill a word for each plane. Exchanges of bits
// among those words turn them into bytes of two codes, of which one look-up makes a pair of values: the table has
// 256 pairs and a copy of each for each lane, in its own bank of shared memory. A byte has four codes of 2 bits,
// and a look-up makes two pairs. The fifth bits of two codes select one of four such tables.
//
// Of up to two rows of x, most columns of an mma would have none. There each lane has a block of its own (`kOwn`): a
// row of x takes a column for each lane of a quad, with zeros where the other lanes have their blocks, so that sums of
// blocks stay apart. Nothing is read by four lanes, and a sum is scaled once for all 32 products. Sums are added up in
// another order than those of more rows.
//
// Values are rounded to 16 bits once, in the table, products are summed in fp32, and sums of a block are scaled in
// fp32: the results are as close as those of a dequantized weight, or closer. Float16 has fewer digits for entries of a
// codebook that are a ten-thousandth of its largest one. A codebook has to be finite.

#include "bitplanes.cuh"
#include "linear_rows.cuh"
#include "numeric.cuh"

constexpr int kBlock = 32;                // columns whose products are scaled together
constexpr int kBlocks = 4;                // of a chunk
constexpr int kChunk = kBlocks * kBlock;  // columns
constexpr int kRun = 2;                   // chunks of a warp
constexpr int kChunks = kWarps * kRun;    // of a stage
constexpr int kEntry = 256;               // bytes from one byte's entry of the table to the next
constexpr int kTable = 256 * kEntry;

// k is a multiple of 128. Where a weight's `nested_codebook` is meant to be, its codebook is.
struct Arguments : Call {
  int64 stored, scales;  // where they are, as the places before
};

// How the codebook is stretched before it is rounded to 16 bits: the largest value has the exponent of 1, so that
// none overflows, and of 16 factors from there on a warp each finds the error of one. `errors` has room for those.
template <class Type>
__device__ float fit(float value, int lane, int warp, uint32* errors) {
  const int exponent = static_cast<int>(__reduce_max_sync(kWarp, __float_as_uint(fabsf(value))) >> 23);
  const float unit = exponent > 0 && exponent < 254 ? __uint_as_float(static_cast<uint32>(254 - exponent) << 23) : 1.0f;
  const auto factor = [](int i) { return 1.0f + 0.0625f * i; };
  const float stretched = value * (unit * factor(warp));
  const float wrong = (Type::decode(Type::encode(stretched)) - stretched) / factor(warp);  // below 2^-7
  const uint32 error = __reduce_add_sync(kWarp, static_cast<uint32>(wrong * wrong * 0x1p40f));
  if (lane == 0) errors[warp] = (error & ~15u) | warp;
  __syncthreads();
  return unit * factor(__reduce_min_sync(kWarp, errors[lane & 15]) & 15);
}

// The table of the values that codes of K bits stand for; what a byte of the bits of neighbouring codes is.
template <int K>
struct Table {
  static constexpr int kEntries = K == 3 ? 64 : K == 5 ? 1024 : 256;  // of 128 bytes

  // Bits p of two neighbouring codes lie beside each other. `mine` is the value of code `lane`, in 16 bits.
  static __device__ void build(char* table, uint32 mine) {
    const auto value = [&](uint32 code) { return __shfl_sync(kWarp, mine, static_cast<int>(code)); };
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * kEntries; i += kThreads) {
      const uint32 entry = i / 2;
      const auto pair = [&](uint32 bits, uint32 fifth) {
        uint32 first = fifth << 4 & 16, second = fifth >> 1 << 4;
#pragma unroll
        for (int p = 0; p < 4; ++p) first |= (bits >> 2 * p & 1) << p, second |= (bits >> (2 * p + 1) & 1) << p;
        const uint32 low = value(first);
        return low | value(second) << 16;
      };
      const uint32 low = pair(K == 2 ? entry & 15 : entry, entry >> 8), high = K == 2 ? pair(entry >> 4, 0) : low;
      const uint4 values = make_uint4(low, high, low, high);
      // The fifth bits are bits 7 and 16 of an address. A thread begins with another part than its neighbour.
      char* const to = table + (entry & 255) * kEntry + (entry >> 8 & 1) * 128 + (entry >> 9) * kTable;
#pragma unroll
      for (int part = 0; part < 4; ++part)
        *reinterpret_cast<uint4*>(to + ((2 * part + threadIdx.x) & 7) * 16) = values;
    }
  }
};

// What a lane has of a chunk of a row: byte j of word p is plane p of its 8 codes of block j, or of codes 8j to 8j + 7
// of its own block.
template <int K>
struct Codes {
  uint32 planes[K];

  // The block of a lane, in shared memory.
  __device__ void load_own(const char* block) {
    if constexpr (K == 2) {
      const uint2 words = *reinterpret_cast<const uint2*>(block);
      planes[0] = words.x, planes[1] = words.y;
    } else if constexpr (K == 4) {
      const uint4 words = *reinterpret_cast<const uint4*>(block);
      planes[0] = words.x, planes[1] = words.y, planes[2] = words.z, planes[3] = words.w;
    } else {
#pragma unroll
      for (int p = 0; p < K; ++p) planes[p] = reinterpret_cast<const uint32*>(block)[p];
    }
  }

  // `row` is the chunk in shared memory. `two` selects the lane's byte of each of two words.
  __device__ void load(const char* row, uint32 two) {
    uint32 words[kBlocks * K];
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(row)[i];
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int p = 0; p < K; ++p)
      planes[p] = __byte_perm(__byte_perm(words[p], words[K + p], two), __byte_perm(words[2 * K + p], words[3 * K + p], two), 0x5410u);
  }
};

// Turns planes of a lane's two rows into words of which byte j is an entry of the table, for block j.
template <int K>
struct Entries {
  static constexpr int kRowsOf = K == 2 ? 1 : 2;  // an entry of 2 bits is one for both rows
  uint32 words[kRowsOf][4], fifth[K == 5 ? 2 : 1][8], own;

  // `own` is where the lane's copy of the first entry is.
  __device__ Entries(const Codes<K> (&codes)[2], uint32 lanes_own) : own(lanes_own) {
    if constexpr (K == 2) {
      uint32 both[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        both[i][0] = codes[i].planes[0], both[i][1] = codes[i].planes[1];
        exchange<2, 0x33333333u>(both[i][0], both[i][1]);
      }
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        exchange<4, 0x0f0f0f0fu>(both[0][w], both[1][w]);
        words[0][w] = both[0][w], words[0][w + 2] = both[1][w];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        auto& of = words[i];
#pragma unroll
        for (int p = 0; p < 4; ++p) of[p] = p < K ? codes[i].planes[p < K ? p : 0] : 0;
        exchange<2, 0x33333333u>(of[0], of[1]);
        exchange<2, 0x33333333u>(of[2], of[3]);
        exchange<4, 0x0f0f0f0fu>(of[0], of[2]);
        exchange<4, 0x0f0f0f0fu>(of[1], of[3]);
      }
    }
    // The fifth bits of a pair of blocks j and j + 2 come to bits 7 and 8 of half a word, beside the lane's place.
    if constexpr (K == 5) {
#pragma unroll
      for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int left = 7 - i / 2 * 2 - i % 2 * 8;
          const uint32 plane = codes[row].planes[4], bits = left < 0 ? plane >> (left < 0 ? -left : 0) : plane << (left < 0 ? 0 : left);
          fifth[row][i] = (bits & 0x01800180u) | own;
        }
    }
  }

  // The 8 values of block j of both rows. The first operand of an mma has them in turn, and so has an entry of 2 bits.
  __device__ void values(int j, uint32 (&pairs)[4][2]) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (K == 2) {
        const uint2 found = look_up_two(__byte_perm(words[0][w], own, 0x7604u | j << 4));
        pairs[w][0] = found.x, pairs[w][1] = found.y;
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (K == 5) {
            // The highest byte repeats the sign of one that has a single bit, and is 0. So the table begins at 0x10000.
            const uint32 half = 4 + j / 2 * 2, places = half | j << 4 | (half + 1) << 8 | (8 | half + 1) << 12;
            pairs[w][i] = look_up<kTable>(permute(words[i][w], fifth[i][2 * w + j % 2], places));
          } else {
            pairs[w][i] = look_up(__byte_perm(words[i][w], own, 0x7604u | j << 4));
          }
        }
      }
    }
  }
};

// `kMmas` share a decoded weight, and a tile has `kHeight` strips: 0 for up to two rows of x. Where `kGated`, there are
// two weights of one shape, and out is silu(first) * second.
template <class Type, int K, class Absmax, int kMmas, bool kGated, int kHeight>
__global__ void __launch_bounds__(kThreads, 1) linear(const __grid_constant__ Arguments a) {
  constexpr bool kOwn = kMmas == 0;
  constexpr int kTiles = kOwn ? 1 : kMmas;
  using Results = Sums<Type, kTiles, kGated, kHeight>;
  constexpr int kRows = Results::kRows, kPitch = Results::kPitch;
  constexpr bool kLate = kTiles > 1 || K == 5;
  constexpr int kTurns = kTiles > 1 ? 1 : 2;                     // sums of more rows have one place
  constexpr int kSlots = 3;                                      // rows of B, as in linear_rows.cu
  constexpr int kPieces = kRun * K;                              // of 16 bytes, of a row of a warp's part of a strip
  constexpr int kAtOnce = K == 3 ? 4 : 32 / kPieces;             // rows of which a warp asks for pieces at once
  constexpr int kLine = kPieces * 16 + 16;                       // an odd number of them: rows begin in other banks
  constexpr int kPart = kStrip * kLine;
  constexpr int kStored = kRun * kBlocks * sizeof(typename Absmax::Raw);
  extern __shared__ char shared[];
  // An address in the table has its entry as second byte and nothing of the table's own in the two lower ones.
  const uint32 start = static_cast<uint32>(__cvta_generic_to_shared(shared)), table = start + kLow + 0xffff & ~0xffffu;
  char* const origin = shared + (table - start);
  float* const sums = reinterpret_cast<float*>(origin + a.sums);        // [kTurns][kWarps][m][kPitch]
  char* const strips = origin + a.strips;                               // [kWarps][kPart]
  char* const lora = origin + a.lora;                                   // [kSlots][kRows][room]
  char* const stored = origin + a.stored;                               // [kWarps][kRows][kStored]
  float4* const all_scales = reinterpret_cast<float4*>(origin + a.scales);  // [kWarps][kRun][kRows]

  const int lane = threadIdx.x & 31, warp = __shfl_sync(kWarp, static_cast<int>(threadIdx.x) >> 5, 0);
  const int quad = lane >> 2, member = lane & 3;
  const int m = static_cast<int>(a.m), chunks = static_cast<int>(a.k / kChunk), parts = (chunks + kChunks - 1) / kChunks;
  const int tiles = static_cast<int>(a.end[kGated ? 0 : kWeights - 1]);
  const int mine = tiles > blockIdx.x ? (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  const int stages = mine * (kGated ? 2 : 1) * parts, room = static_cast<int>(a.room) * kRows;
  const uint32 row_bytes = chunks * (K * 16);
  float4* const scales = all_scales + warp * kRun * kRows;

  // What is small comes first: what is asked for later waits behind it.
  const auto entry_of = [&](int which) { return a.weights[which].nested_codebook[lane & (1 << K) - 1]; };
  Walk<kRows, kGated> walk(a, stages);
  const float first_entry = entry_of(walk.weight);
  // Bit i: weight i has another codebook than the one before it, and so another table.
  uint32 others = 0;
#pragma unroll
  for (int i = 1; i < kWeights; ++i)
    if (a.weights[i].nested_codebook != nullptr && __any_sync(kWarp, __float_as_uint(entry_of(i)) != __float_as_uint(entry_of(i - 1))))
      others |= 1u << i;

  // What a warp multiplies with: its run of columns of x, read anew where the part changes. Of more than 8 rows
  // (`kEarly`), a chunk is asked for as soon as the last strip is through with the one before.
  constexpr bool kEarly = kTiles > 1;
  int held_part = -1;
  uint4 held[kRun][kTiles][kBlocks];
  const auto hold = [&](int c, int part) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int column = (quad & 3) == member ? quad >> 2 : kTokens;  // of those that keep the lane's block apart
      const int token = kOwn ? column : t * kTokens + quad, chunk = part * kChunks + warp * kRun + c;
      const auto* const x = static_cast<const typename Type::Raw*>(a.x) + token * a.k + chunk * kChunk + (kOwn ? kBlock : 8) * member;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        held[c][t][j] = make_uint4(0, 0, 0, 0);
        if (token < m && chunk < chunks) held[c][t][j] = __ldg(reinterpret_cast<const uint4*>(x + j * (kOwn ? 8 : kBlock)));
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

  // Asks for a warp's codes of a strip, with the first of a stage for scales, and with the last of a tile for
  // the tile's rows of B. A lane asks for the scales of one row.
  char* const own_stored = stored + (warp * kRows + lane) * kStored;
  const int seat = lane / kPieces, piece = lane % kPieces;
  const uint32 own_bytes = seat * row_bytes + piece * 16;
  const uint32 seats = static_cast<uint32>(__cvta_generic_to_shared(strips)) + warp * kPart + seat * kLine + piece * 16;
  Walk<kRows, kGated> far(a, stages);
  int far_slot = 0;
  const auto ask = [&](int strip) {
    if (far.left == 0) return;
    const Weight& weight = a.weights[far.weight];
    const int tile = far.row(), first = tile + strip * kStrip, there = far.n - first, chunk = far.part * kChunks + warp * kRun;
    if (strip == 0) {
      if (lane < kRows && lane < far.n - tile) {
        const uint32 to = static_cast<uint32>(__cvta_generic_to_shared(own_stored));
        const char* const from = static_cast<const char*>(weight.absmax) + static_cast<int64>(static_cast<uint32>(tile + lane) * chunks + chunk) * (kStored / kRun);
#pragma unroll
        for (int i = 0; i < kStored; i += 4)
          if (chunk + i / (kStored / kRun) < chunks) copy4(to + i, from + i, 4);
      }
    }
    const uint8* const from = weight.qweight + static_cast<int64>(static_cast<uint32>(first)) * row_bytes + (chunk * (K * 16) + own_bytes);
    const int last = seat < kAtOnce && piece < K * (chunks - chunk) ? min(there, kStrip) - seat : 0;
#pragma unroll
    for (int i = 0; i < kStrip; i += kAtOnce)
      if (i < last) stream16(seats + i * kLine, from + i * row_bytes);
    if (strip == kHeight - 1) {
      if (room > 0 && far.part == parts - 1)
        copy_adapter<kRows>(static_cast<uint32>(__cvta_generic_to_shared(lora)) + far_slot * room, a, far.weight, tile, far.n);
      if (far.next(a, parts)) far_slot = far_slot == kSlots - 1 ? 0 : far_slot + 1;
    }
  };
  ask(0);

  // All have passed a barrier since the table was used, and so they do before it is.
  float stretch;
  const auto build = [&](float entry) {
    const float factor = fit<Type>(entry, lane, warp, reinterpret_cast<uint32*>(all_scales));
    stretch = 1.0f / factor;
    Table<K>::build(origin, Type::encode(entry * factor));
    __syncthreads();
  };
  build(first_entry);

  // A lane decodes the scales of a row, for all.
  const auto decode_scales = [&](const Walk<kRows, kGated>& at) {
    if (lane < kRows) {
      const auto* const from = reinterpret_cast<const typename Absmax::Raw*>(own_stored);
#pragma unroll
      for (int c = 0; c < kRun; ++c) {
        const bool there = at.row() + lane < at.n && at.part * kChunks + warp * kRun + c < chunks;
        float of[kBlocks];
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) of[j] = there ? Absmax::decode(from[c * kBlocks + j]) : 0.0f;
        scales[c * kRows + lane] = make_float4(of[0], of[1], of[2], of[3]);
      }
    }
  };

  const uint32 two = member | (4 + member) << 4;
  const uint32 own = K == 5 ? lane * 0x00040004u : K == 2 ? table + (lane & 15) * 8 : table + lane * 4;
  // Rows of quads that read at once begin in other banks.
  const int own_row = !kOwn || K % 2 > 0 ? quad : K == 2 ? (quad & 3) << 1 | quad >> 2 : quad >> 1 | (quad & 1) << 2;
  const char* const codes = strips + warp * kPart + own_row * kLine;
  int turn = 0, lora_slot = 0;
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
      Codes<K> read[kRun][2];
      const auto take = [&](int c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const char* const chunk = codes + i * 8 * kLine + c * (K * 16);
          if constexpr (kOwn)
            read[c][i].load_own(chunk + member * (K * 4));
          else
            read[c][i].load(chunk, two);
        }
        if (c < kRun - 1) return;
        __syncwarp();
        ask((strip + 1) % kHeight);
      };
      if (!kLate) {
#pragma unroll
        for (int c = 0; c < kRun; ++c) take(c);
      } else {
        __syncwarp();
      }
#pragma unroll
      for (int c = 0; c < kRun; ++c) {
        if (kLate) take(c);
        const Entries<K> entries(read[c], own);
        const float4* const of = scales + c * kRows + strip * kStrip + own_row;
        float factors[2][kBlocks], sum[4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kOwn) {  // of the blocks whose sums a lane has
            const float2 two_of = reinterpret_cast<const float2*>(of + 8 * i)[member & 1];
            factors[i][0] = two_of.x, factors[i][1] = two_of.y;
          } else {
            factors[i][0] = of[8 * i].x, factors[i][1] = of[8 * i].y, factors[i][2] = of[8 * i].z, factors[i][3] = of[8 * i].w;
          }
        }
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          uint32 pairs[4][2];
          entries.values(j, pairs);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            const uint4& tokens = held[c][t][j];
            if (!kOwn) sum[0] = sum[1] = sum[2] = sum[3] = 0;
            multiply<Type>(sum, pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1], tokens.x, tokens.y);
            multiply<Type>(sum, pairs[2][0], pairs[2][1], pairs[3][0], pairs[3][1], tokens.z, tokens.w);
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (!kOwn || j == kBlocks - 1)
                total[strip][t][i] = __fmaf_rn(sum[i], factors[i / 2][kOwn ? i % 2 : j], total[strip][t][i]);
          }
        }
        if (kEarly && strip == kHeight - 1 && parts > 1) hold(c, next_part);
      }
    }
    const int which = walk.weight, first = walk.row(), n = walk.n;
    if (!walk.next(a, parts)) continue;

    if (kOwn) {  // adds up the four columns of a row of x
#pragma unroll
      for (int i = 0; i < 4 * kHeight; i += 2) {
        float* const of = total[i / 4][0] + i % 4;
        of[0] += of[1];
        of[0] += __shfl_xor_sync(kWarp, of[0], 1);
        of[1] = __shfl_xor_sync(kWarp, of[0], 2);
      }
    }
    if (kTurns == 1) __syncthreads();
    Results::put(sums + ((turn * kWarps + warp) * m + 2 * member) * kPitch + own_row, m, member, total);
    // Behind the barrier sums and B of this turn are there, and nobody reads those of the one before,
    // whose place the next one takes.
    __syncthreads();
    const float* const here = sums + turn * kWarps * m * kPitch;
    const char* const b = lora + lora_slot * room;
    turn ^= kTurns - 1, lora_slot = lora_slot == kSlots - 1 ? 0 : lora_slot + 1;
    Results::finish(a, which, first, n, here, b, stretch, gate);
    // Bits from the lower of two weights on, without it, to the higher.
    const uint32 between = (2u << max(which, walk.weight)) - (2u << min(which, walk.weight));
    if (walk.left > 0 && (others & between) != 0) build(entry_of(walk.weight));
  }
}
