// Write a packed weight of 16 codes in eight bits, transposed or not:
// out[n, k] = round(codebook[code[n, k]] * absmax[n, k / block] * (1 / row_scale[n])).
//
// 64 neighbouring columns (a chunk) share the scales, so they have 16 bytes to choose from. A lane makes
// these 16 bytes of a chunk (its table, of four registers) and hands them to the lanes that have the chunk's
// codes by shuffles. A byte is looked up by permuting the bytes of the table, four at a time.
//
// A lane has 8 bytes of a chunk, which are 16 neighbouring codes, and the four lanes of a quad have its 64
// together. The first of a pair of codes lies in the high nibble.
//
// The results are those of the eager reference bit for bit, provided that the compiler does not contract
// products and sums (--fmad=false), and that a row's scale lets all its values fit: larger ones become the
// largest here, and NaN there.

#include "numeric.cuh"

constexpr int kChunk = 64;  // columns that share the scales
constexpr int kRun = 16;    // neighbouring codes of a lane
constexpr int kQuad = 4;    // lanes that have a chunk together

// The number of columns is a multiple of 64, and a block has 2^shift chunks: blocks run on from row to row, and
// none begins inside of a chunk. `qweight` and `out` are aligned to 16 bytes. A row of a transposed `out` begins
// `pitch` elements after the one before: other weights may lie beside this one.
struct Arguments {
  const uint8* qweight;
  const void* absmax;
  const float *nested_codebook, *nested_absmax, *nested_offset, *row_scale;
  uint8* out;
  int64 rows, columns, shift, pitch;
  float codebook[16];  // here, so that no tensor has to live as long as what is launched again
};

// A scale is absmax itself; or a code of a table, times the absmax of the 256 that share it, plus an offset.
struct Plain {
  static __device__ float decode(const Arguments& a, int64 block) {
    return __ldg(static_cast<const float*>(a.absmax) + block);
  }
};

struct Nested {
  static __device__ float decode(const Arguments& a, int64 block) {
    const uint8 code = __ldg(static_cast<const uint8*>(a.absmax) + block);
    return __ldg(a.nested_codebook + code) * __ldg(a.nested_absmax + (block >> 8)) + __ldg(a.nested_offset);
  }
};

// What each code stands for in a chunk: the bytes of codes 0 to 3 in the first word, and so on.
struct Table {
  uint32 words[4];

  template <class Scale, class Out>
  static __device__ Table make(const Arguments& a, int64 chunk, int64 row) {
    const float scale = Scale::decode(a, chunk >> a.shift), factor = __frcp_rn(__ldg(a.row_scale + row));
    const auto value = [&](int code) { return a.codebook[code] * scale * factor; };
    Table table;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int code = 4 * w;
      table.words[w] = Out::pack(value(code), value(code + 1)) | Out::pack(value(code + 2), value(code + 3)) << 16;
    }
    return table;
  }

  // Returns the table that lane `source` of each `width` lanes has.
  __device__ Table of(int source, int width) const {
    Table table;
#pragma unroll
    for (int w = 0; w < 4; ++w) table.words[w] = __shfl_sync(kWarp, words[w], source, width);
    return table;
  }

  // Looks up the four lower nibbles: byte i is that of nibble i. A place in a permutation has three bits, and
  // the fourth of a code chooses between two of them.
  __device__ uint32 operator()(uint32 codes) const {
    const uint32 low = __byte_perm(words[0], words[1], codes), high = __byte_perm(words[2], words[3], codes);
    return __byte_perm(low, high, (codes >> 1 & 0x4444u) | 0x3210u);
  }

  // Looks them up in the order of the columns.
  __device__ uint32 in_order(uint32 codes) const { return __byte_perm((*this)(codes), 0, 0x2301); }
};

// A warp writes 32 chunks, of which lane i makes the table of chunk i. It takes 8 of them at a time, a quad each,
// so that it reads 256 and writes 512 contiguous bytes.
template <class Scale, class Out>
__global__ void requantize(const __grid_constant__ Arguments a) {
  constexpr int kTurns = 4, kAtOnce = 32 / kQuad;
  const uint32 lane = threadIdx.x & 31, quad = lane / kQuad, member = lane % kQuad;
  const int64 across = a.columns / kChunk, chunks = a.rows * across;
  const int64 mine = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x, first = mine - lane + quad;
  const auto* const from = reinterpret_cast<const uint2*>(a.qweight);
  auto* const to = reinterpret_cast<uint4*>(a.out);

  uint2 codes[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int64 chunk = first + t * kAtOnce;
    codes[t] = make_uint2(0, 0);
    if (chunk < chunks) codes[t] = __ldg(from + chunk * kQuad + member);
  }
  Table own = {};
  // A division of 32 bits: more than 2^32 chunks fit no GPU.
  if (mine < chunks)
    own = Table::make<Scale, Out>(a, mine, static_cast<uint32>(mine) / static_cast<uint32>(across));
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int64 chunk = first + t * kAtOnce;
    const Table table = own.of(t * kAtOnce + quad, 32);
    const uint2 pair = codes[t];
    if (chunk < chunks)
      to[chunk * kQuad + member] = make_uint4(table.in_order(pair.x), table.in_order(pair.x >> 16),
                                              table.in_order(pair.y), table.in_order(pair.y >> 16));
  }
}

