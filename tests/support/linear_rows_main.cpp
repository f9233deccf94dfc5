// Compares csrc/linear_rows.cpp with sums in double, for formats and numbers of rows; prints for each
// the error relative to the largest result. It needs nothing of torch, so it runs under an emulator.

#include <cstdio>
#include <random>

#include "linear_rows.cpp"

namespace {

constexpr int64_t kRowsOfWeight = 37, kRank = 4;

float rounded(float value, int dtype) {
  float stored[1] = {};
  store(stored, 0, value, dtype);
  return widen(stored, 0, dtype);
}

struct Case {
  int dtype, zero, high_first;
  int64_t count, columns, shift;
  int scales = 0;  // 0: floats; 1: nested; 2: codes, times a row's; 3: codes over one's, in tiles
  int planes = 0;
};

int code_at(const Case& c, const std::vector<uint8_t>& codes, int64_t i) {
  if (!c.planes) {
    const bool is_high = (i % 2 == 0) == (c.high_first != 0);
    return is_high ? codes[i / 2] >> 4 : codes[i / 2] & 15;
  }
  int code = 0;
  for (int p = 0; p < c.planes; ++p)
    code |= (codes[(i / 32 * c.planes + p) * 4 + i % 32 / 8] >> i % 8 & 1) << p;
  return code;
}

// The scale of a block of a row, of so many.
int64_t place(const Case& c, int64_t row, int64_t g, int64_t blocks) {
  if (c.scales != 3) return row * blocks + g;
  const int64_t tile = row / 128 * ((blocks + 3) / 4) + g / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + g % 4;
}

double error_of(const Case& c) {
  std::mt19937 numbers(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(c.planes ? 1 << c.planes : 16);
  for (float& value : values) value = normal(numbers);
  const int64_t of_row = c.columns >> c.shift, blocks = kRowsOfWeight * of_row + 4096;
  std::vector<uint8_t> codes(kRowsOfWeight * c.columns * (c.planes ? c.planes : 4) / 8 + 64);
  std::vector<uint8_t> scale_codes(blocks);
  for (uint8_t& code : codes) code = numbers() & 255;
  for (uint8_t& code : scale_codes) code = numbers() & 255;
  std::vector<float> scales(blocks), zeros(blocks), book(256), outer(blocks / 256 + kRowsOfWeight), offset{0.5f};
  for (float& scale : scales) scale = 1.0f + std::abs(normal(numbers));
  for (float& zero : zeros) zero = normal(numbers);
  for (float& value : book) value = normal(numbers);
  for (float& value : outer) value = 1.0f + std::abs(normal(numbers));
  std::vector<float> x(c.count * c.columns), a(kRank * c.columns), b(kRowsOfWeight * kRank), bias(kRowsOfWeight);
  std::vector<float> x_stored(x.size()), bias_stored(bias.size());  // room for any dtype
  const auto fill = [&](std::vector<float>& wide, std::vector<float>& stored) {
    for (size_t i = 0; i < wide.size(); ++i) {
      wide[i] = rounded(normal(numbers), c.dtype);
      store(stored.data(), i, wide[i], c.dtype);
    }
  };
  fill(x, x_stored);
  fill(bias, bias_stored);
  for (float& value : a) value = normal(numbers);
  for (float& value : b) value = normal(numbers);
  std::vector<float> out(c.count * kRowsOfWeight);
  QfuseFormat format{};
  format.block_shift = c.shift;
  format.outer_shift = c.scales == 1 ? 8 : 63;
  format.planes = c.planes;
  format.high_first = c.high_first;
  format.zero = c.zero;
  format.by_row = c.scales >= 2;
  format.outer_by_row = c.scales == 2;
  format.tiled = format.divides = c.scales == 3;
  format.values = static_cast<int32_t>(values.size());
  QfuseWeight weight{};
  weight.codes = codes.data();
  weight.values = values.data();
  weight.scale = c.scales ? static_cast<const void*>(scale_codes.data()) : scales.data();
  weight.scale_dtype = c.scales ? kUInt8 : kFloat32;
  if (c.scales) weight.scale_values = book.data(), weight.outer = outer.data();
  if (c.scales == 1) weight.offset = offset.data();
  if (c.zero != kNone) weight.zero_point = zeros.data();
  weight.zero_dtype = kFloat32;
  weight.bias = bias_stored.data();
  weight.a = a.data(), weight.b = b.data(), weight.rank = kRank, weight.adapter_dtype = kFloat32;
  weight.scaling = 0.5f;
  weight.out = out.data(), weight.rows = kRowsOfWeight;
  const int64_t step = std::min<int64_t>(int64_t{1} << c.shift, c.columns);
  qfuse_linear_rows(&format, &weight, 1, x_stored.data(), c.count, c.columns, step, c.dtype, 0);

  double most = 0, largest = 0;
  for (int64_t m = 0; m < c.count; ++m) {
    for (int64_t n = 0; n < kRowsOfWeight; ++n) {
      double sum = bias[n];
      for (int64_t k = 0; k < c.columns; ++k) {
        const int64_t block = place(c, n, k >> c.shift, of_row);
        const double value = values[code_at(c, codes, n * c.columns + k)], coded = book[scale_codes[block]];
        const double scale = c.scales == 0   ? scales[block]
                             : c.scales == 1 ? coded * outer[block >> 8] + offset[0]
                             : c.scales == 2 ? coded * outer[n]
                                             : coded / outer[0];
        const double zero = zeros[block];
        const double decoded = c.zero == kNone   ? value * scale
                               : c.zero == kCode ? (value - zero) * scale
                                                 : value * scale + zero;
        sum += decoded * x[m * c.columns + k];
      }
      for (int64_t j = 0; j < kRank; ++j) {
        double projected = 0;
        for (int64_t k = 0; k < c.columns; ++k) projected += double{x[m * c.columns + k]} * a[j * c.columns + k];
        sum += projected * weight.scaling * b[n * kRank + j];
      }
      most = std::max(most, std::abs(widen(out.data(), m * kRowsOfWeight + n, c.dtype) - sum));
      largest = std::max(largest, std::abs(sum));
    }
  }
  return most / largest;
}

}  // namespace

int main() {
  for (int dtype : {kFloat32, kBFloat16, kFloat16})
    for (int zero : {kNone, kCode, kValue})
      for (int64_t count : {1, 3, 8, 11})
        for (int64_t columns : {64, 320})
          for (int high_first : {0, 1}) {
            const Case c{dtype, zero, high_first, count, columns, 6, high_first};
            std::printf("%d %g\n", dtype, error_of(c));
          }
  for (int dtype : {kFloat32, kBFloat16}) {  // blocks that end inside of what is looked up together
    const Case c{dtype, kNone, 1, 4, 96, 2};
    std::printf("%d %g\n", dtype, error_of(c));
  }
  for (int dtype : {kFloat32, kBFloat16, kFloat16})
    for (int64_t count : {1, 3, 8, 11})
      for (int64_t columns : {96, 320}) {
        for (int planes : {2, 3, 4, 5}) {  // small blocks: of bit planes, and of nibbles
          const Case c{dtype, kNone, 0, count, columns, 5, 0, planes};
          std::printf("%d %g\n", dtype, error_of(c));
        }
        for (int scales : {1, 2, 3}) {
          const Case c{dtype, kNone, scales == 1, count, columns, 4, scales};
          std::printf("%d %g\n", dtype, error_of(c));
        }
      }
  std::printf("%d lanes\n", kLanes);
}
