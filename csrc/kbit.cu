// Quantize and dequantize k-bit weights on a GPU. A value is codebook[code] * absmax, and a block is 32
// codes in K bit planes.
//
// A warp works on 32 blocks at a time, which are 1024 elements. A lane reads or writes 8 neighbouring
// elements in each of the four blocks of its quad (bitplanes.cuh). Packed words are moved in the order
// in which they lie, and values in 16-byte vectors where the layout allows it. Tables are looked up
// with shuffles: lane i of a warp holds entry i. Indices of elements are 64 bits wide.
//
// The results are those of the eager reference bit for bit (inductor_q.ops.quantize_kbit,
// inductor_q.formats.kbit), provided that the compiler does not contract products and sums
// (--fmad=false).

#include "bitplanes.cuh"
#include "numeric.cuh"

constexpr int kBlock = 32;                // elements that share a scale
constexpr int kRun = 8;                   // neighbouring elements that a lane has in a block
constexpr int kApart = 8;                 // distance from one block of a quad to its next (see Lane)

// This says where values lie. kElements: anywhere, so that they are moved one by one. kRows: in rows
// that hold whole runs of 8, each aligned to 16 bytes. kFlat: in such runs without gaps between rows,
// so that no division is needed to find one.
enum Layout { kElements, kRows, kFlat };

// The 8 quads of a warp have neighbouring blocks, and the four blocks of one quad are 8 apart. So the
// vectors that a warp moves at one time are 512 contiguous bytes of 16-bit values.
struct Lane {
  int lane, member;   // the place in the warp, and the place in the quad
  int64 mine, first;  // the block whose packed words this lane holds, and the quad's first block

  __device__ Lane() {
    lane = threadIdx.x & 31;
    member = lane & 3;
    first = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x - lane + lane / 4;
    mine = first + member * kApart;
  }

  // Returns the first of the lane's elements in the quad's block `s`.
  __device__ int64 element(int s) const { return (first + s * kApart) * kBlock + member * kRun; }

  // Returns what `value` is in the lane that holds the words of the quad's block `s`.
  template <class T>
  __device__ T of_block(T value, int s) const {
    return __shfl_sync(kWarp, value, s, 4);
  }
};

template <int K, bool kVector>
__device__ void load_planes(const uint32* source, uint32* planes) {
  if constexpr (kVector && K == 4) {
    const uint4 words = *reinterpret_cast<const uint4*>(source);
    planes[0] = words.x, planes[1] = words.y, planes[2] = words.z, planes[3] = words.w;
  } else if constexpr (kVector && K == 2) {
    const uint2 words = *reinterpret_cast<const uint2*>(source);
    planes[0] = words.x, planes[1] = words.y;
  } else {
#pragma unroll
    for (int p = 0; p < K; ++p) planes[p] = source[p];
  }
}

template <int K, bool kVector>
__device__ void store_planes(const uint32* planes, uint32* target) {
  if constexpr (kVector && K == 4) {
    *reinterpret_cast<uint4*>(target) = make_uint4(planes[0], planes[1], planes[2], planes[3]);
  } else if constexpr (kVector && K == 2) {
    *reinterpret_cast<uint2*>(target) = make_uint2(planes[0], planes[1]);
  } else {
#pragma unroll
    for (int p = 0; p < K; ++p) target[p] = planes[p];
  }
}

template <class Out>
__device__ void store_run(const float (&values)[kRun], typename Out::Raw* target) {
  if constexpr (sizeof(typename Out::Raw) == 4) {
#pragma unroll
    for (int e = 0; e < kRun; e += 4)
      *reinterpret_cast<float4*>(target + e) =
          make_float4(values[e], values[e + 1], values[e + 2], values[e + 3]);
  } else {
    *reinterpret_cast<uint4*>(target) =
        make_uint4(Out::pack(values[0], values[1]), Out::pack(values[2], values[3]),
                   Out::pack(values[4], values[5]), Out::pack(values[6], values[7]));
  }
}

