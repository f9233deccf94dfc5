// A program of up to 512 threads on the CPU, enough of one for linear_rows*.cu and requantize.cu: fibers. A
// warp's are in step, and meet at every shuffle and product of tensor cores. Warps go on in any order between two
// barriers: at random, one behind all others, or one after the other, so that what they do to each other's memory
// is found.

#include <algorithm>
#include <numeric>
#include <random>

#include "cuda.h"

alignas(16) char shared[232448];

namespace block {

constexpr int kThreads = 512, kLanes = 32, kStack = 1 << 16;
inline int count = kThreads;  // of the program
inline ucontext_t scheduler, threads[kThreads];
inline bool running[kThreads];
inline std::function<void()> kernel;

inline bool at_barrier[kThreads];

inline void meet(bool block = false) {
  at_barrier[threadIdx.x] = block;
  swapcontext(&threads[threadIdx.x], &scheduler);
}

inline void enter() {
  kernel();
  running[threadIdx.x] = false;  // and on to the scheduler, the context's successor
}

// Lets each lane of a warp go on to where it meets the others; returns whether it still runs.
inline bool step(int warp) {
  const int first = warp * kLanes;
  for (int i = first; i < first + kLanes; ++i) {
    if (!running[i]) std::abort();
    threadIdx = {static_cast<unsigned>(i), 0};
    swapcontext(&scheduler, &threads[i]);
  }
  for (int i = first; i < first + kLanes; ++i)  // out of step
    if (running[i] != running[first] || at_barrier[i] != at_barrier[first]) std::abort();
  return running[first];
}

inline void run_program(std::minstd_rand& random) {
  std::vector<int> free(count / kLanes), waiting;
  for (int& warp : free) warp = static_cast<int>(&warp - free.data());
  bool ended = false;
  for (unsigned order = random() % 3; !free.empty() || !waiting.empty();) {
    if (free.empty()) {
      if (ended) std::abort();  // returned before the others came to a barrier
      free.swap(waiting);
      std::shuffle(free.begin(), free.end(), random);
      order = random() % 3;
    }
    size_t next = 0;
    if (order == 0) next = random() % free.size();
    if (order == 1 && free.size() > 1) next = 1 + random() % (free.size() - 1);
    const int warp = free[next];
    const bool runs = step(warp);
    if (runs && !at_barrier[warp * kLanes]) continue;
    free.erase(free.begin() + next);
    if (runs)
      waiting.push_back(warp);
    else
      ended = true;
  }
}

inline void run(unsigned columns, unsigned rows, std::function<void()> body) {
  const std::unique_ptr<char[]> stacks(new char[count * kStack]);
  std::minstd_rand random;
  kernel = std::move(body);
  gridDim = {columns, rows}, blockDim.x = count;
  for (unsigned program = 0; program < columns * rows; ++program) {
    blockIdx = {program % columns, program / columns};
    std::memset(shared, 0x7f, sizeof shared);  // as fp32 3.4e38
    for (int i = 0; i < count; ++i) {
      running[i] = true;
      getcontext(&threads[i]);
      threads[i].uc_stack.ss_sp = stacks.get() + i * kStack;
      threads[i].uc_stack.ss_size = kStack;
      threads[i].uc_link = &scheduler;
      makecontext(&threads[i], enter, 0);
    }
    run_program(random);
  }
}

// What every thread of the block gives, once those of its warp have.
template <class T>
const T* given(const T& value) {
  static T values[2][kThreads];
  static int turn[kThreads];
  const int thread = threadIdx.x, now = turn[thread]++ & 1;
  values[now][thread] = value;
  meet();
  return values[now];
}

// Copies to shared memory that are under way. They arrive when they are waited for, or at once: both are
// what a GPU may do.
inline bool at_once;
struct Copy {
  unsigned to;
  const void* from;
  int bytes = 16, count = 16;
  void arrive() const {
    std::memset(shared + to, 0, bytes);
    std::memcpy(shared + to, from, count);
  }
};
inline std::vector<Copy> under_way[kThreads];

inline void copy(const Copy& copy) {
  if (copy.to % copy.bytes || reinterpret_cast<size_t>(copy.from) % copy.bytes) std::abort();
  if (at_once)
    copy.arrive();
  else
    under_way[threadIdx.x].push_back(copy);
}
inline void copy16(unsigned to, const void* from) { copy({to, from}); }
inline void copy4(unsigned to, const void* from, int count) { copy({to, from, 4, count}); }
inline void wait_for_all() {
  for (const Copy& copy : under_way[threadIdx.x]) copy.arrive();
  under_way[threadIdx.x].clear();
}

// Bytes of two words, of which a place from 8 on stands for a sign.
inline unsigned permute(unsigned low, unsigned high, unsigned places) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned byte = both >> 8 * (places >> 4 * i & 7) & 255;
    if (places >> 4 * i & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << 8 * i;
  }
  return out;
}

inline float half(unsigned short raw) {
  const int exponent = raw >> 10 & 31;
  const float magnitude = std::ldexp(static_cast<float>((raw & 1023) + (exponent ? 1024 : 0)), (exponent ? exponent : 1) - 25);
  return raw & 0x8000 ? -magnitude : magnitude;
}

// mma.m16n8k16 of bf16, in float64.
inline float bf16(unsigned word, int high) {
  const unsigned bits = high ? word & 0xffff0000u : word << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
struct Fragments {
  unsigned a[4], b[2];
};
inline void multiply(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const Fragments* all = given(Fragments{{a0, a1, a2, a3}, {b0, b1}}) + threadIdx.x / 32 * 32;
  const int quad = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) {
    double total = sum[i];
    for (int k = 0; k < 16; ++k) {
      const int place = k % 8 / 2, high = k % 2;
      const unsigned a = all[quad * 4 + place].a[i / 2 + k / 8 * 2], b = all[(2 * member + i % 2) * 4 + place].b[k / 8];
      total += static_cast<double>(bf16(a, high)) * bf16(b, high);
    }
    sum[i] = static_cast<float>(total);
  }
}

}  // namespace block

inline void __syncthreads() { block::meet(true); }
inline void __syncwarp() { block::meet(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const unsigned source = threadIdx.x ^ mask;
  return block::given(value)[source];
}

template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  const int first = static_cast<int>(threadIdx.x) / width * width;
  return block::given(value)[first + lane];
}

// What a warp's numbers come to, joined one by one.
template <class Join>
unsigned joined(unsigned value, const Join& join) {
  const unsigned* const all = block::given(value) + threadIdx.x / 32 * 32;
  return std::accumulate(all + 1, all + 32, all[0], join);
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) { return joined(value, std::plus<unsigned>()); }
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return joined(value, [](unsigned a, unsigned b) { return std::min(a, b); });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return joined(value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline bool __any_sync(unsigned, bool is) { return __reduce_max_sync(0, is); }

template <class T>
T __ldg(const T* p) {
  if (reinterpret_cast<size_t>(p) % alignof(T)) std::abort();
  return *p;
}
inline size_t __cvta_generic_to_shared(const void* p) { return static_cast<const char*>(p) - shared; }
