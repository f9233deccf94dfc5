// A warp on the CPU, enough of one for csrc/kbit.cu: 32 fibers in step, which meet at every shuffle.

#include "cuda.h"

#define asm(...) __builtin_trap()  // conversions to and from fp16: not to be run here

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
  blockDim.x = kLanes;
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