template <class In>
__device__ void load_run(const typename In::Raw* source, float (&values)[kRun]) {
  constexpr int kVectors = sizeof(typename In::Raw) * kRun / 16;
  union {
    uint4 vectors[kVectors];
    typename In::Raw raw[kRun];
  };
#pragma unroll
  for (int v = 0; v < kVectors; ++v) vectors[v] = reinterpret_cast<const uint4*>(source)[v];
#pragma unroll
  for (int e = 0; e < kRun; ++e) values[e] = In::decode(raw[e]);
}

// This finds element `i` of a matrix whose rows have `cols` elements and lie `stride` apart.
struct Place {
  int64 offset;  // where its row begins
  int64 col;

  __device__ Place(int64 i, int64 cols, int64 stride) {
    const bool narrow = (i >> 32) == 0;  // a 64-bit division costs as much as a run
    const int64 row = narrow ? static_cast<uint32>(i) / static_cast<uint32>(cols) : i / cols;
    offset = row * stride;
    col = i - row * cols;
  }

  __device__ void advance(int64 count, int64 cols, int64 stride) {
    for (col += count; col >= cols; col -= cols) offset += stride;
  }
};

// Writes out[row, col] = codebook[code] * absmax, rounded once.
//
// `qweight` has K words for each block and is aligned to 16 bytes, except under kElements. `absmax` has
// one entry for each block, and `codebook` has 2^K. `out` has `numel` elements in rows of `cols`, which
// lie `stride` apart.
template <int K, class Absmax, class Out, Layout kLayout>
__global__ void dequantize(const uint32* __restrict__ qweight,
                           const typename Absmax::Raw* __restrict__ absmax,
                           const float* __restrict__ codebook, typename Out::Raw* __restrict__ out,
                           int64 numel, int64 cols, int64 stride) {
  constexpr int kWords = kField<K>;
  const Lane lane;
  const int64 blocks = (numel + kBlock - 1) / kBlock;
  const float entry = codebook[lane.lane & ((1 << K) - 1)];

  uint32 words[kWords] = {};
  float scale = 0.0f;
  if (lane.mine < blocks) {
    load_planes<K, kLayout != kElements>(qweight + lane.mine * K, words);
    scale = Absmax::decode(absmax[lane.mine]);
  }
  const QuadTranspose transpose(lane.lane);
#pragma unroll
  for (int p = 0; p < K; ++p) words[p] = transpose(words[p]);
  transpose_bits(words);

  Place place(lane.element(0), cols, stride);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const float block_scale = lane.of_block(scale, s);
    float values[kRun];
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      const int c = s * kRun + e;
      // The bits above the code need no mask: a shuffle of width 2^K reads the lowest K bits only.
      const uint32 code = words[c % kWords] >> (c / kWords * kWords);
      values[e] = __shfl_sync(kWarp, entry, code, 1 << K) * block_scale;
    }
    const int64 start = lane.element(s);
    if constexpr (kLayout == kFlat) {
      if (start < numel) store_run<Out>(values, out + start);
    } else if constexpr (kLayout == kRows) {
      if (start < numel) store_run<Out>(values, out + place.offset + place.col);
      place.advance(kApart * kBlock, cols, stride);
    } else {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        if (start + e < numel) out[place.offset + place.col] = Out::encode(values[e]);
        place.advance(1, cols, stride);
      }
      place.advance(kApart * kBlock - kRun, cols, stride);
    }
  }
}

// The thresholds between neighbouring codes are a binary search tree. A path through it is a number
// with a bit for each turn, and lane i of a warp holds, for each level, the node that path i leads to.
template <int K>
struct SearchTree {
  float nodes[K];

  __device__ SearchTree(const float* codebook, int lane) {
#pragma unroll
    for (int level = 0; level < K; ++level) {
      const int path = lane & ((1 << level) - 1);
      const int i = ((2 * path + 1) << (K - 1 - level)) - 1;
      // Adding 0 turns a threshold of -0 into +0: its sign bit would count as "below".
      nodes[level] = (codebook[i] + codebook[i + 1]) * 0.5f + 0.0f;
    }
  }

  // Shifts `word` to the left by K bits and puts there how many thresholds are below `value`. Each turn
  // is the sign of a difference. A shuffle of width 2^level reads only the turns taken so far.
  __device__ uint32 append(uint32 word, float value) const {
#pragma unroll
    for (int level = 0; level < K; ++level) {
      const float threshold = __shfl_sync(kWarp, nodes[level], word, 1 << level);
      word = __funnelshift_l(__float_as_uint(threshold - value), word, 1);
    }
    return word;
  }
};

