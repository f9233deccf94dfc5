// A warp on the CPU, enough of one for csrc/kbit.cu: 32 fibers in step, which meet at every shuffle.

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>

#define __device__
#define __global__
#define asm(...) __builtin_trap()  // conversions to and from fp16: not to be run here

struct Index {
  unsigned x;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline Index threadIdx, blockIdx, blockDim{32};

namespace warp {

constexpr int kLanes = 32, kStack = 1 << 18;
inline ucontext_t scheduler, lanes[kLanes];
inline bool running[kLanes];
inline std::function<void()> kernel;

inline void enter() {
  kernel();
  running[threadIdx.x] = false;  // and on to the scheduler, the context's successor
}

// `body` as a grid of `count` programs of one warp each.
inline void run(int count, std::function<void()> body) {
  const std::unique_ptr<char[]> stacks(new char[kLanes * kStack]);
  kernel = std::move(body);
  for (int program = 0; program < count; ++program) {
    blockIdx.x = program;
    for (int i = 0; i < kLanes; ++i) {
      running[i] = true;
      getcontext(&lanes[i]);
      lanes[i].uc_stack.ss_sp = stacks.get() + i * kStack;
      lanes[i].uc_stack.ss_size = kStack;
      lanes[i].uc_link = &scheduler;
      makecontext(&lanes[i], enter, 0);
    }
    while (running[kLanes - 1]) {
      for (int i = 0; i < kLanes; ++i) {
        threadIdx.x = i;
        if (!running[i]) std::abort();  // returned before the others: out of step
        swapcontext(&scheduler, &lanes[i]);
      }
    }
  }
}

// `value` of the lane `source`, once all lanes have given theirs.
template <class T>
T exchanged(T value, int source) {
  static T given[2][kLanes];
  static int turn[kLanes];
  const int lane = threadIdx.x, now = turn[lane]++ & 1;
  given[now][lane] = value;
  swapcontext(&lanes[lane], &scheduler);
  return given[now][source];
}

}  // namespace warp

template <class T>
T __shfl_sync(unsigned, T value, int source, int width = 32) {
  const int lane = threadIdx.x;
  return warp::exchanged(value, (lane & ~(width - 1)) | (source & (width - 1)));
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return warp::exchanged(value, static_cast<int>(threadIdx.x) ^ mask);
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, int shift) {
  return high << shift | low >> (32 - shift);
}

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
