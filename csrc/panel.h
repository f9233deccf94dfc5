// A few rows of packed weights: how they are described, and the values of a block of nibbles.
#pragma once

#include <cstdint>
#include <vector>

#include "lanes.h"

extern "C" {

struct QfuseFormat {
  int64_t block_shift;   // log2 of the elements that share a scale
  int64_t outer_shift;   // log2 of the scales that share an outer one, where rows do not
  int32_t planes;        // how many bit planes hold codes in blocks of 32, or 0: they are nibbles
  int32_t high_first;    // whether the first of two codes lies in the high nibble
  int32_t zero;          // what a zero point is: kNone, kCode, kValue
  int32_t by_row;        // whether each row begins a block
  int32_t tiled;         // whether scales lie in tiles of 128 rows and 4 blocks
  int32_t outer_by_row;  // whether a row has one outer scale
  int32_t divides;       // whether scales are divided by the outer one
  int32_t values;        // how many a code may have
};

struct QfuseWeight {
  const void* codes;
  const float* values;  // of the codes
  const void* scale;
  const void* zero_point;     // nullptr where there are none
  const float* scale_values;  // of the 256 codes of a scale, or nullptr
  const float* outer;         // that scales are multiplied with, or nullptr
  const float* offset;        // one that is added then, or nullptr
  const void* bias;           // in the dtype of x, or nullptr
  const void* a;              // [rank, columns], or nullptr
  const void* b;              // [rows, rank]
  void* out;                  // [count, rows]
  int64_t rows;
  int64_t rank;
  int32_t scale_dtype;
  int32_t zero_dtype;
  int32_t adapter_dtype;
  float scaling;
};
}

enum Zero { kNone = 0, kCode = 1, kValue = 2 };  // (code - zero) * scale; code * scale + zero

// Floats that start a line of the cache: a vector that lies across two takes two loads.
class Buffer {
 public:
  float* reserve(int64_t count) {
    values_.resize(count + kLine);
    const auto address = reinterpret_cast<uintptr_t>(values_.data());
    return start_ = values_.data() + (-address % (kLine * sizeof(float))) / sizeof(float);
  }
  float* data() const { return start_; }

 private:
  static constexpr int64_t kLine = 16;
  std::vector<float> values_;
  float* start_ = nullptr;
};

// A few rows of weights.
struct Panel {
  const uint8_t* codes;
  int64_t columns;
  int64_t step;         // columns that share a scale, from each multiple on
  const float* scales;  // columns / step of each row
  const float* zeros;   // likewise, if there are any
  int zero;
  Table values;  // of the 16 codes, before they are scaled
};

template <int kZero>
inline Table scaled(const Panel& panel, int64_t i) {
  const Lanes by = splat(panel.scales[i]);
  if constexpr (kZero == kNone) return scaled(panel.values, by);
  const Lanes nothing = splat(0.0f), point = splat(panel.zeros[i]);
  return kZero == kCode ? affine(panel.values, by, point, nothing)
                        : affine(panel.values, by, nothing, point);
}