// This computes x / scale, rounded once, and 0 where the scale is zero or infinite.
//
// It multiplies x with the rounded reciprocal and corrects the product once. That is exact (Markstein)
// unless the divisor's significand is all ones, and the significands of scales end in zeros. Where x is
// below 2^-114 it may not be: the remainder underflows, and the quotient, which is below 2^-90, may be
// one unit off.
struct Divisor {
  float scale, reciprocal;

  __device__ explicit Divisor(float s) : scale(1.0f), reciprocal(0.0f) {
    if (s > 0.0f && s < 0x1p17f) scale = s, reciprocal = __frcp_rn(s);
  }

  __device__ float divide(float x) const {
    const float quotient = x * reciprocal;
    return __fmaf_rn(__fmaf_rn(-quotient, scale, x), reciprocal, quotient);
  }
};

// Every lane of a quad has a maximum for each of its four blocks. Lane t gets the largest of those for
// block t.
__device__ float quad_max(const float (&largest)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
  float low = odd ? largest[1] : largest[0], up = odd ? largest[3] : largest[2];
  low = fmaxf(low, __shfl_xor_sync(kWarp, odd ? largest[0] : largest[1], 1));
  up = fmaxf(up, __shfl_xor_sync(kWarp, odd ? largest[2] : largest[3], 1));
  return fmaxf(high ? up : low, __shfl_xor_sync(kWarp, high ? low : up, 2));
}

// Quantizes the `numel` elements of `x`, which lie one after the other, into `qweight` and `absmax`.
//
// The absmax of a block is encoded first. The code of an element is the number of thresholds below
// x / decoded absmax. With kVector, `x` and `qweight` are aligned to 16 bytes and `numel` is a multiple
// of 8. Codes behind the last element are 0.
template <int K, class Absmax, class In, bool kVector>
__global__ void quantize(const typename In::Raw* __restrict__ x, const float* __restrict__ codebook,
                         uint32* __restrict__ qweight, typename Absmax::Raw* __restrict__ absmax,
                         int64 numel) {
  constexpr int kWords = kField<K>;
  const Lane lane;
  const int64 blocks = (numel + kBlock - 1) / kBlock;
  const SearchTree<K> tree(codebook, lane.lane);

  float values[4][kRun] = {};
  float largest[4];
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const int64 start = lane.element(s);
    if constexpr (kVector) {
      if (start < numel) load_run<In>(x + start, values[s]);
    } else {
#pragma unroll
      for (int e = 0; e < kRun; ++e)
        if (start + e < numel) values[s][e] = In::decode(x[start + e]);
    }
    largest[s] = 0.0f;
#pragma unroll
    for (int e = 0; e < kRun; ++e) largest[s] = fmaxf(largest[s], fabsf(values[s][e]));
  }
  const typename Absmax::Raw encoded = Absmax::encode(quad_max(largest, lane.lane));
  const Divisor own(Absmax::decode(encoded));

  uint32 words[kWords] = {};
#pragma unroll
  for (int s = 3; s >= 0; --s) {  // backwards, since what is appended last lies lowest
    Divisor divisor = own;
    divisor.scale = lane.of_block(own.scale, s);
    divisor.reciprocal = lane.of_block(own.reciprocal, s);
#pragma unroll
    for (int e = kRun - 1; e >= 0; --e) {
      uint32& word = words[(s * kRun + e) % kWords];
      word = tree.append(word << (kWords - K), divisor.divide(values[s][e]));
    }
  }
  transpose_bits(words);
  const QuadTranspose transpose(lane.lane);
#pragma unroll
  for (int p = 0; p < K; ++p) words[p] = transpose(words[p]);

  if (lane.mine < blocks) {
    const int64 left = numel - lane.mine * kBlock;
    if (left < kBlock) {
#pragma unroll
      for (int p = 0; p < K; ++p) words[p] &= (1u << left) - 1u;
    }
    store_planes<K, kVector>(words, qweight + lane.mine * K);
    absmax[lane.mine] = encoded;
  }
}