// Turns four words, each with a byte for each of four columns, into a word for each column.
__device__ inline void transpose(uint32 (&words)[4]) {
  const uint32 a = __byte_perm(words[0], words[1], 0x5140), b = __byte_perm(words[2], words[3], 0x5140);
  const uint32 c = __byte_perm(words[0], words[1], 0x7362), d = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(a, b, 0x5410), words[1] = __byte_perm(a, b, 0x7632);
  words[2] = __byte_perm(c, d, 0x5410), words[3] = __byte_perm(c, d, 0x7632);
}

// A program transposes a tile of `kRows` rows and `kColumns` columns of the weight, and a lane four rows (a group)
// of a run of columns. A quad has the group's chunk, and lane i of it makes the table of row i.
//
// In shared memory a column of the tile has a word for each group, and fills all banks. A warp writes words of
// `kDown` groups in columns that are a run apart, and reads vectors of a column. The groups change places by the
// run, so that neither has two words in one bank.
template <class Scale, class Out, int kRows, int kColumns>
__global__ void __launch_bounds__(kRows* kColumns / kChunk) requantize_transposed(const __grid_constant__ Arguments a) {
  constexpr int kThreads = kRows * kColumns / kChunk, kGroups = kRows / 4;
  constexpr int kBeside = kColumns == kChunk ? 1 : 2;  // chunks that a warp has beside each other
  constexpr int kDown = 32 / kQuad / kBeside;          // groups that it has of each
  constexpr int kHigh = kGroups / kDown;               // warps below each other in a tile
  static_assert(kRows % 128 == 0 && kColumns % (kChunk * kBeside) == 0, "a column of a tile fills all banks");
  __shared__ uint4 tile[kColumns * kRows / 16];
  uint32* const words = reinterpret_cast<uint32*>(tile);

  const int64 across = a.columns / kChunk;
  const uint32 tiles = static_cast<uint32>((a.columns + kColumns - 1) / kColumns);
  const int64 tile_row = static_cast<int64>(blockIdx.x / tiles) * kRows;
  const int64 tile_column = static_cast<int64>(blockIdx.x % tiles) * kColumns;
  const uint32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane / kQuad, member = lane % kQuad;
  const uint32 group = warp % kHigh * kDown + quad / kBeside, chunk_of_tile = warp / kHigh * kBeside + quad % kBeside;
  const int64 row = tile_row + 4 * group, chunk = tile_column / kChunk + chunk_of_tile;
  const auto place_of = [](uint32 group, uint32 run) { return group ^ run % (32 / kDown) * kDown; };

  uint2 codes[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    codes[r] = make_uint2(0, 0);
    if (chunk < across && row + r < a.rows)
      codes[r] = __ldg(reinterpret_cast<const uint2*>(a.qweight) + ((row + r) * across + chunk) * kQuad + member);
  }
  Table own = {}, tables[4];
  if (chunk < across && row + member < a.rows)
    own = Table::make<Scale, Out>(a, (row + member) * across + chunk, row + member);
#pragma unroll
  for (int r = 0; r < 4; ++r) tables[r] = own.of(r, kQuad);
  const uint32 run = chunk_of_tile * kQuad + member;
  uint32* const to = words + run * kRun * kGroups + place_of(group, run);
#pragma unroll
  for (int c = 0; c < kRun; c += 4) {
    uint32 bytes[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) bytes[r] = tables[r]((c < 8 ? codes[r].x : codes[r].y) >> c % 8 * 4);
    transpose(bytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[(c + (i ^ 1)) * kGroups] = bytes[i];  // the first is in the high nibble
  }
  __syncthreads();

  if ((a.rows | a.pitch) % 16 == 0) {
    // A thread's vectors are below each other in out.
    constexpr uint32 kVectors = kRows / 16, kStep = kThreads / kVectors;
    const uint32 part = threadIdx.x % kVectors, first = threadIdx.x / kVectors;
    const int64 n = tile_row + 16 * part;
#pragma unroll
    for (uint32 column = first, i = 0; i < kColumns / kStep; column += kStep, ++i) {
      const int64 k = tile_column + column;
      const uint32 vector = column * kVectors + place_of(4 * part, column / kRun) / 4;
      if (k < a.columns && n < a.rows) *reinterpret_cast<uint4*>(a.out + k * a.pitch + n) = tile[vector];
    }
  } else {  // rows of out are not aligned
#pragma unroll 1
    for (uint32 i = threadIdx.x; i < kColumns * kRows; i += kThreads) {
      const uint32 column = i / kRows, of_tile = i % kRows, byte = of_tile % 4;
      const int64 k = tile_column + column, n = tile_row + of_tile;
      if (k < a.columns && n < a.rows)
        a.out[k * a.pitch + n] = words[column * kGroups + place_of(of_tile / 4, column / kRun)] >> 8 * byte;
    }
  }
}
